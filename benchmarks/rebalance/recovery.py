"""From raw step times to how soon and how far a run recovered. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

WITHIN = 20
"""steps after the change in which a run is to be back"""

ENOUGH = 0.95
"""of the ideal"""


def recovery(step_s: Sequence[float], ideal_step_s: float, change: int) -> dict[str, Any]:
    """Return how a run did after the step ``change``.

    Args:
        step_s: seconds of every step.
        ideal_step_s: seconds of a step of a run that was planned for the devices as they are after the change.
        change: the first step of the changed devices.

    Returns:
        ``efficiency_at_once``: ideal over the median step before anything can have moved; ``efficiency_after``: ideal
        over the median of all steps from ``WITHIN`` on; ``steps_to_recover``: after how many steps the ideal is reached
        to ``ENOUGH`` for good (by the median of three neighbouring steps), None for never; ``recovered``.
    """
    after = list(step_s[change:])
    efficiency_after = ideal_step_s / median(after[WITHIN:])
    smooth = [median(after[i : i + 3]) for i in range(len(after) - 2)]
    late = [i for i, seconds in enumerate(smooth) if ideal_step_s / seconds < ENOUGH]
    steps = 0 if not late else late[-1] + 1
    return {
        "efficiency_at_once": ideal_step_s / median(after[:4]),
        "efficiency_after": efficiency_after,
        "steps_to_recover": steps if steps < len(smooth) else None,
        "recovered": efficiency_after >= ENOUGH,
    }
