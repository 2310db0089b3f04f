"""The arms: the same training with shares that move, that stay, and that were planned for the throttled device."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from benchmarks.hetero_speedup.arms import fit
from benchmarks.hetero_speedup.case import Case
from benchmarks.hetero_speedup.gate import Gate
from benchmarks.hetero_speedup.model import DigitClassifier
from lightning_hetero.cluster import Cluster, SpeedChange
from lightning_hetero.strategies import HeteroFSDPStrategy


def moving(case: Case, rank: int, gate: Gate) -> None:
    """hetero_fsdp as it comes: measured, planned and rebalanced."""
    _train(case, rank, gate, rebalance=True)


def staying(case: Case, rank: int, gate: Gate) -> None:
    """The same without rebalancing."""
    _train(case, rank, gate, rebalance=False)


def throttled_from_the_start(cluster: Cluster) -> Cluster:
    """The cluster as it is after the last change of each device: what an ideal plan is made for."""
    devices = tuple(
        replace(device, speed_schedule=(SpeedChange(0, device.speed_schedule[-1].factor),))
        if device.speed_schedule
        else device
        for device in cluster.devices
    )
    return replace(cluster, devices=devices)


def moves_path(case: Case) -> Path:
    """Where an arm leaves its moves when it ends."""
    assert case.cluster_path is not None
    return case.cluster_path.with_name(f"{case.name}.moves.json")


def _train(case: Case, rank: int, gate: Gate, *, rebalance: bool) -> None:
    strategy = HeteroFSDPStrategy(case.cluster_path, rebalance=rebalance, check_loss="off", summary=False)
    fit(case, DigitClassifier(case.size), strategy, [], gate)
    moves = strategy.rebalancer.moves
    if rank == 0 and moves is not None:
        moves_path(case).write_text(json.dumps(moves.to_state()))
