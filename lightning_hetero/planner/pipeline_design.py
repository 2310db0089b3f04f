"""A pipeline plan in the making, and what it would take: seconds by simulation, bytes by formula."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise

from lightning_hetero.cluster import Cluster
from lightning_hetero.costs import ModelCosts, UnitTiming
from lightning_hetero.planner.stage_table import StageTable
from lightning_hetero.planner.training import Training
from lightning_hetero.schedule import Schedule, build_schedule, peaks_in_flight, warmup_depths
from lightning_hetero.simulator.comm import Network
from lightning_hetero.simulator.flow import stage_ends_s
from lightning_hetero.simulator.pipeline import simulate_pipeline
from lightning_hetero.simulator.pipeline_memory import StageUnits, rank_memory
from lightning_hetero.simulator.reductions import Reduction, simulate_reductions


@dataclass(frozen=True)
class Policy:
    """A schedule and how deep it warms up.

    Args:
        schedule: its name.
        extra: for 1f1b, further warm-up micro-batches per following stage.
        stages_per_rank: for interleaved_1f1b.
        recompute: whether activations may be checkpointed; a backward in two halves cannot run a forward for both.
    """

    schedule: str = "1f1b"
    extra: int = 0
    stages_per_rank: int = 1
    recompute: bool = True

    @property
    def may_recompute(self) -> bool:
        """Whether stages may run their forward again."""
        return self.recompute and self.schedule != "zero_bubble"

    def __str__(self) -> str:
        depth = f", {self.extra} more warm-up micro-batches per following stage" if self.extra else ""
        return f"{self.schedule}{depth}"

    def in_flight(self, ranks: int, micro_batches: int) -> tuple[int, ...]:
        """Micro-batches in flight per stage at most."""
        if self.schedule == "1f1b":
            return warmup_depths(ranks, micro_batches, self.extra)
        if self.schedule == "gpipe":
            return (micro_batches,) * ranks
        if self.schedule == "zero_bubble":
            return (min(ranks, micro_batches),) * ranks
        # An upper bound for every stage of a rank: what the rank holds in warm-up, all of it in this stage.
        stages = ranks * self.stages_per_rank
        return tuple(min(micro_batches, ranks + (ranks - s % ranks)) for s in range(stages))

    def build(self, ranks: int, micro_batches: int) -> Schedule:
        """The schedule."""
        depths = warmup_depths(ranks, micro_batches, self.extra) if self.schedule == "1f1b" else None
        return build_schedule(self.schedule, ranks, micro_batches, warmup=depths, stages_per_rank=self.stages_per_rank)


@dataclass(frozen=True)
class PipelineDesign:
    """One pipeline: its ranks in stage order, units per stage, and micro-batches."""

    ranks: tuple[int, ...]
    counts: tuple[int, ...]
    micro_batches: int

    @cached_property
    def borders(self) -> tuple[tuple[int, int], ...]:
        """First unit, and the one after the last, of each stage."""
        borders, start = [], 0
        for count in self.counts:
            borders.append((start, start + count))
            start += count
        return tuple(borders)


@dataclass(frozen=True)
class Design:
    """All that a plan decides, apart from where activations are checkpointed, which memory decides."""

    micro_batch_size: int
    policy: Policy
    pipelines: tuple[PipelineDesign, ...]


@dataclass(frozen=True)
class Shortage:
    """Bytes that a rank lacks, even with activation checkpointing."""

    rank: int
    needed_bytes: int
    capacity_bytes: int

    @property
    def missing_bytes(self) -> int:
        return self.needed_bytes - self.capacity_bytes


@dataclass(frozen=True)
class Outcome:
    """What a design would take.

    Args:
        step_s: seconds of a step; infinite if it does not fit.
        checkpointing: per pipeline and stage.
        busy_s: per rank that is used, seconds of computing.
        peak_bytes: per rank that is used.
        compute_s: when the slowest pipeline has ended, before gradients are reduced between pipelines.
        shortages: of ranks that do not fit.
    """

    step_s: float
    checkpointing: tuple[tuple[bool, ...], ...] = ()
    busy_s: Mapping[int, float] = field(default_factory=dict)
    peak_bytes: Mapping[int, int] = field(default_factory=dict)
    compute_s: float = 0.0
    shortages: tuple[Shortage, ...] = ()


@dataclass(frozen=True)
class _Run:
    """One pipeline simulated; of equal ones only the first is."""

    checkpointing: tuple[bool, ...]
    stage_end_s: tuple[float, ...]
    busy_s: tuple[float, ...]
    peak_bytes: tuple[int, ...]
    missing: tuple[int, ...]


class Problem:
    """What is to be planned, and what designs for it take. Results are kept, so asking twice is cheap.

    Args:
        cluster: devices and links.
        costs: of the model.
        training: batch, precision, optimizer.
        timings: per device type, the timing of every unit.
        capacity_bytes: per rank; by default what its device has. Infinite: memory does not limit.
    """

    def __init__(
        self,
        cluster: Cluster,
        costs: ModelCosts,
        training: Training,
        timings: Mapping[str, Sequence[UnitTiming]],
        capacity_bytes: Sequence[float] | None = None,
    ) -> None:
        self.cluster, self.costs, self.training, self.timings = cluster, costs, training, timings
        self.kinds = cluster.device_types()
        self.nodes = tuple(device.node for device in cluster.devices)
        own = [float(device.memory_bytes) for device in cluster.devices]
        self.capacity = tuple(own if capacity_bytes is None else capacity_bytes)
        self.network = Network.of(cluster)
        self.units = len(costs.units)
        self.simulated_actions = 0
        self._tables: dict[int, StageTable] = {}
        self._speeds: dict[tuple[str, int], float] = {}
        self._runs: dict[object, _Run] = {}
        self._outcomes: dict[Design, Outcome] = {}

    def table(self, samples: int) -> StageTable:
        """Seconds and bytes of all stages for a micro-batch size."""
        if samples not in self._tables:
            self._tables[samples] = StageTable(self.costs, self.timings, self.training.state, samples)
        return self._tables[samples]

    def speed(self, rank: int, samples: int) -> float:
        """Micro-batches per second of the whole model on the device of a rank, if it fitted there."""
        key = self.kinds[rank], samples
        if key not in self._speeds:
            self._speeds[key] = 1 / max(float(self.table(samples).both(key[0])[0, -1]), 1e-300)
        return self._speeds[key]

    def total_micro_batches(self, samples: int) -> int:
        """Micro-batches of a step over all pipelines; the last one may be short."""
        return -(-self.training.global_batch_size // samples)

    def evaluate(self, design: Design) -> Outcome:
        """Simulate a design and predict its memory."""
        if design not in self._outcomes:
            # What comes with each pipeline (its links, its reductions) costs about as much as so many actions.
            self.simulated_actions += 40 * len(design.pipelines)
            self._outcomes[design] = self._evaluate(design)
        return self._outcomes[design]

    def _evaluate(self, design: Design) -> Outcome:
        runs = [self._run(pipeline, design) for pipeline in design.pipelines]
        peaks, busy, shortages = {}, {}, []
        for pipeline, run in zip(design.pipelines, runs, strict=True):
            for rank, peak, seconds, missing in zip(
                pipeline.ranks, run.peak_bytes, run.busy_s, run.missing, strict=True
            ):
                peaks[rank], busy[rank] = peak, seconds
                if missing:
                    shortages.append(Shortage(rank, peak, int(self.capacity[rank])))
        checkpointing = tuple(run.checkpointing for run in runs)
        if shortages:
            return Outcome(float("inf"), checkpointing, peak_bytes=peaks, shortages=tuple(shortages))
        compute = max(max(run.stage_end_s) for run in runs)
        reductions = self.reductions(design.pipelines)
        step = compute
        if reductions:
            ends = [run.stage_end_s for run in runs]
            ranks = [len(pipeline.ranks) for pipeline in design.pipelines]
            step = simulate_reductions(ends, reductions, ranks).step_s
        return Outcome(step, checkpointing, busy, peaks, compute)

    def hops(self, ranks: Sequence[int], counts: Sequence[int], samples: int) -> tuple[float, ...]:
        """Seconds of a message over each border between stages."""
        output, stop, hops = self.table(samples).output_bytes, 0, []
        for stage, count in enumerate(counts[:-1]):
            stop += count
            one, two = ranks[stage % len(ranks)], ranks[(stage + 1) % len(ranks)]
            size = float(output[stop - 1]) * samples
            hops.append(self.network.point_to_point_s(size, self.nodes[one] == self.nodes[two]))
        return tuple(hops)

    def _run(self, pipeline: PipelineDesign, design: Design) -> _Run:
        kinds = tuple(self.kinds[rank] for rank in pipeline.ranks)
        capacity = tuple(self.capacity[rank] for rank in pipeline.ranks)
        hops = self.hops(pipeline.ranks, pipeline.counts, design.micro_batch_size)
        key = (kinds, capacity, hops, pipeline.counts, pipeline.micro_batches, design.micro_batch_size, design.policy)
        if key not in self._runs:
            self._runs[key] = self._simulate(pipeline, design, kinds, capacity, hops)
        return self._runs[key]

    def _simulate(
        self,
        pipeline: PipelineDesign,
        design: Design,
        kinds: tuple[str, ...],
        capacity: tuple[float, ...],
        hops: tuple[float, ...],
    ) -> _Run:
        ranks, size, policy = len(kinds), design.micro_batch_size, design.policy
        if policy.stages_per_rank == 1:
            recompute, peaks = self._memory(pipeline, design, capacity)
            schedule: Schedule | None = None
        else:
            schedule = policy.build(ranks, pipeline.micro_batches)
            recompute, peaks = self._memory_of_rows(pipeline, design, capacity, schedule)
        missing = tuple(int(peak - room) if peak > room else 0 for peak, room in zip(peaks, capacity, strict=True))
        if any(missing):
            return _Run(recompute, (), (0.0,) * ranks, peaks, missing)
        stages = [
            self.table(size).seconds(kinds[stage % ranks], start, stop, again)
            for stage, ((start, stop), again) in enumerate(zip(pipeline.borders, recompute, strict=True))
        ]
        count = pipeline.micro_batches
        self.simulated_actions += 2 * count * len(stages)
        if policy.schedule in ("1f1b", "gpipe"):
            ends = stage_ends_s(policy.in_flight(ranks, count), count, stages, hops)
            busy = tuple(count * stage.both_s for stage in stages)
            return _Run(recompute, ends, busy, peaks, missing)
        timeline = simulate_pipeline(schedule or policy.build(ranks, count), stages, hops)
        return _Run(recompute, timeline.stage_end_s, timeline.busy_s, peaks, missing)

    def _memory(
        self, pipeline: PipelineDesign, design: Design, capacity: Sequence[float]
    ) -> tuple[tuple[bool, ...], tuple[int, ...]]:
        """Where to checkpoint, which is where it does not fit otherwise, and the peak per rank."""
        count, table, policy = pipeline.micro_batches, self.table(design.micro_batch_size), design.policy
        recompute, peaks = [], []
        for held, (start, stop), room in zip(
            policy.in_flight(len(pipeline.ranks), count), pipeline.borders, capacity, strict=True
        ):
            plain = table.peak_bytes(start, stop, held, held == count, False)
            again = policy.may_recompute and plain > room
            recompute.append(again)
            peaks.append(int(table.peak_bytes(start, stop, held, held == count, True) if again else plain))
        return tuple(recompute), tuple(peaks)

    def _memory_of_rows(
        self, pipeline: PipelineDesign, design: Design, capacity: Sequence[float], schedule: Schedule
    ) -> tuple[tuple[bool, ...], tuple[int, ...]]:
        """The same where ranks have several stages, which are checkpointed together."""
        ranks, recompute, peaks = len(pipeline.ranks), [False] * len(pipeline.counts), []
        for rank, (row, room) in enumerate(zip(schedule.rows, capacity, strict=True)):
            own = range(rank, len(pipeline.counts), ranks)
            for again in (False, True) if design.policy.may_recompute else (False,):
                units = {stage: StageUnits(*pipeline.borders[stage], again) for stage in own}
                memory = rank_memory(
                    self.costs, units, peaks_in_flight(row), pipeline.micro_batches, state=self.training.state
                )
                peak = memory.peak_bytes(design.micro_batch_size)
                if peak <= room:
                    break
            for stage in own:
                recompute[stage] = again
            peaks.append(peak)
        return tuple(recompute), tuple(peaks)

    def reductions(self, pipelines: Sequence[PipelineDesign]) -> list[Reduction]:
        """Sums of gradients between the owners of the same units, and of tied parameters between theirs."""
        found: list[tuple[tuple[int, ...], float]] = []
        per_parameter = self.training.state.gradient
        if len(pipelines) > 1:
            cuts = sorted({0, self.units, *(start for pipeline in pipelines for start, _ in pipeline.borders)})
            for start, stop in reversed(list(pairwise(cuts))):
                size = per_parameter * sum(unit.parameters for unit in self.costs.units[start:stop])
                found.append(((start,), size))
        for index, unit in enumerate(self.costs.units):
            # Parameters that count with an earlier unit, taken for the first: they are there twice if cut apart.
            if unit.shared_parameters and any(pipeline.borders[0][1] <= index for pipeline in pipelines):
                found.append(((0, index), per_parameter * unit.shared_parameters))
        # Pipelines with one cut have the same stage for the same unit.
        stages = {pipeline.counts: _stage_of_units(pipeline.counts) for pipeline in pipelines}
        reductions = (self._reduction(pipelines, stages, units, size) for units, size in found)
        return [reduction for reduction in reductions if reduction.seconds]

    def _reduction(
        self,
        pipelines: Sequence[PipelineDesign],
        stages: Mapping[tuple[int, ...], Sequence[int]],
        units: Sequence[int],
        size_bytes: float,
    ) -> Reduction:
        owners, nodes = [], Counter[str]()
        for index, pipeline in enumerate(pipelines):
            for stage in dict.fromkeys(stages[pipeline.counts][unit] for unit in units):
                owners.append((index, stage))
                nodes[self.nodes[pipeline.ranks[stage % len(pipeline.ranks)]]] += 1
        spread = tuple(sorted(nodes.values(), reverse=True))
        return Reduction(self.network.all_reduce_s(size_bytes, spread), tuple(owners))

    def with_free_links(self) -> Problem:
        """The same with links that cost nothing."""
        cluster = replace(self.cluster, within_node=None, between_nodes=None)
        return Problem(cluster, self.costs, self.training, self.timings, self.capacity)

    def with_more(self, kind: str, count: int) -> Problem:
        """The same with more devices of a type, like the largest of that type and beside it on its node."""
        like = max((r for r, each in enumerate(self.kinds) if each == kind), key=lambda r: self.capacity[r])
        device = replace(self.cluster.devices[like], uuid=None)
        cluster = replace(self.cluster, devices=(*self.cluster.devices, *(device,) * count))
        capacity = (*self.capacity, *(self.capacity[like],) * count)
        return Problem(cluster, self.costs, self.training, self.timings, capacity)

    def without_memory_limit(self) -> Problem:
        """The same with devices of endless memory."""
        return Problem(self.cluster, self.costs, self.training, self.timings, [float("inf")] * len(self.capacity))


def _stage_of_units(counts: Sequence[int]) -> list[int]:
    return [stage for stage, count in enumerate(counts) for _ in range(count)]
