"""The arms: each runs in every one of its ranks and trains until the gate says stop."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.functional import cross_entropy

from benchmarks.hetero_speedup.case import Case
from benchmarks.hetero_speedup.doubled import DoubledWork
from benchmarks.hetero_speedup.gate import Gate, GateCallback
from benchmarks.hetero_speedup.model import (
    DigitClassifier,
    FullyShardedDigitClassifier,
    digit_loader,
    shard,
)
from benchmarks.hetero_speedup.ranks import forget_peers
from lightning_hetero.callbacks.emulated_devices import EmulatedDevices
from lightning_hetero.cluster import Cluster, Device
from lightning_hetero.plan import ShardPlan
from lightning_hetero.strategies import HeteroFSDPStrategy


def hetero_fsdp(case: Case, rank: int, gate: Gate) -> dict[str, Any]:
    """Our strategy, which measures the ranks and splits the batch by itself."""
    # the cluster file turns the emulation on by itself
    strategy = HeteroFSDPStrategy(cluster=case.cluster_path)
    fit(case, DigitClassifier(case.size), strategy, _slowness(case, emulate=False), gate)
    # shares may have moved since they were planned
    return {} if strategy.plan is None else {"batch_shares_at_end": strategy.plan.batch_shares}


def even_fsdp2(case: Case, rank: int, gate: Gate) -> None:
    """Lightning's own FSDP2 strategy, every rank with the same number of samples."""
    strategy = ModelParallelStrategy(data_parallel_size=case.world_size, tensor_parallel_size=1)
    fit(case, FullyShardedDigitClassifier(case.size), strategy, _slowness(case, emulate=True), gate)


def solo(case: Case, rank: int, gate: Gate) -> None:
    """One device alone, without any parallel strategy; ``case`` is that of :func:`solo_case`."""
    fit(case, DigitClassifier(case.size), "auto", _slowness(case, emulate=True), gate)


def side_by_side(case: Case, rank: int, gate: Gate) -> None:
    """All devices at once, each alone with the samples that its work earns: what the machine does by itself."""
    forget_peers()
    paces = [0.5 if each in case.doubled_ranks else 1.0 for each in range(case.world_size)]
    own = replace(case, solo_batch=round(case.global_batch * paces[rank] / sum(paces)))
    solo(solo_case(own, rank, None), 0, gate)


def solo_case(case: Case, rank: int, cluster_path: Any) -> Case:
    """The case of the device of ``rank`` alone; its one-device cluster is written to ``cluster_path``."""
    if case.cluster_path is not None:
        cluster = Cluster.from_yaml(case.cluster_path)
        replace(cluster, devices=(cluster.devices[rank],)).to_yaml(cluster_path)
    return replace(
        case,
        world_size=1,
        global_batch=case.solo_batch,
        cluster_path=None if case.cluster_path is None else cluster_path,
        doubled_ranks=(0,) if rank in case.doubled_ranks else (),
    )


def hetero_equal(case: Case, rank: int, gate: Gate) -> None:
    """Our strategy on equal devices with equal shares: what differs from :func:`plain_fsdp2` is overhead."""
    fit(case, DigitClassifier(case.size), equal_strategy(case), [], gate)


def equal_strategy(case: Case, groups: tuple[tuple[int, ...], ...] = (), **options: Any) -> HeteroFSDPStrategy:
    """Our strategy by a plan of equal shares on equal devices; one group that shards fully, unless said otherwise."""
    core = Device(type="core", node="here", memory_bytes=8 * 2**30, speed_flops_per_s=None)
    cluster = Cluster("equal cores", (core,) * case.world_size)
    plan = ShardPlan(
        global_batch_size=case.global_batch,
        batch_shares=(case.local_batch,) * case.world_size,
        groups=groups or (tuple(range(case.world_size)),),
        device_types=cluster.device_types(),
        reshard_after_forward=options.get("reshard_after_forward", True),
    )
    return HeteroFSDPStrategy(cluster, plan, **options)


def plain_fsdp2(case: Case, rank: int, gate: Gate) -> None:
    """FSDP2 in a plain loop without Lightning, with the same options."""
    plain_loop(case, gate, (case.world_size,), lambda model, mesh: shard(model, mesh))


def plain_loop(case: Case, gate: Gate, mesh_shape: tuple[int, ...], apply: Callable[[Any, DeviceMesh], None]) -> None:
    """Train in a plain loop without Lightning a model that ``apply`` shards over a mesh."""
    torch.distributed.init_process_group("gloo")
    mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=("replicate", "shard")[-len(mesh_shape) :])
    model = case.size.build()
    apply(model, mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    loader = digit_loader(case.local_batch, case.local_batch, case.max_steps)
    gate.ready({"strategy": "plain loop"})
    running = gate.wait()
    for images, labels in loader:
        if not running:
            break
        optimizer.zero_grad()
        loss = cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        gate.step_done()
        running = gate.wait()
    torch.distributed.destroy_process_group()


def _slowness(case: Case, emulate: bool) -> list[Callback]:
    """What makes a rank's device slow: emulation, or work that is really done twice."""
    if case.doubled_ranks:
        return [DoubledWork(case.doubled_ranks)]
    if emulate and case.cluster_path is not None:
        return [EmulatedDevices(case.cluster_path)]
    return []


def fit(
    case: Case, module: LightningModule, strategy: Any, callbacks: list[Callback], gate: Gate, *, logger: Any = False
) -> None:
    """Train until the gate says stop."""
    trainer = Trainer(
        accelerator="cpu",
        devices=case.world_size,
        strategy=strategy,
        max_epochs=1,
        callbacks=[*callbacks, GateCallback(gate)],
        logger=logger,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, digit_loader(case.local_batch, case.global_batch, case.max_steps))
