"""What is computed without torch against what one rank really has and does."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from benchmarks.scale.cases import PipelineCase, ShardCase
from benchmarks.scale.order import Ranks, stuck
from benchmarks.scale.pipeline_rank import PipelineRank
from benchmarks.scale.recorder import Recorded
from benchmarks.scale.shard_rank import ShardRank
from lightning_hetero.costs import ModelCosts
from lightning_hetero.membership.holdings import (
    CheckpointPart,
    Holdings,
    shard_checkpoint,
    shard_holdings,
    stage_checkpoint,
    stage_holdings,
)
from lightning_hetero.membership.parameters import ParameterShape, shapes_by_unit
from lightning_hetero.membership.pipelines import PipelineMembership
from lightning_hetero.membership.shards import ShardMembership
from lightning_hetero.simulator.execution import Execution
from lightning_hetero.simulator.pipeline_actions import ALL_REDUCE, RECEIVE, SEND, PipelineAction, PipelineTraffic
from lightning_hetero.simulator.shard_actions import shard_actions

Part = Recorded
"""a collective or message, recorded or computed"""


class ShardSetUp:
    """All that is computed of a shard plan; nothing of it needs torch.

    Args:
        case: the plan.
        parameters: of the model.
        costs: of the model: its units and their sizes.

    Attributes:
        holdings: of each rank.
        checkpoint: its parts, where each rank writes its own rows.
    """

    def __init__(self, case: ShardCase, parameters: Sequence[ParameterShape], costs: ModelCosts) -> None:
        self._plan, self._costs, self._shapes = case.plan, costs, shapes_by_unit(parameters)
        # ranks of the real set-up run on CPUs, where an all-reduce holds them up
        self.membership = ShardMembership.of_plan(case.plan, blocking=True)
        self._execution = Execution.of(case.plan, blocking=True)
        self.groups = self.membership.process_groups(parameters)
        self.holdings: tuple[Holdings, ...] = shard_holdings(self.membership, parameters)
        self.checkpoint: tuple[CheckpointPart, ...] = shard_checkpoint(self.membership, parameters)

    def traffic(self, rank: int) -> tuple[Part, ...]:
        """Return the collectives of a step, in the order in which a rank issues them."""
        actions = shard_actions(self._plan, self._costs, rank, execution=self._execution, shapes=self._shapes)
        return tuple(Part(a.kind, round(a.size_bytes), a.ranks) for a in actions if a.is_collective)

    def differences(self, rank: int, real: ShardRank) -> list[str]:
        """Return where the real set-up and step of a rank are others than computed; none is what is expected."""
        held = self.holdings[rank]
        written = sum(part.size_bytes for part in self.checkpoint if rank in part.writers)
        pairs = {
            "process groups": (tuple(group.ranks for group in self.groups[1:]), real.groups),
            "elements": (held.elements, real.elements),
            "parameter bytes": (held.parameter_bytes, real.parameter_bytes),
            "optimizer bytes": (held.optimizer_bytes, real.optimizer_bytes),
            "checkpoint bytes": (written, real.written_bytes),
        }
        return [*_unequal(pairs), *_unequal_traffic(self.traffic(rank), real.seen)]

    def stuck(self) -> str:
        """Return what in the step of all ranks waits for ever, if anything does."""
        return stuck({rank: [part.ranks for part in self.traffic(rank)] for rank in range(self._plan.world_size)})


class PipelineSetUp:
    """All that is computed of a pipeline plan; nothing of it needs torch.

    Args:
        case: the plan.
        parameters: of the model.
        costs: of the model: its units, their sizes, and what they pass on.

    Attributes:
        holdings: of each rank.
        sent_bytes: what ranks send to rank 0 for a checkpoint.
        file: the checkpoint that it writes.
    """

    def __init__(self, case: PipelineCase, parameters: Sequence[ParameterShape], costs: ModelCosts) -> None:
        self.membership = PipelineMembership.of_plan(case.plan)
        self.groups = self.membership.process_groups(parameters)
        self.holdings: tuple[Holdings, ...] = stage_holdings(self.membership, parameters)
        self.sent_bytes, self.file = stage_checkpoint(self.membership, parameters)
        self._traffic = PipelineTraffic(self.membership, parameters, costs)

    def actions(self, rank: int) -> tuple[PipelineAction, ...]:
        """Return messages and sums of a step, in the order in which a rank begins them."""
        return self._traffic.of_rank(rank)

    def traffic(self, rank: int) -> tuple[Part, ...]:
        """Return the same as it is recorded."""
        return tuple(Part(a.kind, a.size_bytes, a.ranks) for a in self.actions(rank))

    def differences(self, rank: int, real: PipelineRank) -> list[str]:
        """Return where the real set-up and step of a rank are others than computed; none is what is expected."""
        pairs: dict[str, tuple[Any, Any]] = {
            "process groups": (tuple(group.ranks for group in self.groups[1:]), real.groups),
            "elements": (self.holdings[rank].elements, real.elements),
        }
        return [*_unequal(pairs), *_unequal_traffic(self.traffic(rank), real.seen)]

    def stuck(self) -> str:
        """Return what in the step of all ranks waits for ever, if anything does: a sum, or a message not sent."""
        traffic = {rank: self.traffic(rank) for rank in range(self.membership.world_size)}
        sent = _ends(traffic, SEND, lambda rank, other: (rank, other))
        received = _ends(traffic, RECEIVE, lambda rank, other: (other, rank))
        for way in sorted({*sent, *received}):
            if sent[way] != received[way]:
                return f"rank {way[1]} does not receive what rank {way[0]} sends"
        return stuck({rank: [p.ranks for p in parts if p.kind == ALL_REDUCE] for rank, parts in traffic.items()})


def _ends(
    traffic: Mapping[int, Sequence[Part]], kind: str, way: Callable[[int, int], Ranks]
) -> defaultdict[Ranks, Counter[int]]:
    """Sizes of all messages, by the ranks that they go from and to."""
    found: defaultdict[Ranks, Counter[int]] = defaultdict(Counter)
    for rank, parts in traffic.items():
        for part in parts:
            if part.kind == kind:
                found[way(rank, part.ranks[0])][part.size_bytes] += 1
    return found


def _unequal(pairs: Mapping[str, tuple[Any, Any]]) -> list[str]:
    return [f"{name}: computed {a!r:.200}, real {b!r:.200}" for name, (a, b) in pairs.items() if a != b]


def _unequal_traffic(computed: Sequence[Part], real: Sequence[Part]) -> list[str]:
    """Compare in order, what can wait for each other: messages of a direction, what crosses groups, what does not.

    In which order a rank issues a gather and a sum across groups is left to the backend: on gloo, more reductions are
    under way before the first one crosses.
    """
    one, other = _in_order(computed), _in_order(real)
    return [
        f"{name}: computed {one.get(name)!r:.200}, real {other.get(name)!r:.200}"
        for name in sorted({*one, *other})
        if one.get(name) != other.get(name)
    ]


def _in_order(parts: Iterable[Part]) -> dict[str, list[Part]]:
    found: defaultdict[str, list[Part]] = defaultdict(list)
    for part in parts:
        if part.kind in (SEND, RECEIVE):
            found[f"{part.kind}, rank {part.ranks[0]}"].append(part)
        else:
            found["sums" if part.kind == ALL_REDUCE else "gathers and reductions in the group"].append(part)
    return dict(found)


def kinds_of_shard_ranks(case: ShardCase) -> tuple[int, ...]:
    """Return the first and the last rank of a group of each kind: own rows differ by place, work by kind."""
    plan = case.plan
    groups = {
        (plan.mode_of(index), len(group), plan.micro_batches_of(index)): group
        for index, group in reversed(list(enumerate(plan.groups)))
    }
    return tuple(sorted({rank for group in groups.values() for rank in (group[0], group[-1])}))


def kinds_of_pipeline_ranks(case: PipelineCase) -> tuple[int, ...]:
    """Return the ranks of a pipeline of each cut, and an idle one."""
    cuts = {(each.stages, each.micro_batches): each.ranks for each in reversed(case.plan.pipelines)}
    return tuple(sorted({rank for ranks in cuts.values() for rank in ranks} | {*case.plan.idle_ranks[:1]}))
