"""Ranks as launchers start them: unequal numbers per node, and numbers that do not fit."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import yaml

import lightning_hetero  # noqa: F401 - the strategies' names
from lightning_hetero.cli import main
from lightning_hetero.strategies import rank_count
from tests.harness import WarmRanks


def trainer(**options: Any) -> list[Any]:
    made = pl.Trainer(strategy="hetero_fsdp", accelerator="cpu", logger=False, enable_checkpointing=False, **options)
    return [made.world_size, made.num_devices, str(made.strategy.root_device)]


def test_auto_is_what_torchrun_started_on_the_node(ranks: WarmRanks) -> None:
    assert ranks.run(2, trainer, process_group=False) == [[2, 2, "cpu"]] * 2


def test_a_rank_without_a_device_is_told(ranks: WarmRanks) -> None:
    fits, does_not = ranks.run_outcomes(2, trainer, devices=1, process_group=False)
    assert fits[0] == "ok"  # torchrun ends it with the other one
    assert does_not[1] == "ClusterError"
    assert (
        "this is rank 1 of its node, but the Trainer takes 1 devices there (devices=1): leave devices out"
        in (does_not[2])
    )


@pytest.mark.parametrize(
    ("devices", "number"), [("auto", None), (-1, None), ("-1", None), (3, 3), ("2", 2), ([0, 2], 2), ("0, 2,", 2)]
)
def test_number_of_devices(devices: Any, number: int | None) -> None:
    assert rank_count.number_of_devices(devices) == number


def discover(ntasks_per_node: str | None) -> dict[str, Any] | str:
    rank, port = os.environ["RANK"], os.environ["MASTER_PORT"]
    for name in list(os.environ):
        if name.startswith(("TORCHELASTIC", "ROLE", "GROUP", "LOCAL")) or name in ("RANK", "WORLD_SIZE", "NODE_RANK"):
            del os.environ[name]
    job = {"SLURM_NTASKS": "2", "SLURM_PROCID": rank, "SLURM_LOCALID": rank, "SLURM_NODEID": "0"}
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "SLURM_JOB_NAME": "discover"}
    os.environ.update(job | address)
    if ntasks_per_node:
        os.environ["SLURM_NTASKS_PER_NODE"] = ntasks_per_node
    status = main(["discover", "--no-speed", "--no-links", "--out", "cluster.yaml"])
    if status:
        return str(status)
    while not Path("cluster.yaml").exists():
        time.sleep(0.05)
    found: dict[str, Any] = yaml.safe_load(Path("cluster.yaml").read_text())
    return found


def test_discover_under_srun(ranks: WarmRanks) -> None:
    first, second = ranks.run(2, discover, "2", process_group=False)
    assert first == second
    (node,) = first["nodes"]
    assert sum(device.get("count", 1) for device in node["devices"]) == 2


def test_discover_says_what_to_do_where_nodes_have_different_numbers_of_tasks(ranks: WarmRanks) -> None:
    assert ranks.run(2, discover, None, process_group=False) == ["2", "2"]
