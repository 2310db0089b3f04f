"""Process groups as data."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

Groups = tuple[tuple[int, ...], ...]


class ProcessGroup(NamedTuple):
    """A process group that a strategy makes. All ranks make all of them, in one order, whoever is in them.

    Args:
        purpose: what travels over it.
        ranks: in it, ascending.
    """

    purpose: str
    ranks: tuple[int, ...]


def groups_of(rank: int, groups: Iterable[ProcessGroup]) -> tuple[ProcessGroup, ...]:
    """Return those of ``groups`` that ``rank`` is in, in their order."""
    return tuple(group for group in groups if rank in group.ranks)
