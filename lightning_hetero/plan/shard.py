"""Shard plans: who takes how many samples, and who shards parameters with whom."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar

from lightning_hetero.cluster import Cluster
from lightning_hetero.errors import PlanError, raise_all
from lightning_hetero.plan.common import ModelKey, PlanFile, RankPrediction, even_parts, read_model, read_predictions
from lightning_hetero.plan.options import PLAN_OPTIONS, option_problems
from lightning_hetero.records import (
    Record,
    boolean,
    integer,
    number,
    optional,
    shown,
    text,
    tuple_of,
)

SCHEMA = 1

MODES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD")
"""How a group holds the model: parameters gathered for forward and again for backward; gathered once and kept in
between; whole on every rank."""

_REPLAN = 'make a new plan (plan="auto")'


@dataclass(frozen=True)
class ShardPlan(PlanFile):
    """Who takes how many samples, and who shards parameters with whom.

    Args:
        global_batch_size: samples per optimizer step over all ranks.
        batch_shares: samples of the global batch per rank; they sum to ``global_batch_size``.
        groups: shard groups, each a tuple of ranks; together they hold every rank once.
        device_types: type of device per rank that the plan was made for.
        model: the model that the plan was made for; ``None`` if it fits any.
        reshard_after_forward: whether parameters are freed after forward and gathered again for backward
            (FULL_SHARD) or kept (SHARD_GRAD_OP: more memory, one all-gather less).
        predicted_step_s: predicted seconds of one optimizer step.
        predictions: one per rank, or none.
        reasons: why the plan is as it is, one sentence each.
        modes: how each group holds the model, one of :data:`MODES`; empty where ``reshard_after_forward`` says it
            for all groups. For one group the two must agree.
        micro_batches: micro-batches that each group runs in a step; empty where it is one each. The ranks of a group
            run them together, layer by layer; groups meet once a step.
        micro_batch_sizes: samples of each rank's largest micro-batch; empty where they follow from the shares. A rank
            splits its share as evenly as whole samples allow (:meth:`micro_batch_samples`), so there is one right
            value: share / micro-batches of its group, rounded up.
        activation_checkpointing: per rank, whether blocks keep only their input and compute their forward again in
            backward; empty where no rank does.
        lower_bound_s: seconds that no plan for the same devices, costs and batch can be below.
        options: how the strategy runs the plan, beside its defaults: some of
            :data:`~lightning_hetero.plan.options.PLAN_OPTIONS`, as plain data.
    """

    KIND: ClassVar[str] = "shard"
    STRATEGY: ClassVar[str] = "hetero_fsdp"

    global_batch_size: int
    batch_shares: tuple[int, ...]
    groups: tuple[tuple[int, ...], ...]
    device_types: tuple[str, ...]
    model: ModelKey | None = None
    reshard_after_forward: bool = True
    predicted_step_s: float | None = None
    predictions: tuple[RankPrediction, ...] = ()
    reasons: tuple[str, ...] = ()
    modes: tuple[str, ...] = ()
    micro_batches: tuple[int, ...] = ()
    micro_batch_sizes: tuple[int, ...] = ()
    activation_checkpointing: tuple[bool, ...] = ()
    lower_bound_s: float | None = None
    options: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        # Lists would compare unequal to the tuples that load() gives.
        for name in ("batch_shares", "device_types", "predictions", "reasons", *_DETAILS):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        object.__setattr__(self, "groups", tuple(tuple(group) for group in self.groups))

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return len(self.batch_shares)

    def mode_of(self, group: int) -> str:
        """How the group with this index holds the model, one of :data:`MODES`."""
        if self.modes:
            return self.modes[group]
        return "FULL_SHARD" if self.reshard_after_forward else "SHARD_GRAD_OP"

    def micro_batches_of(self, group: int) -> int:
        """How many micro-batches the group with this index runs in a step."""
        return self.micro_batches[group] if self.micro_batches else 1

    def group_of(self, rank: int) -> int:
        """Index of the group that holds ``rank``.

        Raises:
            PlanError: if none does.
        """
        for index, group in enumerate(self.groups):
            if rank in group:
                return index
        raise PlanError(f"rank {rank} is in no group: the plan has ranks 0 to {self.world_size - 1}")

    def checkpoints(self, rank: int) -> bool:
        """Whether the blocks of ``rank`` are computed again in backward."""
        return bool(self.activation_checkpointing) and self.activation_checkpointing[rank]

    def micro_batch_samples(self, rank: int, samples: int | None = None) -> tuple[int, ...]:
        """Samples of each micro-batch of ``rank``, in the order in which its group runs them.

        They differ by one at most, larger ones first, so that the large ones of a group's ranks run together.

        Args:
            rank: whose.
            samples: what to split, as given by :meth:`samples` for a short batch; by default the rank's share.

        Returns:
            One number per micro-batch of the group; zeros where there are fewer samples than micro-batches.
        """
        count = self.micro_batches_of(self.group_of(rank))
        total = self.batch_shares[rank] if samples is None else samples
        return even_parts(total, count)

    def samples(self, count: int) -> tuple[int, ...]:
        """Split a batch of ``count`` samples in proportion to the shares.

        Largest remainders first, then larger shares, then lower ranks; so no rank gets more than its
        share of a full batch, and ``count`` equal to the global batch size gives the shares themselves.

        Args:
            count: from 0 to the global batch size.

        Returns:
            Whole samples per rank that sum to ``count``; some may be 0.

        Raises:
            PlanError: for any other ``count``.
        """
        total = self.global_batch_size
        if not 0 <= count <= total:
            raise PlanError(
                f"a batch of {count} samples does not fit a plan for a global batch of {total}: "
                f"give 0 to {total} samples, or {_REPLAN}"
            )
        split = [count * share // total for share in self.batch_shares]
        # In whole numbers, so that every rank finds the same order.
        remainder_first = sorted(
            range(len(split)),
            key=lambda rank: (-(count * self.batch_shares[rank] % total), -self.batch_shares[rank], rank),
        )
        for rank in remainder_first[: count - sum(split)]:
            split[rank] += 1
        return tuple(split)

    def validate(self, cluster: Cluster | None = None, model: ModelKey | None = None) -> None:
        """Check the plan in itself and, where given, against the cluster and the model it is to run on.

        Raises:
            PlanError: listing every problem.
        """
        problems = [*self._share_problems(), *self._group_problems(), *self._size_problems(), *self._detail_problems()]
        problems += self._option_problems()
        if cluster is not None:
            problems += self._cluster_problems(cluster)
        if model is not None and self.model is not None and model.parameters != self.model.parameters:
            problems.append(
                f"model: the plan was made for {self.model.name} with {self.model.parameters} parameters, "
                f"this is {model.name} with {model.parameters}: {_REPLAN} for this model"
            )
        raise_all(PlanError, "the plan is not valid", problems)

    def _share_problems(self) -> list[str]:
        problems = [
            f"batch_shares[{rank}] is {share}: give 0 or more samples"
            for rank, share in enumerate(self.batch_shares)
            if share < 0
        ]
        if self.global_batch_size < 1:
            problems.append(f"global_batch_size is {self.global_batch_size}: give at least 1 sample")
        if not self.batch_shares:
            problems.append("batch_shares is empty: give one share per rank")
        if sum(self.batch_shares) != self.global_batch_size:
            problems.append(
                f"batch_shares sum to {sum(self.batch_shares)}, global_batch_size is "
                f"{self.global_batch_size}: make them equal"
            )
        return problems

    def _group_problems(self) -> list[str]:
        problems = [f"groups[{index}] is empty: remove it" for index, group in enumerate(self.groups) if not group]
        members = Counter(rank for group in self.groups for rank in group)
        problems += [
            f"groups hold rank {rank} {count} times: every rank belongs to one group"
            for rank, count in sorted(members.items())
            if count > 1
        ]
        expected = set(range(self.world_size))
        if missing := sorted(expected - set(members)):
            problems.append(f"groups lack rank {_listed(missing)}: add each of them to one group")
        if unknown := sorted(set(members) - expected):
            problems.append(
                f"groups hold rank {_listed(unknown)}, batch_shares has {self.world_size} ranks "
                f"(0 to {self.world_size - 1}): remove them or add their shares"
            )
        return problems

    def _size_problems(self) -> list[str]:
        sizes = {"device_types": len(self.device_types), "predictions": len(self.predictions)}
        return [
            f"{name} has {size} entries, batch_shares has {self.world_size}: give one per rank"
            for name, size in sizes.items()
            if size != self.world_size and not (name == "predictions" and size == 0)
        ]

    def _detail_problems(self) -> list[str]:
        per_group = {"modes": self.modes, "micro_batches": self.micro_batches}
        per_rank = {
            "micro_batch_sizes": self.micro_batch_sizes,
            "activation_checkpointing": self.activation_checkpointing,
        }
        problems = [
            f"{name} has {len(values)} entries, groups has {len(self.groups)}: give one per group, or leave it out"
            for name, values in per_group.items()
            if values and len(values) != len(self.groups)
        ]
        problems += [
            f"{name} has {len(values)} entries, batch_shares has {self.world_size}: give one per rank, or leave it out"
            for name, values in per_rank.items()
            if values and len(values) != self.world_size
        ]
        problems += [
            f"modes[{index}] is {mode!r}: give one of {', '.join(MODES)}"
            for index, mode in enumerate(self.modes)
            if mode not in MODES
        ]
        problems += [
            f"micro_batches[{index}] is {count}: give 1 or more"
            for index, count in enumerate(self.micro_batches)
            if count < 1
        ]
        # What the other fields follow from must be right first.
        return problems or [*self._mode_problems(), *self._micro_batch_problems()]

    def _option_problems(self) -> list[str]:
        problems = [
            f"options.{name} is {shown(value)}: {accepted}" for name, value, accepted in option_problems(self.options)
        ]
        if "sharding_strategy" in self.options:
            problems.append("options.sharding_strategy: a plan says it by groups, modes and reshard_after_forward")
        if self.options.get("activation_checkpointing") is False and any(self.activation_checkpointing):
            problems.append(
                "options.activation_checkpointing is false, and activation_checkpointing names ranks: leave one out"
            )
        return problems

    def _mode_problems(self) -> list[str]:
        if len(self.groups) != 1 or not self.modes:
            return []
        resharded = {"FULL_SHARD": True, "SHARD_GRAD_OP": False}.get(self.modes[0], self.reshard_after_forward)
        if resharded == self.reshard_after_forward:
            return []
        return [
            (
                f"modes[0] is {self.modes[0]}, reshard_after_forward is {str(self.reshard_after_forward).lower()}: "
                f"set it to {str(resharded).lower()}, or leave modes out"
            )
        ]

    def _micro_batch_problems(self) -> list[str]:
        problems = []
        group_of = {rank: index for index, group in enumerate(self.groups) for rank in group}
        for rank, (size, share) in enumerate(zip(self.micro_batch_sizes, self.batch_shares, strict=False)):
            if rank in group_of:
                count = self.micro_batches_of(group_of[rank])
                if size != -(-share // count):
                    problems.append(
                        f"micro_batch_sizes[{rank}] is {size}: a share of {share} in {count} "
                        f"micro-batch{'es' if count > 1 else ''} makes {-(-share // count)}; set it to that, or leave "
                        "micro_batch_sizes out"
                    )
        return problems

    def _cluster_problems(self, cluster: Cluster) -> list[str]:
        if cluster.world_size != self.world_size:
            counts = f"{self.world_size} ranks, cluster {cluster.name!r} has {cluster.world_size}"
            return [f"the plan is for {counts}: {_REPLAN}, or start {self.world_size} ranks"]
        return [
            f"device_types[{rank}] is {planned!r}, rank {rank} of cluster {cluster.name!r} is {found!r}: "
            f"{_REPLAN}, or start the ranks in the order of the plan"
            for rank, (planned, found) in enumerate(zip(self.device_types, cluster.device_types(), strict=False))
            if planned != found
        ]

    def to_dict(self) -> dict[str, Any]:
        """What :meth:`save` writes, as plain data."""
        data = {"schema": SCHEMA, "kind": self.KIND} | asdict(self)
        # What a plan does not say stays out of its file: files of plain plans are as short as they were.
        for name in (*_DETAILS, "lower_bound_s", "options"):
            if data[name] in ((), None, {}):
                del data[name]
        return data

    @classmethod
    def _read(cls, record: Record, data: object) -> ShardPlan:
        return _read_plan(record, data)


_REQUIRED = ("schema", "kind", "global_batch_size", "batch_shares", "groups", "device_types")
_DETAILS = ("modes", "micro_batches", "micro_batch_sizes", "activation_checkpointing")
_OPTIONAL = (
    "model",
    "reshard_after_forward",
    "predicted_step_s",
    "predictions",
    "reasons",
    *_DETAILS,
    "lower_bound_s",
    "options",
)


def _read_plan(record: Record, data: object) -> ShardPlan:
    top = record.mapping(data, "", _REQUIRED, _OPTIONAL) or {}
    if "schema" in top and top["schema"] != SCHEMA:
        record.note("schema", f"is {shown(top['schema'])}: this version reads schema {SCHEMA}; {_REPLAN}")
    return ShardPlan(
        global_batch_size=record.take(top, "global_batch_size", "", integer(1), 1),
        batch_shares=record.take(top, "batch_shares", "", tuple_of(integer(0)), ()),
        groups=record.take(top, "groups", "", tuple_of(tuple_of(integer(0))), ()),
        device_types=record.take(top, "device_types", "", tuple_of(text), ()),
        model=read_model(record, top.get("model")),
        reshard_after_forward=record.take(top, "reshard_after_forward", "", boolean, True),
        predicted_step_s=record.take(top, "predicted_step_s", "", optional(number(0)), None),
        predictions=read_predictions(record, top.get("predictions") or []),
        reasons=record.take(top, "reasons", "", tuple_of(text), ()),
        modes=record.take(top, "modes", "", tuple_of(text), ()),
        micro_batches=record.take(top, "micro_batches", "", tuple_of(integer(1)), ()),
        micro_batch_sizes=record.take(top, "micro_batch_sizes", "", tuple_of(integer(0)), ()),
        activation_checkpointing=record.take(top, "activation_checkpointing", "", tuple_of(boolean), ()),
        lower_bound_s=record.take(top, "lower_bound_s", "", optional(number(0)), None),
        options=_read_options(record, top.get("options")),
    )


def _read_options(record: Record, value: object) -> dict[str, Any]:
    if value is None:
        return {}
    options = record.mapping(value, "options", [], PLAN_OPTIONS) or {}
    known = {name: option for name, option in options.items() if name in PLAN_OPTIONS}
    problems = option_problems(known)
    for problem in problems:
        record.note(f"options.{problem.name}", f"is {shown(problem.value)}: {problem.accepted}")
    return {} if problems else known


def _listed(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
