"""Improve a shard plan of a few ranks by small changes, as long as one helps.

The curves of :mod:`group_curve` give samples to ranks in the order in which the sums of their units' seconds grow. In
lock-step a group takes the maximum unit by unit, so where types are good at different units, or communication hides
some of them, another split may be faster by a sample or two.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from lightning_hetero.plan import ShardPlan
from lightning_hetero.planner.group_curve import Curves
from lightning_hetero.simulator.shard_step import group_s

_MOST_ROUNDS = 100


class Polish:
    """Small changes to plans.

    Args:
        curves: of the groups of the cluster: seconds of their communication, and what fits their memory.
    """

    def __init__(self, curves: Curves) -> None:
        self.curves = curves
        self._group_s: dict[tuple[object, ...], float] = {}

    def best(self, plan: ShardPlan) -> ShardPlan:
        """The plan, or a faster one that fits, in the same groups; without predictions where it was changed."""
        best_s = self._slowest_s(plan)
        for _ in range(_MOST_ROUNDS):
            found = plan
            for each in self._changes(plan):
                seconds = self._slowest_s(each)
                if seconds < best_s * (1 - 1e-12):
                    found, best_s = each, seconds
            if found is plan:
                break
            plan = found
        return _consistent(plan)

    def _slowest_s(self, plan: ShardPlan) -> float:
        """Seconds of the slowest group; infinite where one does not fit. Groups stay, and so does the crossing."""
        return max(self._seconds(plan, index) for index in range(len(plan.groups)))

    def _seconds(self, plan: ShardPlan, index: int) -> float:
        group, mode, count = plan.groups[index], plan.modes[index], plan.micro_batches[index]
        shares = tuple(plan.batch_shares[rank] for rank in group)
        again = tuple(plan.activation_checkpointing[rank] for rank in group)
        key = (group, mode, count, shares, again)
        if key not in self._group_s:
            kinds = self.curves.kinds
            members = [kinds.of_rank[rank] for rank in group]
            fits = all(
                max(1, -(-share // count)) <= self.curves.max_samples(kind, len(group), mode, on, count > 1)
                for kind, share, on in zip(members, shares, again, strict=True)
            )
            passes = [kinds.kinds[kind].passes(on) for kind, on in zip(members, again, strict=True)]
            traffic = self.curves.traffic(kinds.spec(group), mode)
            self._group_s[key] = group_s(passes, shares, count, traffic, mode) if fits else math.inf
        return self._group_s[key]

    def _changes(self, plan: ShardPlan) -> Iterator[ShardPlan]:
        yield from self._moved(plan)
        for index, count in enumerate(plan.micro_batches):
            for other in (count - 1, count + 1) if self.curves.accumulate else ():
                if 1 <= other <= max(plan.batch_shares):
                    changed = replace(plan, micro_batches=_with(plan.micro_batches, index, other))
                    yield changed
                    # Another number of micro-batches asks for other shares.
                    yield from self._moved(changed, within=index)
        for rank in range(plan.world_size) if self.curves.checkpointing else ():
            on = not plan.activation_checkpointing[rank]
            changed = replace(plan, activation_checkpointing=_with(plan.activation_checkpointing, rank, on))
            yield changed
            yield from self._moved(changed, within=plan.group_of(rank))
        for index, mode in enumerate(plan.modes):
            for another in self.curves.modes:
                if another != mode and "NO_SHARD" not in (another, mode):
                    yield replace(plan, modes=_with(plan.modes, index, another))

    def _moved(self, plan: ShardPlan, within: int | None = None) -> Iterator[ShardPlan]:
        """With a sample, or one for each micro-batch, moved from one rank to another."""
        ranks = range(plan.world_size)
        for giver in ranks:
            for taker in ranks:
                if giver == taker or (
                    within is not None and within not in (plan.group_of(giver), plan.group_of(taker))
                ):
                    continue
                sizes = {1, 2, plan.micro_batches_of(plan.group_of(giver)), plan.micro_batches_of(plan.group_of(taker))}
                for size in sorted(sizes):
                    if size <= plan.batch_shares[giver]:
                        shares = _with(plan.batch_shares, giver, plan.batch_shares[giver] - size)
                        yield replace(plan, batch_shares=_with(shares, taker, shares[taker] + size))


def _consistent(plan: ShardPlan) -> ShardPlan:
    """With what follows from shares, micro-batches and modes."""
    sizes = tuple(
        -(-share // plan.micro_batches_of(plan.group_of(rank))) for rank, share in enumerate(plan.batch_shares)
    )
    reshard = len(plan.modes) > 1 or plan.modes[0] != "SHARD_GRAD_OP"
    return replace(plan, micro_batch_sizes=sizes, reshard_after_forward=reshard)


def _with(values: tuple, index: int, value: object) -> tuple:  # type: ignore[type-arg]
    return (*values[:index], value, *values[index + 1 :])
