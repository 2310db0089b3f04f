"""How findings name nodes, ranks and devices."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import TypeVar

from lightning_hetero.doctor.facts import DeviceFacts, RankFacts

K = TypeVar("K", bound=Hashable)


def ranks_text(ranks: Iterable[int]) -> str:
    """``rank 3``, ``ranks 0-3, 5``."""
    numbers = sorted(set(ranks))
    runs: list[tuple[int, int]] = []
    for number in numbers:
        if runs and runs[-1][1] == number - 1:
            runs[-1] = (runs[-1][0], number)
        else:
            runs.append((number, number))
    texts = [str(first) if first == last else f"{first}-{last}" for first, last in runs]
    return f"rank{'' if len(numbers) == 1 else 's'} {', '.join(texts)}"


def places(facts: Sequence[RankFacts]) -> str:
    """``node a (ranks 0-3), node b (rank 4)``."""
    by_node = grouped(facts, lambda each: each.node)
    return ", ".join(f"node {node} ({ranks_text(each.rank for each in here)})" for node, here in by_node.items())


def device_place(facts: RankFacts, device: DeviceFacts) -> str:
    """``node a (rank 3), GPU 1 (NVIDIA H200)``."""
    return f"{places([facts])}, GPU {device.index} ({device.name})"


def grouped(facts: Iterable[RankFacts], key: Callable[[RankFacts], K]) -> dict[K, list[RankFacts]]:
    """The facts by what ``key`` makes of them, in the order in which that is met first."""
    groups: dict[K, list[RankFacts]] = {}
    for each in facts:
        groups.setdefault(key(each), []).append(each)
    return groups
