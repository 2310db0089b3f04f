"""Move batch shares in mid-run when what ranks take drifts from the plan: a device throttles, a neighbour appears."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import TYPE_CHECKING, Any

from lightning.pytorch.utilities import rank_zero_info

from lightning_hetero.data import Split, UnevenLoader
from lightning_hetero.errors import HeteroError, raise_all
from lightning_hetero.plan import ShardPlan
from lightning_hetero.planner.moved_shares import Move, drifts, faster_shares, most_samples, moved_plan
from lightning_hetero.simulator.memory import RankMemory
from lightning_hetero.strategies.share_moves import Position, ShareMoves
from lightning_hetero.units import format_seconds

if TYPE_CHECKING:
    from lightning_hetero.strategies.fsdp import HeteroFSDPStrategy


@dataclass(frozen=True)
class Rebalance:
    """When batch shares move.

    Args:
        threshold: how far a rank's share of all ranks' busy seconds has to be from what was expected, as a part of it.
        window: training batches that a measurement is the median of; after each, ranks compare (one small collective).
        patience: windows in a row over the threshold before anything moves.
        least_gain: how much shorter the slowest rank's seconds have to become, from 0 to below 1.
        settle: whether shares may move after the first window by ``least_gain`` alone: whole steps under each other's
            load say more than the few that the plan was measured by. Once more after five windows, whose median is
            less noise, by a third of ``least_gain``; so after every move.

    Raises:
        HeteroError: listing every value that cannot be used.
    """

    threshold: float = 0.1
    window: int = 5
    patience: int = 2
    least_gain: float = 0.03
    settle: bool = True

    def __post_init__(self) -> None:
        problems = []
        if not (_is_number(self.threshold) and self.threshold > 0):
            problems.append(f"threshold={self.threshold!r}: give a number above 0, such as 0.1")
        if not (_is_number(self.least_gain) and 0 <= self.least_gain < 1):
            problems.append(f"least_gain={self.least_gain!r}: give a number from 0 to below 1, such as 0.03")
        for name in ("window", "patience"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                problems.append(f"{name}={value!r}: give a whole number, 1 or more")
        settle: object = self.settle
        if not isinstance(settle, bool):
            problems.append(f"settle={settle!r}: give True or False")
        raise_all(HeteroError, "Rebalance cannot take these values", problems)


REFINING_WINDOWS = 5
"""over so many a rank's median is taken before shares move by a smaller gain"""

REFINING_GAIN = 1 / 3
"""of ``least_gain``"""


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def rebalance_problems(rebalance: Any) -> list[str]:
    """Say what is wrong with the argument."""
    if rebalance is None or isinstance(rebalance, bool | Rebalance):
        return []
    names = ", ".join(field.name for field in fields(Rebalance))
    return [f"rebalance={rebalance!r}: give True, False, a Rebalance({names}), or None (on with plan='auto')"]


def rebalance_rule(rebalance: bool | Rebalance | None, *, plan_is_given: bool) -> Rebalance | None:
    """Return when shares move; None for never."""
    if isinstance(rebalance, Rebalance):
        return rebalance
    return Rebalance() if (not plan_is_given if rebalance is None else rebalance) else None


class Rebalancer:
    """Watches the ranks of a strategy and moves its plan's shares.

    Every rank sees the same numbers and comes to the same result. What it takes is the busy seconds of its units and
    the seconds in which it waited for input: a rank whose input is slow is a slow rank.

    Args:
        strategy: whose ``plan`` is replaced when a move takes effect.
        rule: when to move; None never moves.
    """

    def __init__(self, strategy: HeteroFSDPStrategy, rule: Rebalance | None) -> None:
        self._strategy = strategy
        self._rule = rule
        self._saved: dict[str, Any] | None = None
        self.moves: ShareMoves | None = None
        self._forget()

    def _forget(self) -> None:
        self._window: list[float] = []
        self._over = 0
        self._settled = self._refined = False
        self._held: list[float] = []  # what batches took under the shares at hand
        self._expected_s: tuple[float, ...] | None = None
        self._most_run: list[int] = []

    # -- start of a fit, and checkpoints -------------------------------------------------------------------------------

    def reset(self) -> None:
        """Another fit begins."""
        self._saved = self.moves = None
        self._forget()

    def restore(self, saved: dict[str, Any]) -> None:
        """Note what a checkpoint says of moves; :meth:`begin_fit` decides whether it is of use."""
        self._saved = saved

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint is to hold."""
        plan = self._strategy.plan
        return {
            "moves": [] if self.moves is None else self.moves.to_state(),
            "device_types": [] if plan is None else list(plan.device_types),
        }

    def begin_fit(self) -> None:
        """Take the plan that the fit begins with, or the moved shares that the run resumed from had."""
        plan, loader = self._strategy.plan, self._strategy.train_loader
        self._forget()
        if not isinstance(loader, UnevenLoader) and self._rule is not None and self._strategy.rebalance_is_asked:
            rank_zero_info(
                "hetero_fsdp: rebalance does nothing here, since each rank's batches are kept as the user makes them"
            )
        if plan is None:
            return
        if all(prediction.busy_s > 0 for prediction in plan.predictions):
            self._expected_s = tuple(prediction.busy_s for prediction in plan.predictions) or None
        self._most_run = [0] * plan.world_size
        self.moves = self._restored(plan) or ShareMoves(plan)
        if isinstance(loader, UnevenLoader):
            self._strategy.plan = self.moves.at((loader.uneven.epoch, loader.uneven.first_batch))

    def _restored(self, plan: ShardPlan) -> ShareMoves | None:
        saved, self._saved = self._saved, None
        if self._rule is None or saved is None or not saved.get("moves"):
            return None
        shares = [tuple(int(share) for share in entry["batch_shares"]) for entry in saved["moves"]]
        alike = tuple(saved.get("device_types", ())) == plan.device_types
        if not alike or any(sum(each) != plan.global_batch_size for each in shares):
            return None
        limits = self._limits(plan, [None] * plan.world_size)
        if any(limit is not None and own > limit for own, limit in zip(shares[-1], limits, strict=True)):
            return None
        rank_zero_info(f"hetero_fsdp: goes on with the batch shares that had moved: {_listed(shares[-1])}")
        return ShareMoves.from_state(saved["moves"], plan)

    def split_at(self, epoch: int, batch: int) -> Split:
        """Return how a training batch is split."""
        if self.moves is None:
            return self._strategy.split
        return partial(self._strategy.split, plan=self.moves.at((epoch, batch)))

    # -- while training ------------------------------------------------------------------------------------------------

    def begin_batch(self, busy_s: float, *, counted: bool) -> bool:
        """Note what the training batch before took, and move shares when it is time (a collective now and then).

        Args:
            busy_s: busy seconds of this rank's units in it.
            counted: whether that was one full step and nothing else; the same on all ranks.

        Returns:
            Whether a move takes effect with the batch at hand.
        """
        loader, plan = self._strategy.train_loader, self._strategy.plan
        if not isinstance(loader, UnevenLoader) or self.moves is None or plan is None:
            return False
        waited_s = loader.take_waited_s()
        position = loader.position
        holding = self.moves.at(position)
        if holding is not plan:
            self._strategy.plan = holding
            self._window.clear()
            self._held.clear()
            return True
        self._most_run = [max(pair) for pair in zip(self._most_run, plan.batch_shares, strict=True)]
        if self._rule is None or plan.world_size == 1 or self.moves.is_pending(position):
            return False
        if counted:
            self._window.append(busy_s + waited_s)
            if self._rule.settle and not self._refined:
                self._held.append(busy_s + waited_s)
        if len(self._window) >= self._rule.window:
            self._compare(self._rule, loader, plan)
            self._window.clear()
        return False

    def _compare(self, rule: Rebalance, loader: UnevenLoader, plan: ShardPlan) -> None:
        own = [statistics.median(self._window), float(loader.uneven.drawn), self._peak_bytes()]
        ranks = self._strategy.gather_vector(own)
        measured_s = [numbers[0] for numbers in ranks]
        if self._expected_s is None:
            # nothing was predicted: what the first window shows is what to expect
            self._settled = self._refined = True
            self._expected_s = tuple(max(seconds, 1e-12) for seconds in measured_s)
            return
        drift = max(map(abs, drifts(measured_s, self._expected_s)))
        self._over = self._over + 1 if drift > rule.threshold else 0
        settles, self._settled = rule.settle and not self._settled, True
        if self._over >= rule.patience or settles:
            self._over = 0
            self._try_to_move(rule.least_gain, loader, plan, measured_s, ranks)
        elif not self._refined and len(self._held) >= REFINING_WINDOWS * rule.window:
            own[0] = statistics.median(self._held)
            ranks = self._strategy.gather_vector(own)
            self._try_to_move(REFINING_GAIN * rule.least_gain, loader, plan, [numbers[0] for numbers in ranks], ranks)
            self._refined = True

    def ask(self, measured_s: Sequence[float]) -> bool:
        """Move shares by what a batch took the ranks, without waiting for windows to agree (a collective).

        Args:
            measured_s: seconds of each rank, the same on all ranks.

        Returns:
            Whether shares will move; not where they are about to already, or where too little would be gained.
        """
        loader, plan = self._strategy.train_loader, self._strategy.plan
        if not isinstance(loader, UnevenLoader) or self.moves is None or plan is None or plan.world_size == 1:
            return False
        if self.moves.is_pending(loader.position):
            return False
        ranks = self._strategy.gather_vector([0.0, float(loader.uneven.drawn), self._peak_bytes()])
        self._window.clear()
        self._over = 0
        return self._try_to_move((self._rule or Rebalance()).least_gain, loader, plan, measured_s, ranks)

    def _try_to_move(
        self,
        least_gain: float,
        loader: UnevenLoader,
        plan: ShardPlan,
        measured_s: Sequence[float],
        ranks: Sequence[Sequence[float]],
    ) -> bool:
        """Move where it gains that much; ``ranks`` has, of each, its drawn batches and its peak bytes."""
        peaks = [int(numbers[2]) if numbers[2] > 0 else None for numbers in ranks]
        move = faster_shares(plan, measured_s, self._fixed_s(), self._limits(plan, peaks))
        move = self._strategy.broadcast(move)  # another host may round in another way
        if move.gain < least_gain or move.shares == plan.batch_shares:
            return False
        expected_s = self._expected_s or measured_s
        self._move(plan, move, self._next_boundary(loader, ranks), measured_s, expected_s)
        return True

    def _next_boundary(self, loader: UnevenLoader, ranks: Sequence[Sequence[float]]) -> Position:
        """Return the first batch that no rank has drawn and that begins an optimizer step."""
        epoch, _ = loader.position
        undrawn = int(max(numbers[1] for numbers in ranks))
        together = self._strategy.accumulated_batches()
        batch = -(-undrawn // together) * together
        return (epoch, batch) if batch < len(loader) else (epoch + 1, 0)

    def _move(
        self,
        plan: ShardPlan,
        move: Move,
        since: Position,
        measured_s: Sequence[float],
        expected_s: Sequence[float],
    ) -> None:
        assert self.moves is not None
        # of two ranks that drift apart, the one that changed
        ratios = [measured / expected for measured, expected in zip(measured_s, expected_s, strict=True)]
        rank = max(range(len(ratios)), key=lambda r: abs(math.log(max(ratios[r], 1e-12))))
        why = (
            f"rank {rank} ({plan.device_types[rank]}) takes {format_seconds(measured_s[rank])} a batch, expected were "
            f"{format_seconds(expected_s[rank])}"
        )
        rank_zero_info(
            f"hetero_fsdp: {why}: batch shares move from {_listed(plan.batch_shares)} to {_listed(move.shares)} with "
            f"epoch {since[0]}, batch {since[1]}; the slowest rank should take {format_seconds(max(move.seconds))} in "
            f"place of {format_seconds(max(measured_s))}"
        )
        self.moves.add(since, moved_plan(plan, move, f"shares moved: {why}", self._memory(plan)))
        self._expected_s = move.seconds
        self._refined = False

    def _peak_bytes(self) -> float:
        peak = self._strategy.instruments.peak_bytes()
        return -1.0 if peak is None else float(peak)

    def _accumulating_bytes(self, plan: ShardPlan, rank: int) -> int:
        costs = self._strategy.measured_costs
        if costs is None or costs.accumulating_bytes is None or plan.micro_batches_of(plan.group_of(rank)) == 1:
            return 0
        return costs.accumulating_bytes[rank]

    def _fixed_s(self) -> Sequence[float] | None:
        costs = self._strategy.measured_costs
        return None if costs is None else costs.fixed_seconds

    def _limits(self, plan: ShardPlan, peaks: Sequence[int | None]) -> tuple[int | None, ...]:
        assert self._strategy.cluster is not None
        capacity = [device.memory_bytes for device in self._strategy.cluster.devices]
        return most_samples(plan, capacity, self._most_run, peaks, self._memory(plan))

    def _memory(self, plan: ShardPlan) -> list[RankMemory] | None:
        """Return each rank's memory by the samples of a micro-batch, where it was measured."""
        costs = self._strategy.measured_costs
        if costs is None or costs.fixed_bytes is None or costs.bytes_per_sample is None:
            return None
        return [
            RankMemory.measured(fixed + self._accumulating_bytes(plan, rank), per_sample)
            for rank, (fixed, per_sample) in enumerate(zip(costs.fixed_bytes, costs.bytes_per_sample, strict=True))
        ]


def _listed(shares: Sequence[int]) -> str:
    return ", ".join(str(share) for share in shares)
