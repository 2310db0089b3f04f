"""What one rank does in one step of a shard plan, in the order in which its host issues it.

A backward of blocks 2, 1, 0, gathered again (FULL_SHARD), one gather ahead of the block that computes::

    BACKWARD_PRE    gather 2, gather 1 | B2 | reduce 2, gather 0 | B1 | reduce 1 | B0 | reduce 0 | reduce root
    BACKWARD_POST   gather 2 | B2 | gather 1, reduce 2 | B1 | gather 0, reduce 1 | B0 | reduce 0 | reduce root
    NONE            gather 2 | B2 | reduce 2, gather 1 | B1 | reduce 1, gather 0 | B0 | reduce 0 | reduce root

Gathers and reductions of a shard group share one communication stream and run in this order; what crosses groups has a
stream of its own. A gather may begin when only as many units are gathered as ``Execution.gathers_ahead`` allows; under
BACKWARD_POST also when the gradients of the block before are there; under NONE it comes behind that block's reduction.

Engines. "fsdp2" is what :mod:`lightning_hetero.strategies` does: parameters padded one by one to whole rows per rank;
what is outside the blocks is one group (the root) of the module that holds them, which FULL_SHARD gathers again for
backward; groups of equal size all-reduce unit by unit behind each reduce-scatter; others cross by ownership, unit by
unit, each sent when the gradients of the next unit are there, as wide as gradients are held; ranks that shard nothing
do the same. Under accumulation, reductions in the group come with every micro-batch and the crossing with the last.
"fsdp1" is ``FullyShardedDataParallel`` (torch/distributed/fsdp, torch 2.14): one flat parameter per unit, padded once;
the root stays gathered until backward; NO_SHARD all-reduces each unit behind its backward; a limit on all-gathers is
its rate limiter (2 in flight, where blocks are freed), and backward prefetch reaches one unit ahead in any case; under
accumulation (``no_sync``) nothing is reduced but in the last micro-batch. A hybrid shard group of one rank becomes
NO_SHARD *on that group* (``_init_core_state``), so that FSDP1 then reduces nothing across replicas: it does not train
one model, and is fast. Both lists are held against what was recorded (tests/test_shard_actions.py).

Not in the list: what is agreed on once a step (sizes of the batch, the norm of gradients, logs), which is a few bytes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from lightning_hetero.costs import ModelCosts, UnitCost
from lightning_hetero.errors import HeteroError, raise_all
from lightning_hetero.membership.shards import ShardMembership
from lightning_hetero.plan import ShardPlan
from lightning_hetero.simulator.execution import Execution
from lightning_hetero.simulator.memory import StateBytes

FORWARD, BACKWARD, OPTIMIZER = "forward", "backward", "optimizer"
ALL_GATHER, REDUCE_SCATTER, ALL_REDUCE = "all_gather", "reduce_scatter", "all_reduce"

COLLECTIVES = (ALL_GATHER, REDUCE_SCATTER, ALL_REDUCE)

COMPUTE, SHARD, CROSS = "compute", "shard", "cross"
"""streams: what a rank computes, what its shard group sends, what crosses groups"""

ROOT = "root"
"""the unit of collectives for all that is outside the blocks"""

Shapes = Mapping[str, Sequence[Sequence[int]]]
"""shapes of the parameters of each unit, by its name"""


@dataclass(frozen=True)
class ShardAction:
    """One thing that a rank does.

    Args:
        kind: "forward", "backward" or "optimizer", or one of :data:`COLLECTIVES`.
        unit: name of the unit; :data:`ROOT` for collectives of what is outside the blocks; empty for the optimizer.
        micro_batch: of the step, counted from 0.
        stream: :data:`COMPUTE`, :data:`SHARD` or :data:`CROSS`; each runs its actions one after the other.
        after: indices, in the rank's list, of actions on other streams that must have ended before.
        size_bytes: of a collective: the whole tensor, padding included.
        ranks: of a collective: over which it runs, ascending.
    """

    kind: str
    unit: str
    micro_batch: int
    stream: str
    after: tuple[int, ...] = ()
    size_bytes: float = 0
    ranks: tuple[int, ...] = field(default=(), repr=False)

    @property
    def is_collective(self) -> bool:
        """Whether other ranks take part."""
        return self.kind in COLLECTIVES

    def __str__(self) -> str:
        return f"{self.kind} {self.unit}".rstrip() + (f" #{self.micro_batch}" if self.micro_batch else "")


def shard_actions(
    plan: ShardPlan,
    costs: ModelCosts,
    rank: int,
    *,
    state: StateBytes | None = None,
    execution: Execution | None = None,
    shapes: Shapes | None = None,
) -> tuple[ShardAction, ...]:
    """What one rank does in one step.

    Args:
        plan: its groups, modes and micro-batches are used.
        costs: of the model; names, parameters and ``is_block`` of the units are used.
        rank: which one.
        state: bytes per parameter; ``gathered`` is the width of all-gathers, ``reduced`` of reductions, ``gradient``
            of what crosses groups by ownership. By default 32-bit.
        execution: by default FSDP2 with the plan's options.
        shapes: of the parameters, for exact padding and owners. Without them a unit is one parameter of as many rows
            as it has elements.

    Returns:
        Its actions in the order in which the host issues them.

    Raises:
        HeteroError: if the engine cannot run the plan.
        PlanError: if the rank is in no group.
    """
    execution = execution or Execution.of(plan)
    raise_all(HeteroError, f"{execution.engine} cannot run the plan", _engine_problems(plan, execution))
    return _Step(plan, costs, rank, state or StateBytes(), execution, shapes or {}).actions()


def _engine_problems(plan: ShardPlan, execution: Execution) -> list[str]:
    if execution.engine != "fsdp1" or len(plan.groups) == 1:
        return []
    problems = []
    if len({len(group) for group in plan.groups}) > 1:
        problems.append("its groups are of unequal size: give equal ones, or engine fsdp2")
    if len({plan.mode_of(index) for index in range(len(plan.groups))}) > 1:
        problems.append("its groups hold the model in different modes: give one mode, or engine fsdp2")
    if len({plan.micro_batches_of(index) for index in range(len(plan.groups))}) > 1:
        problems.append("its groups run different numbers of micro-batches: give one number, or engine fsdp2")
    return problems


class _Step:
    """Builds the list of one rank."""

    def __init__(
        self,
        plan: ShardPlan,
        costs: ModelCosts,
        rank: int,
        state: StateBytes,
        execution: Execution,
        shapes: Shapes,
    ) -> None:
        index = plan.group_of(rank)
        self.plan, self.units, self.rank, self.state, self.execution = plan, costs.units, rank, state, execution
        self.shapes = shapes
        self.micro_batches = plan.micro_batches_of(index)
        membership = ShardMembership.of_plan(plan, blocking=execution.blocking)
        self.replicas = membership.replicas
        self.own = next(replica for replica in self.replicas if rank in replica)
        self.gathers = len(self.own) > 1
        self.gathers_again = plan.mode_of(index) == "FULL_SHARD" and self.gathers
        self.is_native = membership.is_native
        self.blocks = [unit for unit in self.units if unit.is_block and unit.parameters]
        self.root = [unit for unit in self.units if not unit.is_block and unit.parameters]
        self.parts = [*([self.root] if self.root else []), *([unit] for unit in self.blocks)]
        self.list: list[ShardAction] = []
        self.last: dict[tuple[str, str], int] = {}  # index of the last action of a kind and unit
        self.owners: dict[tuple[tuple[int, int], ...], tuple[int, ...]] = {}  # by their places
        self.held: list[Sequence[UnitCost]] = []  # parts that wait to cross

    def actions(self) -> tuple[ShardAction, ...]:
        for micro_batch in range(self.micro_batches):
            self.micro_batch = micro_batch
            self.is_last = micro_batch == self.micro_batches - 1
            self._forward()
            self._backward()
        ends = [index for index, each in enumerate(self.list) if each.is_collective]
        self._add(OPTIMIZER, "", COMPUTE, after=ends)
        return tuple(self.list)

    # -- compute -------------------------------------------------------------------------------------------------------

    def _forward(self) -> None:
        if self.root:
            self._gather(self.root)
        ahead, done = self.execution.forward_ahead(len(self.blocks)), 0
        if self.execution.engine == "fsdp1" and not self.gathers_again:
            ahead = len(self.blocks)  # its limiter waits for blocks to be freed, and none is
        blocks = {unit.name for unit in self.blocks}
        for unit in self.units:
            if unit.name in blocks:
                freed = done - 1 - ahead
                self._gather([unit], after=[(FORWARD, self.blocks[freed].name)] if freed >= 0 else [])
                done += 1
            self._compute(FORWARD, unit)

    def _backward(self) -> None:
        again = self.gathers_again
        if again and self.root and self.execution.engine == "fsdp2":
            self._gather(self.root, after=[(FORWARD, self.units[-1].name)])
        order = self.blocks[::-1]
        when, ahead = self.execution.backward_prefetch, self.execution.backward_ahead(len(order))
        when = when if ahead else "NONE"
        places = {unit.name: place for place, unit in enumerate(order)}
        gathered, first = 0, True
        for unit in reversed(self.units):
            place = places.get(unit.name)
            if place is None:
                self._compute(BACKWARD, unit)
                continue
            if again:
                if first or when == "NONE":
                    gathered = self._gather_again(order, gathered, place + 1, when, place)
                if when == "BACKWARD_PRE":
                    gathered = self._gather_again(order, gathered, place + 1 + ahead, when, place)
                first = False
            self._compute(BACKWARD, unit)
            if again and when == "BACKWARD_POST":
                gathered = self._gather_again(order, gathered, place + 1 + ahead, when, place)
            self._reduce([unit])
        if self.root:
            self._reduce(self.root)
        while self.held:
            self._cross(self.held.pop(0))

    def _gather_again(self, order: Sequence[UnitCost], gathered: int, until: int, when: str, place: int) -> int:
        """Gather blocks up to ``until`` in the order of backward; returns how many are gathered now."""
        ahead = self.execution.backward_ahead(len(order))
        for index in range(gathered, min(until, len(order))):
            after = [(FORWARD, self.units[-1].name)]
            if when == "BACKWARD_POST" and index:
                after = [(BACKWARD, order[place].name)]
            elif when != "BACKWARD_POST" and index - 1 - ahead >= 0:
                after = [(BACKWARD, order[index - 1 - ahead].name)]
            self._gather([order[index]], after)
        return max(gathered, min(until, len(order)))

    def _compute(self, kind: str, unit: UnitCost) -> None:
        part = ROOT if not unit.is_block else unit.name
        needed = [self.last[ALL_GATHER, part]] if (ALL_GATHER, part) in self.last else []
        self._add(kind, unit.name, COMPUTE, after=needed)

    # -- communication -------------------------------------------------------------------------------------------------

    def _gather(self, part: Sequence[UnitCost], after: Iterable[tuple[str, str]] = ()) -> None:
        if not self.gathers:
            return
        size = self._padded(part, len(self.own)) * self.state.gathered
        self._add(ALL_GATHER, _name(part), SHARD, [self.last[each] for each in after], size, self.own)

    def _reduce(self, part: Sequence[UnitCost]) -> None:
        """Reduce the gradients of a part, whose backward has been issued."""
        fsdp1 = self.execution.engine == "fsdp1"
        if fsdp1 and not self.is_last:
            return
        name, done = _name(part), [self.last[BACKWARD, part[0].name]]
        padded = self._padded(part, len(self.own)) * self.state.reduced
        if self.gathers:
            self._add(REDUCE_SCATTER, name, SHARD, done, padded, self.own)
            done = [self.last[REDUCE_SCATTER, name]]
        elif fsdp1 and len(self.plan.groups) == 1 and self.plan.world_size > 1:
            self._add(ALL_REDUCE, name, SHARD, done, padded, tuple(range(self.plan.world_size)))
        if not self.is_last or len(self.replicas) == 1:
            return
        if self.is_native:
            place = self.own.index(self.rank)
            same = tuple(sorted(replica[place] for replica in self.replicas))
            self._add(ALL_REDUCE, name, CROSS, done, padded / len(self.own), same)
        elif not fsdp1:
            while self.held:
                self._cross(self.held.pop(0), done)
            self.held.append(part)

    def _cross(self, part: Sequence[UnitCost], after: Sequence[int] = ()) -> None:
        """All-reduce, by owners, the gradients of a part, which rest when the next part's are there."""
        name = _name(part)
        settled = [self.last[BACKWARD, part[0].name]]
        if self.gathers:
            settled.append(self.last[REDUCE_SCATTER, name])
        for owners, (elements, runs) in sorted(self._owned(part).items()):
            size = (elements + runs) * self.state.gradient  # a number beside each run: whether there was a gradient
            self._add(ALL_REDUCE, name, CROSS, [*settled, *after], size, owners)

    def _add(
        self,
        kind: str,
        unit: str,
        stream: str,
        after: Sequence[int] = (),
        size_bytes: float = 0,
        ranks: tuple[int, ...] = (),
    ) -> None:
        waits = tuple(sorted({index for index in after if self.list[index].stream != stream}))
        self.last[kind, unit] = len(self.list)
        self.list.append(ShardAction(kind, unit, self.micro_batch, stream, waits, size_bytes, ranks))

    # -- sizes ---------------------------------------------------------------------------------------------------------

    def _shapes(self, part: Sequence[UnitCost]) -> list[tuple[int, int]]:
        """Rows, and elements in each, of every parameter."""
        found = []
        for unit in part:
            for shape in self.shapes.get(unit.name) or [(unit.parameters,)]:
                width = 1
                for length in shape[1:]:
                    width *= length
                found.append((shape[0], width))
        return found

    def _padded(self, part: Sequence[UnitCost], size: int) -> int:
        """Elements that travel: padded to whole rows per rank (FSDP2), or the flat parameter to whole elements."""
        rows = self._shapes(part)
        if self.execution.engine == "fsdp1":
            rows = [(sum(count * width for count, width in rows), 1)]
        return sum(-(-count // size) * size * width for count, width in rows)

    def _owners_at(self, places: Mapping[int, int]) -> tuple[int, ...]:
        """The ranks at these places of their replicas, by the replicas' size; asked for by each parameter."""
        key = tuple(places.items())
        if key not in self.owners:
            self.owners[key] = tuple(sorted(replica[places[len(replica)]] for replica in self.replicas))
        return self.owners[key]

    def _owned(self, part: Sequence[UnitCost]) -> dict[tuple[int, ...], tuple[int, int]]:
        """Elements and runs of this rank's rows, by the ranks that own the same ones; cf. ``ownership.py``."""
        found: dict[tuple[int, ...], tuple[int, int]] = defaultdict(lambda: (0, 0))
        sizes = sorted({len(replica) for replica in self.replicas})
        place = self.own.index(self.rank)
        for rows, width in self._shapes(part):
            chunks = {size: -(-rows // size) for size in sizes}
            start = min(place * chunks[len(self.own)], rows)
            stop = min(start + chunks[len(self.own)], rows)
            borders = {start, stop}
            for chunk in chunks.values():
                borders.update(range(-(-start // chunk) * chunk, stop, chunk))
            cuts = sorted(border for border in borders if start <= border <= stop)
            runs: list[tuple[tuple[int, ...], int]] = []
            for begin, end in pairwise(cuts):
                owners = self._owners_at({size: begin // chunk for size, chunk in chunks.items()})
                if runs and runs[-1][0] == owners:
                    runs[-1] = (owners, runs[-1][1] + end - begin)
                else:
                    runs.append((owners, end - begin))
            for owners, count in runs:
                elements, before = found[owners]
                found[owners] = (elements + count * width, before + 1)
        return dict(found)


def _name(part: Sequence[UnitCost]) -> str:
    return part[0].name if part[0].is_block else ROOT
