"""Which values travel between the stages of a cut chain, from where each was written straight to where it is read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lightning_hetero.models.chain import UnitChain

Borders = Sequence[tuple[int, int]]
"""per stage, its first unit and the one after its last"""


@dataclass(frozen=True)
class Route:
    """One value's way between two stages.

    Args:
        name: of the value.
        source: the stage that wrote it last.
        target: a later stage that reads it.
    """

    name: str
    source: int
    target: int


@dataclass(frozen=True)
class Routes:
    """All ways of a cut chain.

    Args:
        all: by target, then source, then in the order in which the target reads.
    """

    all: tuple[Route, ...]

    @classmethod
    def of(cls, chain: UnitChain, borders: Borders) -> Routes:
        """The routes of ``chain`` cut at ``borders``."""
        writer = dict.fromkeys(chain.inputs, 0)
        found: list[Route] = []
        for stage, (start, stop) in enumerate(borders):
            written: set[str] = set()
            needed: dict[str, None] = {}
            for unit in chain.units[start:stop]:
                needed |= dict.fromkeys(name for name in unit.reads if name not in written)
                written |= set(unit.writes)
            if stage == len(borders) - 1:
                needed |= dict.fromkeys(name for name in chain.outputs if name not in written)
            ways = [Route(name, writer[name], stage) for name in needed if writer[name] != stage]
            found += sorted(ways, key=lambda way: way.source)
            writer |= dict.fromkeys(written, stage)
        return cls(tuple(found))

    def between(self, source: int, target: int) -> tuple[str, ...]:
        """Names of the values that one message between two stages carries; none where there is no message."""
        return tuple(way.name for way in self.all if (way.source, way.target) == (source, target))

    def sources(self, target: int) -> tuple[int, ...]:
        """The stages that a stage gets values from, ascending."""
        return tuple(sorted({way.source for way in self.all if way.target == target}))

    def targets(self, source: int) -> tuple[int, ...]:
        """The stages that a stage sends values to, ascending."""
        return tuple(sorted({way.target for way in self.all if way.source == source}))
