"""A strategy's collectives, timed as what they are: a rank is blocked in them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning_hetero.profiler.step_timeline import BLOCKED, StepTimeline

_COLLECTIVES = (
    "barrier",
    "broadcast",
    "reduce",
    "all_gather",
    "gather_objects",
    "gather_numbers",
    "gather_vector",
    "sum_over_ranks",
)
"""methods of strategies, Lightning's and ours, in which a rank waits for others"""


def time_collectives(strategy: Any, timeline: StepTimeline) -> Callable[[], None]:
    """Have the time within a strategy's collectives count as blocked; returns what undoes it.

    Only this strategy's own methods are replaced: what ranks do elsewhere is timed between units.
    """
    replaced = [name for name in _COLLECTIVES if hasattr(strategy, name)]

    def timed(method: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            with timeline.within(BLOCKED):
                return method(*args, **kwargs)

        return run

    for name in replaced:
        setattr(strategy, name, timed(getattr(strategy, name)))

    def undo() -> None:
        for name in replaced:
            strategy.__dict__.pop(name, None)

    return undo
