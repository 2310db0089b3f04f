"""Which rank owns which slice of which parameter, and whose gradients therefore have to be summed.

Replicas of a model may be laid out differently: shard groups of unequal size, pipelines with other cuts. Where two
ranks own the same elements of a parameter, their gradients are summed; borders differ between replicas, so a rank's
slice is cut at the union of all borders (DESIGN section 5). Every rank finds the same pieces in the same order.

Pure Python: what ranks exchange can be counted without devices.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
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
        by_parameter: dict[str, list[Slice]] = defaultdict(list)
        for each in slices:
            if each.stop > each.start:
                by_parameter[each.parameter].append(each)
        self._by_parameter = dict(by_parameter)

    @cached_property
    def pieces(self) -> dict[str, tuple[Piece, ...]]:
        """Every parameter's pieces in ascending order; elements that nobody owns are in none."""
        return {name: tuple(_cut(name, slices)) for name, slices in self._by_parameter.items()}

    @cached_property
    def owner_sets(self) -> tuple[tuple[int, ...], ...]:
        """The sets of two ranks and more that own something together, ascending: the process groups there must be."""
        found = {piece.owners for pieces in self.pieces.values() for piece in pieces}
        return tuple(sorted(owners for owners in found if len(owners) > 1))

    def start(self, rank: int, parameter: str) -> int:
        """The first element of a parameter that ``rank`` owns.

        Raises:
            KeyError: if it owns none.
        """
        starts = [each.start for each in self._by_parameter.get(parameter, ()) if each.rank == rank]
        if not starts:
            raise KeyError(f"rank {rank} owns nothing of {parameter}")
        return min(starts)

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


def shard_slices(parameter: str, shape: Sequence[int], replicas: Iterable[Sequence[int]]) -> list[Slice]:
    """The slices of a parameter that FSDP2 shards over dimension 0 in each replica.

    Rank i of a group of G holds rows i * ceil(n / G) up to the next rank's; the last ones may hold fewer, or none.

    Args:
        parameter: its name.
        shape: of the whole parameter, at least one dimension.
        replicas: the ranks of each group, in the order of its mesh.
    """
    rows, width = shape[0], _product(shape[1:])
    found = []
    for group in replicas:
        chunk = -(-rows // len(group))
        for place, rank in enumerate(group):
            start, stop = min(place * chunk, rows), min((place + 1) * chunk, rows)
            found.append(Slice(rank, parameter, start * width, stop * width))
    return found


def _product(numbers: Iterable[int]) -> int:
    product = 1
    for number in numbers:
        product *= number
    return product


def _cut(name: str, slices: Sequence[Slice]) -> Iterable[Piece]:
    """Sweep over the borders of a parameter's slices; neighbours with the same owners are one piece."""
    begins: dict[int, list[int]] = defaultdict(list)
    ends: dict[int, list[int]] = defaultdict(list)
    for each in slices:
        begins[each.start].append(each.rank)
        ends[each.stop].append(each.rank)
    borders = sorted({*begins, *ends})
    active: dict[int, int] = defaultdict(int)
    open_at = 0
    owners: tuple[int, ...] = ()
    for border in borders:
        for rank in ends[border]:
            active[rank] -= 1
        for rank in begins[border]:
            active[rank] += 1
        now = tuple(sorted(rank for rank, count in active.items() if count))
        if now != owners:
            if owners:
                yield Piece(name, open_at, border, owners)
            open_at, owners = border, now
