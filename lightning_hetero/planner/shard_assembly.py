"""Put a shard plan together from what its groups were chosen to do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from lightning_hetero.cluster import Cluster
from lightning_hetero.costs import ModelCosts
from lightning_hetero.plan import ModelKey, ShardPlan
from lightning_hetero.planner.batch import split_batch
from lightning_hetero.planner.group_curve import Choice
from lightning_hetero.planner.kinds import GroupSpec, Kinds
from lightning_hetero.simulator.shard_prediction import ShardPrediction


@dataclass(frozen=True)
class ShardAssembly:
    """Puts plans together.

    Args:
        cluster: one device per rank.
        costs: of the model.
        kinds: of the ranks.
        batch: samples of a step.
        lower_bound_s: of the step, carried into plans.
        predict: what a plan is expected to do.
    """

    cluster: Cluster
    costs: ModelCosts
    kinds: Kinds
    batch: int
    lower_bound_s: float
    predict: Callable[[ShardPlan], ShardPrediction]

    def plan(
        self, groups: Sequence[tuple[int, ...]], specs: Sequence[GroupSpec], chosen: dict[GroupSpec, Choice]
    ) -> ShardPlan:
        """The plan in which groups do what was chosen for those that look like them.

        Args:
            groups: ranks of each; together they hold every rank once.
            specs: what each of them looks like.
            chosen: for each spec; together they do at least the global batch.
        """
        limits = [_group_limit(spec, chosen[spec]) for spec in specs]
        totals = _trimmed(limits, self.batch)
        shares, again = [0] * self.cluster.world_size, [False] * self.cluster.world_size
        for group, spec, total in zip(groups, specs, totals, strict=True):
            for rank, share in zip(group, self._shares(group, spec, chosen[spec], total), strict=True):
                shares[rank] = share
            on = {kind: is_on for (kind, _), is_on in zip(spec.counts, chosen[spec].checkpointing, strict=True)}
            for rank in group:
                again[rank] = on[self.kinds.of_rank[rank]]
        order = sorted(range(len(groups)), key=lambda index: groups[index])
        picked = [chosen[specs[index]] for index in order]
        return self.plan_of(
            [groups[index] for index in order],
            [choice.mode for choice in picked],
            # A micro-batch in which no rank has samples would compute for nothing.
            [
                max(1, min(choice.micro_batches, max(shares[rank] for rank in groups[index])))
                for index, choice in zip(order, picked, strict=True)
            ],
            shares,
            again,
        )

    def _shares(self, group: Sequence[int], spec: GroupSpec, choice: Choice, total: int) -> Sequence[int]:
        """Shares of a group's ranks: the exact split of its samples within what its micro-batches hold."""
        if len(group) == 1 or total == 0:
            return [total] * len(group) if len(group) == 1 else [0] * len(group)
        limit = {kind: most for (kind, _), most in zip(spec.counts, choice.samples, strict=True)}
        on = {kind: is_on for (kind, _), is_on in zip(spec.counts, choice.checkpointing, strict=True)}
        members = [self.kinds.of_rank[rank] for rank in group]
        passes = [self.kinds.kinds[kind].passes(on[kind]) for kind in members]
        return split_batch(
            [own.per_sample_s for own in passes],
            [own.fixed_s * choice.micro_batches for own in passes],
            total,
            max_samples=[limit[kind] for kind in members],
            min_samples=min(choice.micro_batches, total // len(group), *limit.values()),
        )

    def plan_of(
        self,
        groups: Sequence[tuple[int, ...]],
        modes: Sequence[str],
        micro_batches: Sequence[int],
        shares: Sequence[int],
        again: Sequence[bool],
    ) -> ShardPlan:
        """A plan of these parts, with its predictions."""
        count_of = {rank: count for group, count in zip(groups, micro_batches, strict=True) for rank in group}
        plan = ShardPlan(
            self.batch,
            tuple(shares),
            tuple(groups),
            self.cluster.device_types(),
            model=ModelKey(self.costs.model, self.costs.parameters),
            reshard_after_forward=len(modes) > 1 or modes[0] != "SHARD_GRAD_OP",
            modes=tuple(modes),
            micro_batches=tuple(micro_batches),
            micro_batch_sizes=tuple(-(-share // count_of[rank]) for rank, share in enumerate(shares)),
            activation_checkpointing=tuple(again),
        )
        return self.complete(plan, self.predict(plan))

    def complete(self, plan: ShardPlan, found: ShardPrediction) -> ShardPlan:
        """The plan with what is predicted of it."""
        return replace(found.put_into(plan), lower_bound_s=self.lower_bound_s)


def _group_limit(spec: GroupSpec, choice: Choice) -> int:
    return sum(count * most for (_, count), most in zip(spec.counts, choice.samples, strict=True))


def _trimmed(limits: Sequence[int], batch: int) -> list[int]:
    """Samples of each group, in proportion to what it can do, that sum to the global batch."""
    able = sum(limits)
    totals = [limit * batch // able for limit in limits]
    left = batch - sum(totals)
    order = sorted(range(len(limits)), key=lambda index: (-(limits[index] * batch % able), index))
    for index in order[:left]:
        totals[index] += 1
    return totals
