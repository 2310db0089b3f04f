"""Search for the shard plan with the fastest predicted step that fits.

The step time is that of :mod:`~lightning_hetero.simulator.shard_step`, memory that of
:mod:`~lightning_hetero.simulator.sharded_memory`. Groups meet once a step, so for a partition into groups the least
time is found by bisection: in a given time every group does as many samples as it can (:mod:`group_curve`), and the
least time in which all of them do the global batch is the partition's. Partitions are those of :mod:`groups`; a coarse
grid of times ranks them all, and the best few are solved and compared as plans.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

import numpy as np

from lightning_hetero.cluster import Cluster
from lightning_hetero.costs import ModelCosts
from lightning_hetero.errors import HeteroError, InfeasibleError, raise_all
from lightning_hetero.plan import ShardPlan, even_parts
from lightning_hetero.planner.batch import split_batch
from lightning_hetero.planner.group_curve import ROUGH_STEP, Choice, Curves, micro_batch_numbers
from lightning_hetero.planner.groups import ALL_PARTITIONS, Layout, Partition, all_partitions, pooled
from lightning_hetero.planner.kinds import GroupSpec, Kinds
from lightning_hetero.planner.seconds import unit_timings
from lightning_hetero.planner.shard_assembly import ShardAssembly
from lightning_hetero.planner.shard_candidates import ShardCandidate, ShardSearch
from lightning_hetero.planner.shard_options import ShardOptions
from lightning_hetero.planner.shard_polish import Polish
from lightning_hetero.planner.training import Training
from lightning_hetero.simulator.comm import Network
from lightning_hetero.simulator.shard_prediction import ShardPrediction, predict_shard
from lightning_hetero.simulator.shard_step import Floats, crossing_s
from lightning_hetero.simulator.sharded_memory import ReduceBuffers
from lightning_hetero.units import format_bytes, format_seconds

_GRID = 40
_SPAN = 2.0
"""the grid of times goes from a lower bound to so many times it, then on from there"""

_SOLVED = 12
"""partitions that are solved exactly"""

_ASSEMBLED = 4
"""of these, those that are made into plans and predicted as such"""

_POLISHED = 1.25
"""partitions of a few ranks that are so many times slower than the best are improved as well"""

_MOST_REFUSED = 100
"""partitions that are named though they do not fit, or take too long"""

_MOST_COMBINED = 3000
"""the most combinations of layouts of one way to pool kinds"""


class NothingFitsError(InfeasibleError):
    """Nothing fits; raised before anything is known of changes that would help."""


@dataclass(frozen=True)
class _Rough:
    """What the grid tells of a partition: its step takes between ``low_s`` and ``high_s`` seconds."""

    partition: Partition
    low_s: float
    high_s: float
    crossing_s: float


class ShardPlanner:
    """One search for a plan.

    Args:
        cluster: one device per rank.
        costs: of the model.
        training: global batch, precision and optimizer.
        options: what plans may use.

    Raises:
        HeteroError: if the seconds of a device type are not known.
    """

    def __init__(self, cluster: Cluster, costs: ModelCosts, training: Training, options: ShardOptions) -> None:
        self.cluster, self.costs, self.training, self.options = cluster, costs, training, options
        self.state = training.state
        self.timings = unit_timings(costs, cluster)
        self.kinds = Kinds(cluster, costs, self.timings)
        self.network = Network.of(cluster)
        self.batch = training.global_batch_size
        self.curves = Curves(
            self.kinds,
            costs,
            self.state,
            ReduceBuffers.of(cluster),
            self.network,
            self.batch,
            options.modes,
            options.checkpointing,
            options.accumulate,
        )
        self.lower_bound_s = self._lower_bound_s()
        self.assembly = ShardAssembly(cluster, costs, self.kinds, self.batch, self.lower_bound_s, self.prediction)
        self._done: dict[GroupSpec, Floats] = {}

    def search(self) -> ShardSearch:
        """The fastest plan and what else was tried.

        Raises:
            NothingFitsError: if nothing fits.
        """
        even, even_candidate = self._even()
        rough, refused = self._rough()
        plans = self._plans(rough)
        best: ShardPlan | None = None
        chosen: _Rough | None = None
        if plans:
            best, chosen = min(plans, key=lambda pair: _step_s(pair[0]))
        if best is None or (even is not None and _step_s(even) < _step_s(best)):
            if even is None:
                raise NothingFitsError("nothing fits")
            best, chosen = even, None
        made = {id(each): plan for plan, each in plans}
        candidates = [_candidate(each, made.get(id(each)), best, is_best=each is chosen) for each in rough]
        candidates.sort(key=lambda each: (each.rejected is not None, each.predicted_step_s or 0.0))
        return ShardSearch(best, (*candidates, even_candidate, *refused), even_candidate)

    def _plans(self, rough: Sequence[_Rough]) -> list[tuple[ShardPlan, _Rough]]:
        """Plans of the partitions that are worth one."""
        few = self.cluster.world_size <= ALL_PARTITIONS
        solved: list[tuple[float, dict[GroupSpec, Choice], _Rough]] = []
        for each in rough[:_SOLVED]:
            best_s = min((row[0] for row in solved), default=np.inf)
            # What cannot be faster than what is solved already need not be solved; small changes may make it faster.
            if each.low_s < best_s * (_POLISHED if few else 1):
                seconds, choices = self._solved(each, best_s * (_POLISHED if few else 1))
                solved.append((seconds, choices, each))
        solved.sort(key=lambda row: row[0])
        plans = [
            (self.assembly.plan(each.partition.groups, each.partition.specs, chosen), each)
            for _, chosen, each in solved[: _SOLVED if few else _ASSEMBLED]
        ]
        if few:
            polish = Polish(self.curves)
            better = [(polish.best(plan), each) for plan, each in plans]
            plans = [(self.assembly.complete(plan, self.prediction(plan)), each) for plan, each in better]
        return plans

    def changed(
        self, *, cluster: Cluster | None = None, options: ShardOptions | None = None, batch: int | None = None
    ) -> ShardPlanner:
        """The same search with something else in place of what it has."""
        training = self.training if batch is None else replace(self.training, global_batch_size=batch)
        return ShardPlanner(cluster or self.cluster, self.costs, training, options or self.options)

    def most_samples_at_once(self) -> list[int]:
        """Per rank the most samples of one micro-batch where least memory is needed, all ranks in one group."""
        mode = self.curves.modes_of(self.cluster.world_size)[-1]
        return [
            max(0, self.curves.max_samples(kind, self.cluster.world_size, mode, self.options.checkpointing, False))
            for kind in self.kinds.of_rank
        ]

    def prediction(self, plan: ShardPlan) -> ShardPrediction:
        """What a plan for this cluster is expected to do."""
        return predict_shard(plan, self.cluster, self.costs, self.timings, self.state)

    # -- bounds --------------------------------------------------------------------------------------------------------

    def _lower_bound_s(self) -> float:
        """Seconds of the slowest rank if nothing but its own compute took time; every rank computes a sample."""
        plain = [kind.plain for kind in self.kinds.kinds]
        slope = [plain[kind].per_sample_s for kind in self.kinds.of_rank]
        fixed = [plain[kind].fixed_s for kind in self.kinds.of_rank]
        idle = [rank for rank, seconds in enumerate(slope) if seconds <= 0]
        problems = [
            f"rank {rank} ({self.cluster.devices[rank].type}) takes no time for a sample: give its seconds or speed"
            for rank in idle[:8]
        ]
        raise_all(HeteroError, f"the seconds of model {self.costs.model!r} are not known", problems)
        shares = split_batch(slope, fixed, self.batch)
        return max(f + s * max(b, 1) for f, s, b in zip(fixed, slope, shares, strict=True))

    def _even(self) -> tuple[ShardPlan | None, ShardCandidate]:
        """What people run without a planner, and why it is not the plan if it does not fit."""
        ranks = self.cluster.world_size
        shares, again = even_parts(self.batch, ranks), [False] * ranks
        plan = self.assembly.plan_of([tuple(range(ranks))], ["FULL_SHARD"], [1], shares, again)
        found = self.prediction(plan)
        what = "even shares in one group, FULL_SHARD"
        tight = [
            (needed - device.memory_bytes, rank)
            for rank, (needed, device) in enumerate(zip(found.peak_bytes, self.cluster.devices, strict=True))
            if needed > device.memory_bytes
        ]
        if tight:
            missing, rank = max(tight)
            lacks = f"rank {rank} lacks {format_bytes(missing)} ({found.peaks[rank]})"
            reason = f"does not fit {len(tight)} of {ranks} ranks; {lacks}"
            return None, ShardCandidate(what, found.step_s, reason)
        return plan, ShardCandidate(what, found.step_s, "the even plan, for comparison")

    # -- all partitions, roughly ---------------------------------------------------------------------------------------

    def _rough(self) -> tuple[list[_Rough], list[ShardCandidate]]:
        """Partitions that fit, the most promising first, and those that do not."""
        if self.cluster.world_size <= ALL_PARTITIONS:
            ways = [[all_partitions(self.kinds)]]
        else:
            ways = pooled(self.kinds)
        rough, refused = self._within_s(ways, self.lower_bound_s * _SPAN)
        rough.sort(key=lambda each: each.high_s)
        return rough, refused

    def _within_s(
        self, ways: Sequence[Sequence[Sequence[Layout]]], limit_s: float
    ) -> tuple[list[_Rough], list[ShardCandidate]]:
        """What the grid tells of all partitions, up to a limit, raised until none beyond it can be the fastest."""
        while True:
            grid = np.geomspace(self.lower_bound_s, limit_s, _GRID)
            self.curves.set_limit_s(limit_s)
            self._done.clear()
            refused: dict[str, ShardCandidate] = {}
            rough = [each for way in ways for each in self._rough_of(way, grid, refused)]
            if not any(self._can_do(way) for way in ways):
                return [], list(refused.values())
            best_s = min((each.high_s for each in rough), default=np.inf)
            if best_s <= limit_s:
                return rough, list(refused.values())
            # Seconds beyond the grid may win where the crossing of what was found takes long.
            limit_s = best_s * (1 + 1e-9) if np.isfinite(best_s) else limit_s * _SPAN

    def _can_do(self, way: Sequence[Sequence[Layout]]) -> bool:
        """Whether groups can do the global batch at all, given time: memory may bound what they do at once."""
        most = 0
        for pool in way:
            fitting = [layout for layout in pool if self._fits(layout)]
            if not fitting:
                return False
            most += max(sum(count * self._most(spec) for spec, count in layout.counts) for layout in fitting)
        return most >= self.batch

    def _most(self, spec: GroupSpec) -> int:
        curves = self.curves.of(spec)
        bounded = all(curve.full and curve.accumulates is False for curve in curves)
        return max(int(curve.capacity[-1]) for curve in curves) if bounded else self.batch

    def _fits(self, layout: Layout) -> bool:
        return all(self.curves.of(spec) for spec, _ in layout.counts)

    def _rough_of(
        self, way: Sequence[Sequence[Layout]], grid: Floats, refused: dict[str, ShardCandidate]
    ) -> Iterator[_Rough]:
        pools = []
        for pool in way:
            fitting = []
            for layout in pool:
                if self._fits(layout):
                    fitting.append((layout, self._done_by(layout, grid)))
                else:
                    refused.setdefault(layout.name, ShardCandidate(layout.name, None, self._misfit(layout)))
            pools.append(_most_promising(fitting, int(_MOST_COMBINED ** (1 / len(way))), self.batch))
        for combination in product(*pools):
            done = sum(each for _, each in combination)
            at = int(np.searchsorted(done, self.batch))
            if at < len(grid):
                partition = Partition(tuple(layout for layout, _ in combination))
                crossing = self._crossing_s(partition)
                low = float(grid[at - 1]) if at else self.lower_bound_s
                if self.batch > 256:
                    low = max(self.lower_bound_s, low / ROUGH_STEP)
                yield _Rough(partition, low + crossing, float(grid[at]) + crossing, crossing)
            elif len(refused) < _MOST_REFUSED:
                what = str(Partition(tuple(layout for layout, _ in combination)))
                reason = f"takes longer than {format_seconds(float(grid[-1]))}"
                refused.setdefault(what, ShardCandidate(what, None, reason))

    def _done_by(self, layout: Layout, grid: Floats) -> Floats:
        """Samples that a layout's groups do together by each time; hugely negative where one cannot do any."""
        total = np.zeros(len(grid))
        for spec, count in layout.counts:
            if spec not in self._done:
                numbers = micro_batch_numbers(self.batch, rough=True)
                best = np.full(len(grid), -1.0)
                for curve in self.curves.of(spec):
                    best = np.maximum(best, curve.within(grid, curve.among(numbers)).max(axis=0, initial=-1))
                self._done[spec] = np.maximum.accumulate(np.where(best < 0, -1e15, best))
            total += count * self._done[spec]
        return total

    def _misfit(self, layout: Layout) -> str:
        for spec, _ in layout.counts:
            if not self.curves.of(spec):
                return f"a group of {spec.size} does not fit its memory in any mode"
        return "fits"

    def _crossing_s(self, partition: Partition) -> float:
        sizes = {spec.size for spec, _ in partition.counts}
        nodes = Counter[int]()
        for layout in partition.layouts:
            nodes.update(layout.nodes)
        spread = tuple(sorted(nodes.values(), reverse=True))
        return crossing_s(self.costs.parameters, self.state, self.network, sizes, spread)

    # -- one partition, exactly ----------------------------------------------------------------------------------------

    def _solved(self, rough: _Rough, best_s: float) -> tuple[float, dict[GroupSpec, Choice]]:
        """The seconds of a partition's step, and what its groups do, by bisection over the time that they have.

        It ends early where the partition turns out to be slower than the best so far.
        """
        specs = rough.partition.counts
        # The grid tries fewer numbers of micro-batches, so what it says is no lower bound.
        early, late = self.lower_bound_s * (1 - 1e-9), rough.high_s - rough.crossing_s
        chosen = self._choices(specs, late)
        assert chosen is not None
        while late - early > 1e-8 * late and early + rough.crossing_s < best_s:
            middle = early + (late - early) / 2
            found = self._choices(specs, middle)
            if found is None:
                early = middle
            else:
                late, chosen = middle, found
        return late + rough.crossing_s, chosen

    def _choices(self, specs: Sequence[tuple[GroupSpec, int]], step_s: float) -> dict[GroupSpec, Choice] | None:
        """What each group does to get the global batch done in time; ``None`` if they cannot."""
        total, chosen = 0, {}
        for spec, count in specs:
            if spec not in chosen:
                done, choice = self._most_samples(spec, step_s)
                if choice is None:
                    return None
                chosen[spec] = (done, choice)
            total += count * chosen[spec][0]
        return {spec: choice for spec, (_, choice) in chosen.items()} if total >= self.batch else None

    def _most_samples(self, spec: GroupSpec, step_s: float) -> tuple[int, Choice | None]:
        most, best = -1, None
        numbers = micro_batch_numbers(self.batch, rough=False)
        for curve in self.curves.of(spec):
            counts = curve.among(numbers)
            if curve.accumulates is not False:
                # as many full micro-batches as there is time for
                full = int(step_s / curve.seconds[-1])
                counts = np.union1d(counts, [m for m in (full, full + 1) if 2 <= m <= self.batch]).astype(np.int64)
            if not len(counts):
                continue
            done = curve.within(np.array([step_s]), counts)[:, 0]
            at = int(done.argmax())
            if done[at] > most:
                most, best = int(done[at]), (curve, int(counts[at]))
        return most, None if best is None else best[0].choice(step_s, best[1])


def _most_promising(layouts: Sequence[tuple[Layout, Floats]], most: int, batch: int) -> list[tuple[Layout, Floats]]:
    """The layouts that do most samples at some time of the grid."""
    if len(layouts) <= most:
        return list(layouts)
    return sorted(layouts, key=lambda pair: -float(np.minimum(np.maximum(pair[1], 0), batch).sum()))[:most]


def _step_s(plan: ShardPlan) -> float:
    assert plan.predicted_step_s is not None
    return plan.predicted_step_s


def _candidate(rough: _Rough, plan: ShardPlan | None, best: ShardPlan, is_best: bool) -> ShardCandidate:
    what = str(rough.partition)
    if is_best:
        return ShardCandidate(what, best.predicted_step_s, None)
    if plan is None:
        return ShardCandidate(what, rough.high_s, "slower by a rough estimate")
    return ShardCandidate(what, plan.predicted_step_s, f"{_step_s(plan) / _step_s(best):.3f} x the plan's step")
