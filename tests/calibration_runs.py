"""Measured runs as a world with known constants would have them, so that a fit can be held to these constants."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from lightning_hetero.cli import main
from lightning_hetero.cluster import Cluster, Device, Link
from lightning_hetero.costs import ModelCosts, UnitCost
from lightning_hetero.metrics import RankFile, merge_rank_files
from lightning_hetero.plan import ShardPlan
from lightning_hetero.planner.layout_plan import layout_plan
from lightning_hetero.planner.training import Training
from lightning_hetero.simulator.calibration import Calibration, DeviceConstants
from lightning_hetero.simulator.simulate import simulate

MIB = 2**20
WITHIN, BETWEEN = Link(4e9, 40e-6), Link(1e9, 150e-6)

GUESSED = Link(10e9, 10e-6)
"""what the cluster file says of both links"""


def cluster(nodes: int = 2, per_node: int = 4, link: Link | None = GUESSED) -> Cluster:
    """Nodes of fast devices and of slow ones in turn."""
    kinds = [("fast", 2e12), ("slow", 1e12)]
    devices = [
        Device(*(kinds[node % 2][0], f"node-{node}", 4096 * MIB, kinds[node % 2][1]))
        for node in range(nodes)
        for _ in range(per_node)
    ]
    return Cluster("two-kinds", tuple(devices), link, link)


def costs(width: int = 1000, blocks: int = 6) -> ModelCosts:
    """Blocks of 12 x width^2 parameters between an embedding and a head."""
    parameters = 12 * width**2
    block = UnitCost("block", parameters, 2e2 * parameters, 4e2 * parameters, 200 * width, 20 * width)
    edge = replace(block, name="edge", parameters=parameters // 10, is_block=False)
    units = [replace(edge, name="embed"), *(replace(block, name=f"blocks.{i}") for i in range(blocks))]
    return ModelCosts(f"width-{width}", (*units, replace(edge, name="head")))


@dataclass(frozen=True)
class World:
    """How devices and links really are, by the scales of a calibration."""

    within: Link = WITHIN
    between: Link = BETWEEN
    compute: tuple[float, float] = (1.2, 0.9)
    fixed_s: float = 0.012
    optimizer_s_per_parameter: float = 2e-10
    busy_w: float = 300.0
    idle_w: float = 80.0
    noise: float = 0.0

    def constants(self) -> Calibration:
        """As a calibration of clusters like :func:`cluster`."""
        common = (self.fixed_s, self.optimizer_s_per_parameter, self.busy_w, self.idle_w)
        devices = {
            kind: DeviceConstants(scale, speed, *common)
            for (kind, speed), scale in zip((("fast", 2e12), ("slow", 1e12)), self.compute, strict=True)
        }
        return Calibration(devices, {"within_node": self.within, "between_nodes": self.between})


def write_run(
    folder: Path,
    world: World,
    where: Cluster,
    model: ModelCosts,
    sharding: str,
    samples: int,
    *,
    steps: int = 4,
    seed: int = 0,
    without: Sequence[str] = (),
    truth: Calibration | None = None,
    stalled: int | None = None,
) -> Path:
    """Write the metrics of a run whose steps are those of the world, or of ``truth``, with noise on each number.

    In step ``stalled`` everything takes ten times as long.
    """
    training = Training(samples * where.world_size)
    plan = layout_plan(where, model, training, sharding)
    truth = truth or world.constants()
    real_cluster, real_costs = truth.applied(where, model)
    step = simulate(plan, real_cluster, real_costs, training, constants=truth.devices)
    random = np.random.default_rng(seed)
    for rank, own in enumerate(step.ranks):
        file = RankFile(folder, rank)
        first = {"schema": 1, "run": "a", "world_size": where.world_size, "strategy": "hetero_fsdp"}
        first |= {"device": own.device, "emulated": where.emulate, "dtype": "fp32", "plan": None, "step": 0}
        file.write("run", first)
        if rank == 0:
            file.write("whole_plan", {"step": 0, "plan": plan.to_dict(), "pipelines": None})
        for index in range(1, steps + 1):
            stall = 10.0 if index == stalled else 1.0
            draw = lambda: stall * float(1 + world.noise * random.standard_normal())  # noqa: E731, B023
            optimizer_s = own.rest_s - world.fixed_s
            parts = {"compute_s": own.busy_s * draw(), "optimizer_s": optimizer_s * draw()}
            parts |= {"input_s": 0.25 * world.fixed_s * draw(), "rest_s": 0.75 * world.fixed_s * draw()}
            parts["blocked_s"] = (own.exposed_s + own.idle_s) * draw()
            joules = own.energy_j or 0.0
            values = {"step": index, "batches": 1, "samples": own.samples, "messages_s": 0.0, **parts}
            values |= {"step_s": sum(parts.values()), "joules": joules, "energy_s": step.step_s}
            file.write("step", {name: value for name, value in values.items() if name not in without})
        file.write("end", {"step": steps})
        file.close()
    merge_rank_files(folder)
    return folder


def plan_of(where: Cluster, model: ModelCosts, sharding: str, samples: int) -> ShardPlan:
    """The plan of such a run."""
    return layout_plan(where, model, Training(samples * where.world_size), sharding)


LARGE, SMALL = costs(1000), costs(100)
RUNS = [(LARGE, "FULL_SHARD"), (LARGE, "HYBRID_4"), (SMALL, "FULL_SHARD"), (SMALL, "HYBRID_2"), (LARGE, "NO_SHARD")]


def write_files(folder: Path) -> Path:
    """Cluster and costs that runs are calibrated with."""
    cluster().to_yaml(folder / "cluster.yaml")
    LARGE.save(folder / "large.json")
    SMALL.save(folder / "small.json")
    return folder


def calibrate(
    files: Path,
    runs: Sequence[Path],
    *more: str,
    where: str = "cluster.yaml",
    models: Sequence[str] = ("large.json", "small.json"),
) -> int:
    """Run the command on runs."""
    arguments = ["calibrate", *map(str, runs), "--cluster", str(files / where)]
    for model in models:
        arguments += ["--costs", str(files / model)]
    return main([*arguments, "--out", str(files / "calibration.json"), *more])


def found(files: Path) -> Calibration:
    """What it has written."""
    return Calibration.load(files / "calibration.json")


def several(files: Path, world: World, runs: Sequence[tuple[ModelCosts, str]] = RUNS, samples: int = 2) -> list[Path]:
    """Runs of models and shardings in a world, written."""
    return [
        write_run(files / f"run-{index}", world, cluster(), model, sharding, samples, seed=index)
        for index, (model, sharding) in enumerate(runs)
    ]
