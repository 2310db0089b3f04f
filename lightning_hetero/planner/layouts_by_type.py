"""Layouts of many devices, by how many of each type form a pipeline and not by which ones.

Classes of devices (type and memory) are put together in groups; a group deals all its devices out to some number of
pipelines, as evenly as it can. So 1,024 devices of three types have some thousand layouts, and pipelines that look
alike are planned once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

from lightning_hetero.plan import even_parts
from lightning_hetero.planner.layouts import Block, Layout, set_partitions
from lightning_hetero.planner.pipeline_design import Problem

_LENGTHS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 20, 24, 32, 48, 64)
_MOST_COMBINATIONS = 4_000
_MOST_LAYOUTS = 200


@dataclass(frozen=True, order=True)
class DeviceClass:
    """Devices that are planned as equals."""

    kind: str
    capacity_bytes: float


@dataclass(frozen=True)
class Group:
    """Pipelines that share the devices of some classes evenly.

    Args:
        classes: indices of the classes, all of whose devices are used.
        blocks: ranks of each pipeline.
        speeds: of each pipeline, relative (micro-batches per second if no time were lost).
    """

    classes: tuple[int, ...]
    blocks: tuple[Block, ...]
    speeds: tuple[float, ...]


def groups_of(
    classes: Sequence[DeviceClass], members: Sequence[Sequence[int]], speeds: Sequence[float], most_in_block: int
) -> dict[tuple[int, ...], list[Group]]:
    """Per set of classes, the ways to form pipelines of about equal speed from all their devices.

    Args:
        classes: the device classes, fastest first.
        members: ranks of each class; neighbours in the list are near each other.
        speeds: of one device of each class.
        most_in_block: the most stages of a pipeline.
    """
    found: dict[tuple[int, ...], list[Group]] = {}
    for chosen in _class_sets(len(classes)):
        total = sum(len(members[index]) for index in chosen)
        numbers = dict.fromkeys(max(1, round(total / length)) for length in _LENGTHS)
        for number in numbers:
            if number > total or -(-total // number) > most_in_block:
                continue
            blocks, sums = _spread([(members[index], speeds[index]) for index in chosen], number)
            if max(map(len, blocks)) <= most_in_block and min(map(len, blocks)) > 0:
                found.setdefault(chosen, []).append(Group(chosen, blocks, sums))
    return found


def class_partitions(count: int) -> list[tuple[tuple[int, ...], ...]]:
    """Ways to put classes 0, 1, ... together: every set of disjoint sets for few, runs by speed for many."""
    if count <= 4:
        return [
            tuple(sorted(tuple(sorted(part)) for part in layout))
            for layout in set_partitions(tuple(range(count)))
            if layout
        ]
    partitions = []
    # Runs of neighbours in speed; the slowest classes may be left out.
    for last in range(1, count + 1):
        for cuts in range(2 ** min(last - 1, 6)):
            parts, start = [], 0
            for border in range(1, last):
                if border <= 6 and cuts >> (border - 1) & 1:
                    parts.append(tuple(range(start, border)))
                    start = border
            partitions.append((*parts, tuple(range(start, last))))
    return partitions


def _class_sets(count: int) -> list[tuple[int, ...]]:
    return list(dict.fromkeys(part for partition in class_partitions(count) for part in partition))


def _spread(pools: Sequence[tuple[Sequence[int], float]], number: int) -> tuple[tuple[Block, ...], tuple[float, ...]]:
    """Deal devices out to pipelines: as many of each class as possible to all, what is left to the slowest."""
    blocks: list[list[int]] = [[] for _ in range(number)]
    sums = [0.0] * number
    for ranks, speed in pools:
        each, left = divmod(len(ranks), number)
        share = [each] * number
        # Of pipelines that are as slow, the first; so equal pipelines follow one another.
        for index in sorted(range(number), key=lambda i: (round(sums[i], 12), i))[:left]:
            share[index] += 1
        start = 0
        for index, count in enumerate(share):
            blocks[index] += ranks[start : start + count]
            sums[index] += count * speed
            start += count
    return tuple(map(tuple, blocks)), tuple(sums)


def promising_layouts(
    problem: Problem, sizes: Sequence[int], pipelines: int | None, may_recompute: bool
) -> list[tuple[Layout, int]]:
    """Layouts of many devices, each with a micro-batch size, the most promising first.

    Pipelines of p stages in perfect balance need ``(m + p - 1) / speed`` seconds for m micro-batches, where the
    speed is the sum over its devices; so K pipelines on N devices that end together need ``(M + N - K) / speed``
    for M micro-batches. On top come half a micro-batch for each pipeline, half a unit for each stage, and the
    reduction of gradients. Where the bytes of a pipeline exceed its memory in sum, even with checkpointing, it is
    left out; where they do without, its speed is that with checkpointing.

    Args:
        problem: what is planned.
        sizes: micro-batch sizes.
        pipelines: the only number of pipelines, if it is given.
        may_recompute: whether activations may be checkpointed.
    """
    scored: list[tuple[float, int, tuple[Group, ...], int]] = []
    groups = None
    for samples in sizes:
        rough = _Rough(problem, samples, may_recompute)
        groups = groups or rough.groups()
        options = rough.options(groups)
        for partition in class_partitions(len(rough.classes)):
            rows = [options.get(part, []) for part in partition]
            while len(rows) > 1 and _product(rows) > _MOST_COMBINATIONS:
                # Too many classes to combine freely: fewer ways for the group that has most.
                rows[max(range(len(rows)), key=lambda i: len(rows[i]))].pop()
            for chosen in product(*rows):
                number = sum(len(option.group.blocks) for option in chosen)
                if pipelines in (None, number) and number <= rough.total:
                    parts = tuple(option.group for option in chosen)
                    scored.append((rough.seconds(chosen, number), len(scored), parts, samples))
    scored.sort(key=lambda each: each[:2])
    return [
        (tuple(block for group in parts for block in group.blocks), samples)
        for _, _, parts, samples in scored[:_MOST_LAYOUTS]
    ]


@dataclass(frozen=True)
class _Option:
    """A group and what it can do: micro-batches per second, devices, and stages of its longest pipeline."""

    group: Group
    speed: float
    devices: int
    length: int


def _product(rows: Sequence[Sequence[object]]) -> int:
    size = 1
    for row in rows:
        size *= max(1, len(row))
    return size


class _Rough:
    """What groups of pipelines take, for one micro-batch size, before anything is cut."""

    def __init__(self, problem: Problem, samples: int, may_recompute: bool) -> None:
        self.problem, self.samples, self.may_recompute = problem, samples, may_recompute
        self.total = problem.total_micro_batches(samples)
        self.table = problem.table(samples)
        self.nodes = len(set(problem.nodes))
        self._reduced: dict[tuple[int, int], float] = {}
        ranks: dict[DeviceClass, list[int]] = {}
        for rank, (kind, room) in enumerate(zip(problem.kinds, problem.capacity, strict=True)):
            ranks.setdefault(DeviceClass(kind, room), []).append(rank)
        self.classes = sorted(ranks, key=lambda each: (-self.speed(each), each))
        self.members = [ranks[each] for each in self.classes]
        self.kept = sum(unit.kept_activation_bytes for unit in problem.costs.units) * samples
        self.passed = float(self.table.output_bytes.sum()) * samples
        self.largest = max(unit.kept_activation_bytes for unit in problem.costs.units) * samples
        state = problem.training.state
        self.states = problem.costs.parameters * (state.parameter + state.gradient + state.optimizer)

    def speed(self, each: DeviceClass) -> float:
        """Micro-batches per second through the whole model on one device."""
        return 1 / max(float(self.table.both(each.kind)[0, -1]), 1e-300)

    def groups(self) -> dict[tuple[int, ...], list[Group]]:
        """Per set of classes its groups."""
        speeds = [self.speed(each) for each in self.classes]
        return groups_of(self.classes, self.members, speeds, self.problem.units)

    def options(self, groups: dict[tuple[int, ...], list[Group]]) -> dict[tuple[int, ...], list[_Option]]:
        """Per set of classes its groups that may fit."""
        found: dict[tuple[int, ...], list[_Option]] = {}
        for part, members in groups.items():
            speed = sum(self.speed(self.classes[index]) * len(self.members[index]) for index in part)
            devices = sum(len(self.members[index]) for index in part)
            for group in members:
                slowdown = max(self._slowdown(block) for block in (group.blocks[0], group.blocks[-1]))
                if slowdown < float("inf"):
                    found.setdefault(part, []).append(_Option(group, speed / slowdown, devices, len(group.blocks[0])))
        return found

    def seconds(self, chosen: Sequence[_Option], number: int) -> float:
        """About what a step takes with these groups."""
        devices = sum(option.devices for option in chosen)
        longest = max(option.length for option in chosen)
        speed = sum(option.speed for option in chosen)
        work = (self.total + devices - number / 2) / speed * (1 + longest / (2 * self.problem.units))
        if number == 1:
            return work
        shortest = min(option.length for option in chosen)
        if (number, shortest) not in self._reduced:
            size = self.problem.training.state.gradient * self.problem.costs.parameters / shortest
            nodes = min(number, self.nodes)
            spread = even_parts(number, nodes)
            self._reduced[number, shortest] = self.problem.network.all_reduce_s(size, spread)
        return work + self._reduced[number, shortest]

    def _slowdown(self, block: Block) -> float:
        """1 where all fits in sum, more where activations must be checkpointed, infinite where nothing helps."""
        room = sum(self.problem.capacity[rank] for rank in block)
        in_flight = (min(len(block), self.total) + 1) / 2
        if self.states + in_flight * self.kept <= room:
            return 1.0
        if self.may_recompute and self.states + in_flight * self.passed + self.largest <= room:
            kind = self.problem.kinds[block[0]]
            return 1 + float(self.table.forward(kind)[0, -1] / max(self.table.both(kind)[0, -1], 1e-300))
        return float("inf")
