"""How many samples a shard group can do in a given time, over all that it may choose.

A group chooses its sharding mode, which ranks checkpoint, and its number of micro-batches. For a mode and a choice of
checkpointing, a :class:`Curve` holds the micro-batches that are worth running: every rank takes one sample at first,
then the rank that would be finished first with one more takes it (the exact split of :func:`split_batch`), until
memory is full. Each point of the curve has the seconds of one micro-batch in lock-step, its communication included.
With m micro-batches, all of them take a point of the curve and some of them the next one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import product

import numpy as np
from numpy.typing import NDArray

from lightning_hetero.costs import ModelCosts
from lightning_hetero.planner.kinds import GroupSpec, Kinds
from lightning_hetero.simulator.comm import Network
from lightning_hetero.simulator.memory import StateBytes
from lightning_hetero.simulator.shard_prediction import group_memory
from lightning_hetero.simulator.shard_step import Floats, Passes, Traffic, lock_step_s
from lightning_hetero.simulator.sharded_memory import ReduceBuffers

Ints = NDArray[np.int64]

ROUGH_STEP = 1.25
"""from one number of micro-batches to the next on the grid, above a few"""

_MAX_CHOICES = 16
"""the most ways in which the kinds of a group may be divided into checkpointing ones and others"""


@dataclass(frozen=True)
class Choice:
    """What a group does.

    Args:
        mode: its sharding mode.
        checkpointing: for each kind in the group.
        micro_batches: of a step.
        samples: of each kind, the most samples of one of its ranks in the step.
    """

    mode: str
    checkpointing: tuple[bool, ...]
    micro_batches: int
    samples: tuple[int, ...]


@dataclass(frozen=True)
class Curve:
    """The micro-batches of a group under one mode and choice of checkpointing.

    Args:
        mode: sharding mode.
        checkpointing: for each kind in the group.
        accumulates: whether the memory was counted for more than one micro-batch; ``None`` where that is all the same.
        seconds: of one micro-batch, increasing.
        capacity: samples of the group in it.
        samples: shape (points, kinds), of a rank of each kind in it.
        full: whether memory ends the curve; otherwise it goes on beyond what is asked for.
    """

    mode: str
    checkpointing: tuple[bool, ...]
    accumulates: bool | None
    seconds: Floats
    capacity: Ints
    samples: Ints
    full: bool

    def among(self, numbers: Ints) -> Ints:
        """Of numbers of micro-batches, 1 being the first, those that it holds for."""
        if self.accumulates is None:
            return numbers
        return numbers[1:] if self.accumulates else numbers[:1]

    def within(self, step_s: Floats, micro_batches: Ints) -> Ints:
        """The most samples that a group can do in ``step_s`` seconds.

        Args:
            step_s: shape (times,).
            micro_batches: shape (numbers,).

        Returns:
            Shape (numbers, times); -1 where not even one sample a rank and micro-batch is done in time.
        """
        counts = micro_batches[:, np.newaxis]
        at = np.searchsorted(self.seconds, step_s / counts * (1 + 1e-12), side="right") - 1
        here = np.maximum(at, 0)
        more_s, more = self._to_next
        left_s = step_s - counts * self.seconds[here]
        beyond = np.floor(left_s / more_s[here] * (1 + 1e-12))
        larger = np.minimum(np.maximum(beyond, 0), counts - 1).astype(np.int64)
        done: Ints = counts * self.capacity[here] + larger * more[here]
        done[at < 0] = -1
        return done

    @cached_property
    def _to_next(self) -> tuple[Floats, Ints]:
        """Seconds and samples from each point to the next; infinite seconds where there is nothing to gain."""
        more_s = np.full(self.seconds.shape, np.inf)
        more = np.zeros(self.capacity.shape, dtype=np.int64)
        gained_s = self.seconds[1:] - self.seconds[:-1]
        more_s[:-1][gained_s > 0] = gained_s[gained_s > 0]
        more[:-1] = self.capacity[1:] - self.capacity[:-1]
        return more_s, more

    def choice(self, step_s: float, micro_batches: int) -> Choice:
        """What the group does in ``step_s`` seconds with so many micro-batches; it must be able to."""
        at = max(0, int(np.searchsorted(self.seconds, step_s / micro_batches * (1 + 1e-12), side="right")) - 1)
        beyond = min(at + 1, len(self.seconds) - 1)
        more_s = float(self.seconds[beyond] - self.seconds[at])
        left_s = step_s - micro_batches * float(self.seconds[at])
        larger = min(int(left_s / more_s * (1 + 1e-12)), micro_batches - 1) if more_s > 0 else 0
        larger = max(0, larger)
        samples = micro_batches * self.samples[at] + larger * (self.samples[beyond] - self.samples[at])
        return Choice(self.mode, self.checkpointing, micro_batches, tuple(samples.tolist()))


class Curves:
    """The curves of all groups of a cluster, made when they are asked for.

    Args:
        kinds: of the cluster's ranks.
        costs: of the model.
        state: bytes per parameter.
        buffers: gradients on their way.
        network: the links.
        global_batch_size: samples of a step.
        modes: sharding modes that may be used.
        checkpointing: whether ranks may checkpoint.
        accumulate: whether groups may run more than one micro-batch.
    """

    def __init__(
        self,
        kinds: Kinds,
        costs: ModelCosts,
        state: StateBytes,
        buffers: ReduceBuffers,
        network: Network,
        global_batch_size: int,
        modes: Iterable[str],
        checkpointing: bool,
        accumulate: bool,
    ) -> None:
        self.kinds, self.costs, self.state, self.network = kinds, costs, state, network
        self.buffers = buffers
        self.global_batch_size = global_batch_size
        self.modes = tuple(modes)
        self.checkpointing, self.accumulate = checkpointing, accumulate
        self.limit_s = np.inf
        self._curves: dict[GroupSpec, tuple[Curve, ...]] = {}
        self._most: dict[tuple[int, int, str, bool, bool], int] = {}
        self._points: dict[tuple[int, str, bool, bool], tuple[Floats, Floats]] = {}
        self._parameters = costs.parameters
        self._traffic: dict[tuple[object, ...], Traffic] = {}
        self._top: dict[int, int] = {}
        self._paths: dict[tuple[object, ...], tuple[Ints, Ints]] = {}
        self._seconds: dict[tuple[object, ...], Floats] = {}

    def set_limit_s(self, limit_s: float) -> None:
        """Make curves end at micro-batches of so many seconds; those made before are forgotten."""
        self.limit_s = limit_s
        self._curves.clear()
        self._top.clear()
        self._paths.clear()
        self._seconds.clear()

    def of(self, spec: GroupSpec) -> tuple[Curve, ...]:
        """The curves of a group that are worth it; none if no rank can take a sample in any way."""
        if spec not in self._curves:
            self._curves[spec] = tuple(self._make(spec))
        return self._curves[spec]

    def max_samples(self, kind: int, size: int, mode: str, checkpointing: bool, accumulates: bool) -> int:
        """The most samples of a micro-batch that fit a rank's memory, at most the global batch; -1 if not even 0 do."""
        key = (kind, size, mode, checkpointing, accumulates)
        if key not in self._most:
            memory_bytes = self.kinds.kinds[kind].memory_bytes
            # Most groups of a large model on small devices are told at once.
            fits = self._states_bytes(size, mode) <= memory_bytes
            self._most[key] = self._within(memory_bytes, key[1:]) if fits else -1
        return self._most[key]

    def _within(self, memory_bytes: int, how: tuple[int, str, bool, bool]) -> int:
        if how not in self._points:
            points = group_memory(self.costs, self.state, self.buffers, *how).points
            fixed = np.array([float(point.fixed_bytes) for point in points])
            self._points[how] = (fixed, np.array([point.bytes_per_sample for point in points]))
        fixed, per_sample = self._points[how]
        free = memory_bytes - fixed
        if free.min() < 0:
            return -1
        growing = per_sample > 0
        if not growing.any():
            return self.global_batch_size
        most = int(np.floor(free[growing] / per_sample[growing]).min())
        # As MemoryPoint does, which rounds up: whole bytes that are free hold what rounds up to them.
        while most > 0 and bool((np.ceil(per_sample * most) > free).any()):
            most -= 1
        return min(most, self.global_batch_size)

    def _states_bytes(self, size: int, mode: str) -> float:
        """Bytes of parameters, gradients and optimizer state, at least."""
        per_parameter = self.state.parameter + self.state.gradient + self.state.optimizer
        return self._parameters / (1 if mode == "NO_SHARD" else size) * per_parameter

    def traffic(self, spec: GroupSpec, mode: str) -> Traffic:
        """Seconds of a group's communication."""
        key = (mode, spec.spread)
        if key not in self._traffic:
            self._traffic[key] = Traffic.of(self.costs, self.state, self.network, spec.spread, mode)
        return self._traffic[key]

    def modes_of(self, size: int) -> tuple[str, ...]:
        """Modes that are worth it for a group of this size, faster ones first."""
        if size == 1 and "NO_SHARD" in self.modes:
            # Alone, the others gather copies of what is there already.
            return ("NO_SHARD",)
        # A group of replicas is no group: each of them alone is as fast, and freer.
        sharding = tuple(mode for mode in ("SHARD_GRAD_OP", "FULL_SHARD") if mode in self.modes)
        return sharding or self.modes

    def _make(self, spec: GroupSpec) -> Iterator[Curve]:
        for mode in self.modes_of(spec.size):
            for checkpointing in self._checkpointings(spec, mode):
                once = self._curve(spec, mode, checkpointing, False)
                several = None
                if self.accumulate and (once is None or once.full):
                    several = self._curve(spec, mode, checkpointing, True)
                if once is not None and several is not None and once.samples is several.samples:
                    yield replace(once, accumulates=None)
                else:
                    yield from (curve for curve in (once, several) if curve is not None)
                if once is not None and not once.full and not any(checkpointing):
                    return  # nothing that saves memory can be faster

    def _checkpointings(self, spec: GroupSpec, mode: str) -> list[tuple[bool, ...]]:
        """Which kinds checkpoint: all choices among those that memory limits without."""
        limited = []
        for (kind, count), top in zip(spec.counts, self._tops(spec), strict=True):
            most = self.max_samples(kind, spec.size, mode, False, self.accumulate)
            limited.append(self.checkpointing and most < min(top, -(-self.global_batch_size // count)))
        if 2 ** sum(limited) > _MAX_CHOICES:
            return [(False,) * len(limited), tuple(limited)]
        choices = product(*((False, True) if is_limited else (False,) for is_limited in limited))
        return sorted(choices, key=sum)

    def _tops(self, spec: GroupSpec) -> list[int]:
        """For each kind the most samples of a micro-batch that the limit of seconds lets one of its ranks do."""
        for kind, _ in spec.counts:
            if kind in self._top:
                continue
            plain, top = self.kinds.kinds[kind].plain, self.global_batch_size
            if np.isfinite(self.limit_s):
                # one beyond the limit, so that the curve tells what the next sample would take
                top = max(1, int((self.limit_s - plain.fixed_s) / plain.per_sample_s) + 2)
            self._top[kind] = top
        return [self._top[kind] for kind, _ in spec.counts]

    def _curve(self, spec: GroupSpec, mode: str, checkpointing: tuple[bool, ...], accumulates: bool) -> Curve | None:
        most = []
        for (kind, _), again in zip(spec.counts, checkpointing, strict=True):
            most.append(self.max_samples(kind, spec.size, mode, again, accumulates))
            if most[-1] < 1:
                return None
        passes = [
            self.kinds.kinds[kind].passes(again) for (kind, _), again in zip(spec.counts, checkpointing, strict=True)
        ]
        batch = self.global_batch_size
        asked = [
            min(top, max(1, -(-batch // count))) for top, (_, count) in zip(self._tops(spec), spec.counts, strict=True)
        ]
        limits = tuple(map(min, asked, most))
        key = (spec.counts, checkpointing, limits)
        if key not in self._paths:
            self._paths[key] = self._path(passes, limits, [count for _, count in spec.counts])
        samples, capacity = self._paths[key]
        timed = (key, mode, spec.spread)
        if timed not in self._seconds:
            self._seconds[timed] = lock_step_s(passes, samples, self.traffic(spec, mode))
        full = any(limit < wanted for limit, wanted in zip(limits, asked, strict=True))
        return Curve(mode, checkpointing, accumulates, self._seconds[timed], capacity, samples, full)

    def _path(self, passes: Sequence[Passes], limits: Sequence[int], ranks: Sequence[int]) -> tuple[Ints, Ints]:
        """Samples of each kind up to its limit, point after point, and of all ranks together."""
        further = [np.arange(2, limit + 1) for limit in limits]
        if len(passes) == 1:
            samples = np.arange(1, limits[0] + 1)[:, np.newaxis]
        else:
            levels = [own.fixed_s + own.per_sample_s * each for own, each in zip(passes, further, strict=True)]
            which = np.repeat(np.arange(len(passes)), [len(each) for each in further])
            which = which[np.argsort(np.concatenate(levels), kind="stable")]
            samples = np.ones((len(which) + 1, len(passes)), dtype=np.int64)
            samples[1:] += np.cumsum(which[:, np.newaxis] == np.arange(len(passes)), axis=0)
        capacity = samples @ np.array(ranks)
        # Nothing is asked for beyond the global batch.
        enough = int(np.searchsorted(capacity, self.global_batch_size)) + 1
        return samples[:enough], capacity[:enough]


@lru_cache(maxsize=256)
def micro_batch_numbers(batch: int, rough: bool) -> Ints:
    """Numbers of micro-batches to try: all small ones, then steps of some percent."""
    if batch <= 256:
        return np.arange(1, batch + 1)
    small, step = (8, ROUGH_STEP) if rough else (32, 1.04)
    numbers, number = list(range(1, min(small, batch) + 1)), float(small)
    while number * step < batch:
        number *= step
        numbers.append(round(number))
    return np.unique(np.array([*numbers, batch], dtype=np.int64))
