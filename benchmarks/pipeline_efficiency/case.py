"""What runs: a chain of equal blocks on unequal devices, each block with its seconds given."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor, nn

from lightning_hetero.cluster import Cluster, Device
from lightning_hetero.costs import ModelCosts, UnitCost, UnitTiming
from lightning_hetero.plan import Pipeline, PipelinePlan, Stage
from lightning_hetero.schedule import build_schedule, warmup_depths
from lightning_hetero.simulator.pipeline import StageSeconds, simulate_pipeline

WIDTH = 64
SAMPLES = 4  # of a micro-batch


@dataclass(frozen=True)
class Beside:
    """What a step takes beside its stages on a machine: two constants of it, the same for every case.

    Args:
        message_s: from the end of one stage to the begin of the next.
        step_s: before and after the schedule: reading, logging, the optimizer, Lightning.
    """

    message_s: float = 0.0
    step_s: float = 0.0

    @classmethod
    def of(cls, excess_s: tuple[float, float], messages: tuple[int, int]) -> Beside:
        """From what two cases of one micro-batch took beside their stages, and how many messages are in each."""
        message_s = (excess_s[1] - excess_s[0]) / (messages[1] - messages[0])
        return cls(message_s, excess_s[0] - messages[0] * message_s)


@dataclass(frozen=True)
class PipelineCase:
    """One pipeline over all ranks of the cluster.

    Args:
        cut: blocks of each stage.
        micro_batches: of a step.
        forward_ms: of a block with one micro-batch on a device of speed 1; its backward takes twice that.
        speeds: of the devices, in stage order.
        schedule: its name.
        extra: further warm-up micro-batches per following stage, with 1f1b.
    """

    cut: tuple[int, ...] = (4, 4, 2, 2)
    micro_batches: int = 32
    forward_ms: float = 8.0
    speeds: tuple[float, ...] = (2, 2, 1, 1)
    schedule: str = "1f1b"
    extra: int = 1

    @property
    def world_size(self) -> int:
        """Ranks."""
        return len(self.speeds)

    @property
    def global_batch(self) -> int:
        """Samples of a step."""
        return self.micro_batches * SAMPLES

    @property
    def blocks(self) -> int:
        """Of the model."""
        return sum(self.cut)

    def model(self) -> nn.Sequential:
        """The chain."""
        return nn.Sequential(*(Block() for _ in range(self.blocks)))

    def cluster(self) -> Cluster:
        """The emulated devices: one type for each speed, so that costs can tell them apart."""
        devices = tuple(Device(f"speed {speed:g}", "here", 2**31, speed * 1e9) for speed in self.speeds)
        return Cluster("emulated pipeline", devices, emulate=True)

    def costs(self) -> ModelCosts:
        """Seconds of every block on every type of device."""
        parameters = sum(p.numel() for p in Block().parameters())
        timings = {}
        for speed in sorted(set(self.speeds)):
            forward_s = self.forward_ms / 1e3 / SAMPLES / speed
            timings[f"speed {speed:g}"] = UnitTiming(0.0, forward_s, 0.0, 2 * forward_s)
        kept = 3 * 4 * WIDTH
        units = tuple(
            UnitCost(str(i), parameters, 2e3 * WIDTH, 4e3 * WIDTH, kept, 4 * WIDTH, timings, is_block=True)
            for i in range(self.blocks)
        )
        return ModelCosts("chain", units)

    def stage_costs(self, stage: int) -> ModelCosts:
        """The blocks of a stage as one unit."""
        blocks = self.cut[stage]
        block = self.costs().units[0]
        timings = {
            kind: UnitTiming(0.0, blocks * each.forward_per_sample_s, 0.0, blocks * each.backward_per_sample_s)
            for kind, each in block.timings.items()
        }
        return ModelCosts("stage", (replace(block, name="stage", timings=timings),))

    def plan(self) -> PipelinePlan:
        """The plan that this case is."""
        depths = warmup_depths(len(self.cut), self.micro_batches, self.extra)
        borders = [(sum(self.cut[:i]), sum(self.cut[: i + 1])) for i in range(len(self.cut))]
        ranks = tuple(range(self.world_size))
        stages = tuple(Stage(border, depth) for border, depth in zip(borders, depths, strict=True))
        return PipelinePlan(
            self.global_batch,
            SAMPLES,
            (Pipeline(ranks, stages, self.micro_batches),),
            self.cluster().device_types(),
            tuple(str(i) for i in range(self.blocks)),
            schedule=self.schedule,
            predicted_step_s=self.predicted_s(),
        )

    def stage_seconds(self) -> list[StageSeconds]:
        """Of one micro-batch in each stage."""
        ranks = self.world_size
        seconds = []
        for stage, blocks in enumerate(self.cut):
            forward_s = blocks * self.forward_ms / 1e3 / self.speeds[stage % ranks]
            seconds.append(StageSeconds(forward_s, 2 * forward_s))
        return seconds

    def predicted_s(self, beside: Beside | None = None) -> float:
        """Of a step, by the simulator; with what it takes beside the stages, where that is given."""
        beside = beside or Beside()
        depths = warmup_depths(len(self.cut), self.micro_batches, self.extra)
        schedule = build_schedule(
            self.schedule,
            self.world_size,
            self.micro_batches,
            warmup=depths if self.schedule == "1f1b" else None,
            stages_per_rank=len(self.cut) // self.world_size,
        )
        hops = [beside.message_s] * (len(self.cut) - 1)
        return simulate_pipeline(schedule, self.stage_seconds(), hops).step_s + beside.step_s

    def bound_s(self) -> float:
        """The way of one micro-batch, and the slowest stage for each further one."""
        seconds = [stage.both_s for stage in self.stage_seconds()]
        return sum(seconds) + (self.micro_batches - 1) * max(seconds)


class Block(nn.Module):
    """A small residual layer, far quicker than what it is emulated to take."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.activation = nn.GELU()

    def forward(self, hidden: Tensor) -> Tensor:
        """Shape (samples, WIDTH) in and out."""
        result: Tensor = hidden + self.activation(self.inner(hidden))
        return result
