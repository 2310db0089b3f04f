"""Which rank holds the others up, since when, and by how much."""

from __future__ import annotations

import math
import os
import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import lightning.pytorch as pl
from lightning.pytorch.utilities import rank_zero_info

from lightning_hetero.callbacks.rank_callback import RankCallback
from lightning_hetero.callbacks.rank_values import RankValues, Rows, named
from lightning_hetero.callbacks.step_record import StepRecord
from lightning_hetero.errors import HeteroError
from lightning_hetero.strategies.rebalance import Rebalancer
from lightning_hetero.units import format_seconds

_BEHIND = 2
"""steps that a device may be behind its host when the ranks compare: waiting for the last one would empty its queue"""

_STEP, _COMPUTE, _EXPECTED, _SAMPLES = range(4)


@dataclass(frozen=True)
class Straggler:
    """A rank that takes longer than its share.

    Attributes:
        rank: the rank.
        since_step: the first optimizer step of those in which it did, without a break.
        step: the step at which it was found.
        compute_s: seconds that its own units take a step.
        expected_s: what the plan expects of them; without a plan, what its samples take the median rank.
        slowdown: how many times what is expected it takes, next to the median rank: 1.3 is 30 % slower.
        planned: whether a plan says what is expected.
    """

    rank: int
    since_step: int
    step: int
    compute_s: float
    expected_s: float
    slowdown: float
    planned: bool

    def __str__(self) -> str:
        of = "planned were" if self.planned else "its share takes the median rank"
        return (
            f"rank {self.rank} is a straggler since step {self.since_step}: its own compute takes "
            f"{format_seconds(self.compute_s)} a step, {of} {format_seconds(self.expected_s)}; next to the median "
            f"rank it is {self.slowdown - 1:.0%} slower"
        )


class StragglerMonitor(RankCallback):
    """Names ranks whose own compute takes longer than planned, and may have their work moved.

    Every ``window`` steps the ranks compare the compute of these steps (one small collective): with what the plan
    expects of each, or without a plan with what as many samples take the median rank. What slows all ranks alike names
    nobody, and a rank that only waits for another one is not named, since waiting is no compute, nor is one that keeps
    to the plan while another is faster than planned. A rank is named when the median of its window is over the
    threshold, and again when that has changed.

    Logged are, as with the other callbacks, ``device/slowdown`` and its forms, and ``stragglers``, how many there are.

    Args:
        threshold: how much slower than expected, next to the median rank, a rank may be: 0.15 is 15 %.
        window: optimizer steps that are compared at a time.
        rebalance: have a strategy that can move batch shares do so at once when a rank is named.
        log_every_n_steps: steps between two times that values are logged; default: the Trainer's.
        folder: where ``metrics.jsonl`` is written; default: the logger's folder, or ``default_root_dir`` without one.

    Attributes:
        stragglers: every one that was named, in order; the same on all ranks.
        slow_ranks: those of the last window, by rank.

    Raises:
        HeteroError: listing every value that cannot be used.
    """

    def __init__(
        self,
        threshold: float = 0.15,
        window: int = 5,
        *,
        rebalance: bool = False,
        log_every_n_steps: int | None = None,
        folder: str | os.PathLike[str] | None = None,
    ) -> None:
        super().__init__(log_every_n_steps, folder)
        number = isinstance(threshold, int | float) and not isinstance(threshold, bool)
        if not number or not math.isfinite(threshold) or threshold <= 0:
            raise HeteroError(f"threshold={threshold!r}: give a number above 0, such as 0.15")
        if isinstance(window, bool) or not isinstance(window, int) or window < 1:
            raise HeteroError(f"window={window!r}: give a whole number of steps, 1 or more")
        self.threshold, self.window, self.rebalance = threshold, window, rebalance
        self.stragglers: list[Straggler] = []
        self.slow_ranks: dict[int, Straggler] = {}
        self._slowdowns: list[float] = []
        self._named: dict[int, float] = {}
        self._since: dict[int, int] = {}
        self._steps: deque[list[float | None]] = deque()
        self._first = True

    def begin_fit(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        """Forget another fit."""
        self.stragglers, self.slow_ranks, self._slowdowns = [], {}, []
        self._named, self._since, self._first = {}, {}, True
        self._steps.clear()

    def step_is_complete(self, trainer: pl.Trainer, record: StepRecord) -> None:
        """Note a step; the first one warms up, and one that is traced, or has memory counted, takes longer."""
        first, self._first = self._first, False
        if first or record.values.get("sampled") or record.values.get("traced"):
            return
        assert record.parts is not None
        planned = self.meter.planned
        expected_s = None if planned is None or planned.busy_s is None else planned.busy_s
        if expected_s is not None and planned is not None:
            part = record.samples / planned.samples if planned.samples else record.batches
            expected_s *= part
        self._steps.append([float(record.step), record.parts.compute_s, expected_s, record.samples])

    def step_is_over(self, trainer: pl.Trainer, step: int) -> None:
        """Compare when a window is full, and log."""
        if trainer.world_size > 1:
            behind = _BEHIND if trainer.strategy.root_device.type == "cuda" else 0
            self.meter.complete(trainer, behind)
            # a device may have run more steps than another one's: as many as all have are compared
            ready = [row for row in self._steps if int(row[_STEP] or 0) <= step - behind]
            if len(ready) >= self.window:
                values = RankValues(trainer, 4)
                for row in ready[: self.window]:
                    values.add(row)
                    self._steps.remove(row)
                self._compare(trainer, values.take(), step)
        if self._slowdowns and self.logs_at(trainer, step):
            self.log_values(trainer, {**named("slowdown", self._slowdowns), "stragglers": float(len(self.slow_ranks))})

    def _compare(self, trainer: pl.Trainer, rows: Rows, step: int) -> None:
        found = window_slowdowns(rows)
        self._slowdowns = [statistics.median(rank) for rank in found]
        limit = 1.0 + self.threshold
        slow = {}
        for rank, slowdowns in enumerate(found):
            for row, slowdown in zip(rows[rank], slowdowns, strict=True):
                if slowdown <= limit:
                    self._since.pop(rank, None)
                else:
                    self._since.setdefault(rank, int(row[_STEP]))
            if self._slowdowns[rank] > limit:
                slow[rank] = self._straggler(rank, rows[rank], self._slowdowns[rank], step, found, rows)
        self.slow_ranks = slow
        for rank, straggler in slow.items():
            before = self._named.get(rank)
            if before is None or abs(straggler.slowdown / before - 1.0) > self.threshold:
                self._name(straggler)
        for rank in sorted(set(self._named) - set(slow)):
            rank_zero_info(f"StragglerMonitor: rank {rank} keeps up again at step {step}")
            del self._named[rank]
        if slow and self.rebalance:
            self._ask_to_move(trainer, rows)

    def _straggler(
        self,
        rank: int,
        own: Sequence[Sequence[float]],
        slowdown: float,
        step: int,
        found: Sequence[Sequence[float]],
        rows: Rows,
    ) -> Straggler:
        planned = not math.isnan(own[0][_EXPECTED])
        compute_s = statistics.median(row[_COMPUTE] for row in own)
        if planned:
            expected_s = statistics.median(row[_EXPECTED] for row in own)
        else:
            expected_s = compute_s / slowdown
        # the last step of the window may be the first that is fast again: then it has been slow since its first
        since = self._since.get(rank, int(own[0][_STEP]))
        return Straggler(rank, since, step, compute_s, expected_s, slowdown, planned)

    def _name(self, straggler: Straggler) -> None:
        self._named[straggler.rank] = straggler.slowdown
        self.stragglers.append(straggler)
        rank_zero_info(f"StragglerMonitor: {straggler}")
        if straggler.rank == self.meter.facts.rank:
            values = asdict(straggler)
            del values["rank"]
            self.meter.write("straggler", values)

    def _ask_to_move(self, trainer: pl.Trainer, rows: Rows) -> None:
        rebalancer = getattr(trainer.strategy, "rebalancer", None)
        if isinstance(rebalancer, Rebalancer):
            rebalancer.ask([statistics.median(row[_COMPUTE] for row in rank) for rank in rows])
        else:
            self.say_once(
                f"{type(trainer.strategy).__name__} cannot move work between ranks: use hetero_fsdp, or plan anew"
            )


def window_slowdowns(rows: Rows) -> list[list[float]]:
    """How many times what is expected of it each rank took, next to the median rank.

    Args:
        rows: by rank and step: the step, seconds of compute, seconds expected (NaN without a plan), samples.

    Returns:
        By rank and step; 1 where a rank has nothing to do, and no more where it takes no longer than planned: that
        another one is faster than planned is none of its faults.
    """
    slowdowns: list[list[float]] = [[] for _ in rows]
    for at in range(len(rows[0])):
        steps = [rank[at] for rank in rows]
        # what a rank without a plan is expected to take is in proportion to its samples
        unplanned = any(math.isnan(step[_EXPECTED]) for step in steps)
        shares = [step[_SAMPLES] if unplanned else step[_EXPECTED] for step in steps]
        ratios = [step[_COMPUTE] / share if share > 0 else math.nan for step, share in zip(steps, shares, strict=True)]
        there = [ratio for ratio in ratios if ratio > 0]
        # of two ranks the faster one: the slower one is what is looked for
        usual = statistics.median_low(there) if there else 1.0
        for rank, (step, ratio) in enumerate(zip(steps, ratios, strict=True)):
            slowdown = ratio / usual if ratio > 0 else 1.0
            keeps_to_plan = not unplanned and step[_COMPUTE] <= step[_EXPECTED]
            slowdowns[rank].append(min(slowdown, 1.0) if keeps_to_plan else slowdown)
    return slowdowns
