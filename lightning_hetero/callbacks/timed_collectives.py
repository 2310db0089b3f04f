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
    for name in replaced:
        setattr(strategy, name, _Timed(getattr(strategy, name), timeline))

    def undo() -> None:
        for name in replaced:
            strategy.__dict__.pop(name, None)

    return undo


class _Timed:
    """A method that counts as blocked, and is equal to the method itself.

    Lightning keeps ``strategy.reduce`` with each name that ``self.log`` logs, and refuses the name when it comes with
    another one: what a sanity check logged before this one was put in its place would come with another one.
    """

    def __init__(self, method: Callable[..., Any], timeline: StepTimeline) -> None:
        self._method, self._timeline = method, timeline

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self._timeline.within(BLOCKED):
            return self._method(*args, **kwargs)

    def __eq__(self, other: object) -> bool:
        return bool(self._method == (other._method if isinstance(other, _Timed) else other))

    def __hash__(self) -> int:
        return hash(self._method)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Timed:
        return self  # as functions and the methods of a strategy that is in use are
