"""Partitions of a cluster's ranks into shard groups that are worth planning.

Up to :data:`ALL_PARTITIONS` ranks these are all partitions, those that look alike (the same kinds on nodes that hold
the same ranks) once. Beyond, ranks are pooled by kind: every way to put kinds together into pools, and every pool cut
into equal groups along nodes: into one group, 2, 4, 8, ..., as many as it has nodes, or one group a rank. A pool of
several kinds is cut in two ways: every group gets its part of each kind, or groups follow the order of nodes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from lightning_hetero.planner.kinds import GroupSpec, Kinds

ALL_PARTITIONS = 6
"""the most ranks whose partitions are all tried; six have 203, seven 877"""

_MAX_KINDS = 4
"""the most kinds that are pooled in all ways; four kinds have 15"""

Groups = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Layout:
    """Some ranks in groups.

    Args:
        groups: ranks of each.
        specs: what each group looks like.
        counts: how many groups look like this.
        nodes: how many groups lie on this node; one that spans nodes lies on one of its own, with a negative number.
        name: what it is, for the list of candidates.
    """

    groups: Groups
    specs: tuple[GroupSpec, ...]
    counts: tuple[tuple[GroupSpec, int], ...]
    nodes: Counter[int]
    name: str

    @classmethod
    def of(cls, kinds: Kinds, groups: Groups) -> Layout:
        """Groups and what they look like."""
        specs = tuple(kinds.spec(group) for group in groups)
        counts = tuple(Counter(specs).items())
        nodes = Counter(kinds.home(group) for group in groups)
        return cls(groups, specs, counts, nodes, _name(kinds, counts))


@dataclass(frozen=True)
class Partition:
    """A partition of all ranks into groups, in one or more layouts of some ranks each."""

    layouts: tuple[Layout, ...]

    @property
    def counts(self) -> list[tuple[GroupSpec, int]]:
        """What groups look like, and how many do."""
        return [each for layout in self.layouts for each in layout.counts]

    @property
    def specs(self) -> list[GroupSpec]:
        """What each group looks like."""
        return [spec for layout in self.layouts for spec in layout.specs]

    @property
    def groups(self) -> list[tuple[int, ...]]:
        """Ranks of each group."""
        return [group for layout in self.layouts for group in layout.groups]

    def __str__(self) -> str:
        return "; ".join(layout.name for layout in self.layouts)


def all_partitions(kinds: Kinds) -> list[Layout]:
    """Every partition of all ranks, those that look alike once."""
    ranks = range(len(kinds.of_rank))
    alike = [Counter(kinds.of_rank[r] for r in ranks if kinds.node_of_rank[r] == n) for n in kinds.node_of_rank]
    # Ranks of one kind, on nodes that look the same, are told apart by their node only.
    look = [(kinds.of_rank[rank], tuple(sorted(alike[rank].items()))) for rank in ranks]
    found: dict[object, Layout] = {}
    for groups in _set_partitions(list(ranks)):
        layout = Layout.of(kinds, groups)
        looks = tuple(sorted(tuple(sorted(look[rank] for rank in group)) for group in groups))
        counts = tuple(sorted((spec.counts, spec.spread, count) for spec, count in layout.counts))
        key = (counts, looks, tuple(sorted(layout.nodes.values())))
        found.setdefault(key, layout)
    return list(found.values())


def pooled(kinds: Kinds) -> list[list[list[Layout]]]:
    """Every way to pool the kinds; of each pool every layout."""
    members = [[rank for rank, kind in enumerate(kinds.of_rank) if kind == index] for index in range(len(kinds.kinds))]
    layouts: dict[tuple[int, ...], list[Layout]] = {}
    ways = []
    for pools in _poolings(kinds):
        for pool in pools:
            if pool not in layouts:
                layouts[pool] = list(_layouts(kinds, [_by_node(kinds, members[kind]) for kind in pool]))
        ways.append([layouts[pool] for pool in pools])
    return ways


def _poolings(kinds: Kinds) -> Iterator[Groups]:
    count = len(kinds.kinds)
    if count <= _MAX_KINDS:
        yield from _set_partitions(list(range(count)))
        return
    # By memory: those with least together and the others one by one, or the others together.
    order = sorted(range(count), key=lambda kind: kinds.kinds[kind].memory_bytes)
    for cut in range(count + 1):
        low, high = tuple(sorted(order[:cut])), tuple(sorted(order[cut:]))
        yield tuple(pool for pool in (low, high) if pool)
        if low and len(high) > 1:
            yield (low, *((kind,) for kind in high))
    yield tuple((kind,) for kind in range(count))


def _layouts(kinds: Kinds, members: Sequence[Sequence[int]]) -> Iterator[Layout]:
    """Layouts of one pool, given the ranks of each kind in it, in the order of nodes."""
    total = sum(map(len, members))
    nodes = len({kinds.node_of_rank[rank] for each in members for rank in each})
    counts = {1, total, nodes, *(2**power for power in range(total.bit_length()) if 2**power <= total)}
    by_node = _by_node(kinds, [rank for each in members for rank in each])
    seen = set()
    for count in sorted(counts):
        parts = [_cut(each, count) for each in members]
        ways = [tuple(tuple(sorted(sum(part, ()))) for part in zip(*parts, strict=True))]
        if len(members) > 1:
            ways.append(tuple(tuple(sorted(part)) for part in _cut(by_node, count)))
        for groups in ways:
            groups = tuple(group for group in groups if group)
            if groups not in seen:
                seen.add(groups)
                yield Layout.of(kinds, groups)


def _cut(ranks: Sequence[int], count: int) -> list[tuple[int, ...]]:
    """``count`` runs whose sizes differ by one at most; some are empty where there are fewer ranks."""
    return [tuple(ranks[i * len(ranks) // count : (i + 1) * len(ranks) // count]) for i in range(count)]


def _by_node(kinds: Kinds, ranks: Sequence[int]) -> list[int]:
    """Ranks node by node, nodes that hold the same kinds together, whatever the order in which they are listed."""
    held: dict[int, list[int]] = {}
    for rank in ranks:
        held.setdefault(kinds.node_of_rank[rank], []).append(kinds.of_rank[rank])
    return sorted(
        ranks, key=lambda r: (sorted(held[kinds.node_of_rank[r]]), kinds.node_of_rank[r], kinds.of_rank[r], r)
    )


def _set_partitions(items: list[int]) -> Iterator[Groups]:
    """All partitions of a list into groups, each in the order of the list."""
    if not items:
        yield ()
        return
    first, rest = items[0], items[1:]
    for partition in _set_partitions(rest):
        yield ((first,), *partition)
        for index, group in enumerate(partition):
            yield (*partition[:index], (first, *group), *partition[index + 1 :])


def _name(kinds: Kinds, counts: Sequence[tuple[GroupSpec, int]]) -> str:
    """In words: ``2 groups of 4 x A100; 1 group of 1 x A100 + 2 x V100``, equal names put together."""
    named: Counter[str] = Counter()
    for spec, count in counts:
        named[" + ".join(f"{ranks} x {kinds.names[kind]}" for kind, ranks in spec.counts)] += count
    return "; ".join(f"{count} group{'s' if count > 1 else ''} of {members}" for members, count in named.items())
