"""Whether collectives can be run one after the other on every rank: if so, no order of them waits for ever."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence

Ranks = tuple[int, ...]


def stuck(queues: Mapping[int, Sequence[Ranks]]) -> str:
    """Return what never happens where each rank takes part in one collective at a time, in its own order.

    Args:
        queues: per rank, the ranks of each collective that it takes part in, itself included, in its order. Two over
            the same ranks are taken for the same one where they are the n-th of these on all of them.

    Returns:
        Empty where all of them end; else which rank waits for whom.
    """
    at = dict.fromkeys(queues, 0)
    there: Counter[Ranks] = Counter()
    ready = deque(queues)
    while ready:
        rank = ready.popleft()
        if at[rank] == len(queues[rank]):
            continue
        group = queues[rank][at[rank]]
        there[group] += 1
        if there[group] == len(group):
            there[group] = 0
            for member in group:
                at[member] += 1
            ready.extend(group)
    for rank, queue in queues.items():
        if at[rank] < len(queue):
            group = queue[at[rank]]
            absent = [other for other in group if at[other] == len(queues[other]) or queues[other][at[other]] != group]
            return f"rank {rank} waits in its collective {at[rank]}, over {_shown(group)}, for {_shown(absent)}"
    return ""


def _shown(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks[:6])) + (f", ... ({len(ranks)})" if len(ranks) > 6 else "")
