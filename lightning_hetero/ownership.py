"""Which rank owns which slice of which parameter, and whose gradients therefore have to be summed.

Replicas of a model may be laid out differently: shard groups of unequal size, pipelines with other cuts. Where two
ranks own the same elements of a parameter, their gradients are summed; borders differ between replicas, so a rank's
slice is cut at the union of all borders (DESIGN section 5). Every rank finds the same pieces in the same order.

Pure Python: what ranks exchange can be counted without devices.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class Slice:
    """What one rank owns of one parameter.

    Args:
        rank: the owner.
        parameter: its name; the same in all replicas.
        start: first element, in the flattened parameter.
        stop: one past the last element.
    """

    rank: int
    parameter: str
    start: int
    stop: int


@dataclass(frozen=True)
class Piece:
    """A run of elements that the same ranks own.

    Args:
        parameter: its name.
        start: first element, in the flattened parameter.
        stop: one past the last element.
        owners: ascending ranks.
    """

    parameter: str
    start: int
    stop: int
    owners: tuple[int, ...]

    @property
    def elements(self) -> int:
        """How many elements it has."""
        return self.stop - self.start


class Ownership:
    """Who owns what.

    Args:
        slices: of all ranks, in any order. Several ranks may own the same elements, and a rank may own several slices
            of a parameter. Empty ones are left out.
    """

    def __init__(self, slices: Iterable[Slice]) -> None:
        by_parameter: dict[str, list[_Held]] = defaultdict(list)
        for each in slices:
            if each.stop > each.start:
                by_parameter[each.parameter].append((each.rank, each.start, each.stop))
        self._layouts = {name: _Layout(held) for name, held in by_parameter.items()}

    @classmethod
    def of_shards(cls, shapes: Mapping[str, Sequence[int]], replicas: Sequence[Sequence[int]]) -> Ownership:
        """Of parameters that FSDP2 shards over dimension 0 in each replica (:func:`shard_slices`).

        Parameters of one shape lie alike, so that thousands of ranks and parameters take no longer than their shapes.

        Args:
            shapes: of the whole parameters, by name, at least one dimension each.
            replicas: the ranks of each group, in the order of its mesh.
        """
        made = cls(())
        layouts: dict[tuple[int, int], _Layout] = {}
        for name, shape in shapes.items():
            key = shape[0], math.prod(shape[1:])
            if key not in layouts:
                slices = shard_slices(name, shape, replicas)
                layouts[key] = _Layout([(s.rank, s.start, s.stop) for s in slices if s.stop > s.start])
            made._layouts[name] = layouts[key]
        return made

    @classmethod
    def of_wholes(cls, sizes: Mapping[str, int], owners: Mapping[str, Iterable[int]]) -> Ownership:
        """Of parameters that each of their owners has whole, as stages of pipelines have.

        Args:
            sizes: elements of each parameter.
            owners: ranks that have it, by its name.
        """
        made = cls(())
        layouts: dict[tuple[int, tuple[int, ...]], _Layout] = {}
        for name, size in sizes.items():
            key = size, tuple(sorted(set(owners[name])))
            if key not in layouts:
                layouts[key] = _Layout([(rank, 0, size) for rank in key[1]] if size else [])
            made._layouts[name] = layouts[key]
        return made

    @cached_property
    def pieces(self) -> dict[str, tuple[Piece, ...]]:
        """Every parameter's pieces in ascending order; elements that nobody owns are in none."""
        return {
            name: tuple(Piece(name, *run) for run in layout.runs) for name, layout in self._layouts.items() if layout
        }

    @cached_property
    def owner_sets(self) -> tuple[tuple[int, ...], ...]:
        """The sets of two ranks and more that own something together, ascending: the process groups there must be."""
        found = {owners for layout in {*self._layouts.values()} for _, _, owners in layout.runs}
        return tuple(sorted(owners for owners in found if len(owners) > 1))

    def start(self, rank: int, parameter: str) -> int:
        """The first element of a parameter that ``rank`` owns.

        Raises:
            KeyError: if it owns none.
        """
        starts = self._layouts[parameter].starts if parameter in self._layouts else {}
        if rank not in starts:
            raise KeyError(f"rank {rank} owns nothing of {parameter}")
        return starts[rank]

    def of_rank(self, rank: int, parameter: str) -> tuple[Piece, ...]:
        """The pieces of a parameter that ``rank`` owns together with others."""
        return tuple(
            piece for piece in self.pieces.get(parameter, ()) if len(piece.owners) > 1 and rank in piece.owners
        )

    def elements_summed(self, rank: int) -> int:
        """How many gradient elements ``rank`` sums with other ranks in one crossing."""
        return sum(
            piece.elements
            for pieces in self.pieces.values()
            for piece in pieces
            if len(piece.owners) > 1 and rank in piece.owners
        )


_Held = tuple[int, int, int]
"""a rank, the first element that it owns and one past the last"""


class _Layout:
    """How the elements of a parameter lie; the same for all parameters of one shape."""

    def __init__(self, held: Sequence[_Held]) -> None:
        self._held = held

    def __bool__(self) -> bool:
        return bool(self._held)

    @cached_property
    def runs(self) -> tuple[tuple[int, int, tuple[int, ...]], ...]:
        """First element, one past the last, owners."""
        return tuple(_cut(self._held))

    @cached_property
    def starts(self) -> dict[int, int]:
        """The first element of each rank that owns one."""
        found: dict[int, int] = {}
        for rank, start, _ in self._held:
            found[rank] = min(start, found.get(rank, start))
        return found


def shard_slices(parameter: str, shape: Sequence[int], replicas: Iterable[Sequence[int]]) -> list[Slice]:
    """The slices of a parameter that FSDP2 shards over dimension 0 in each replica.

    Rank i of a group of G holds rows i * ceil(n / G) up to the next rank's; the last ones may hold fewer, or none.

    Args:
        parameter: its name.
        shape: of the whole parameter, at least one dimension.
        replicas: the ranks of each group, in the order of its mesh.
    """
    rows, width = shape[0], math.prod(shape[1:])
    found = []
    for group in replicas:
        chunk = -(-rows // len(group))
        for place, rank in enumerate(group):
            start, stop = min(place * chunk, rows), min((place + 1) * chunk, rows)
            found.append(Slice(rank, parameter, start * width, stop * width))
    return found


def _cut(held: Sequence[_Held]) -> Iterator[tuple[int, int, tuple[int, ...]]]:
    """Sweep over the borders of a parameter's slices; neighbours with the same owners are one run."""
    begins: dict[int, list[int]] = defaultdict(list)
    ends: dict[int, list[int]] = defaultdict(list)
    for rank, start, stop in held:
        begins[start].append(rank)
        ends[stop].append(rank)
    active: Counter[int] = Counter()
    open_at = 0
    owners: tuple[int, ...] = ()
    for border in sorted({*begins, *ends}):
        for rank in ends[border]:
            active[rank] -= 1
            if not active[rank]:
                del active[rank]  # those that are done with would be looked at again at every border
        for rank in begins[border]:
            active[rank] += 1
        now = tuple(sorted(active))
        if now != owners:
            if owners:
                yield open_at, border, owners
            open_at, owners = border, now
