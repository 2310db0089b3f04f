"""The end of a 1F1B or GPipe step without the events in between, for searches that ask thousands of times.

It says what :func:`~lightning_hetero.simulator.pipeline.simulate_pipeline` says (a test holds the two equal) some
thirty times as fast: with one stage per rank everything that a rank or a link does has its order beforehand, so each
action ends at the larger of two moments, when its rank is free and when its message is there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from functools import lru_cache

from lightning_hetero.errors import HeteroError
from lightning_hetero.simulator.pipeline import StageSeconds


def stage_ends_s(
    warmup: Sequence[int], micro_batches: int, stages: Sequence[StageSeconds], hop_s: Sequence[float]
) -> tuple[float, ...]:
    """When each stage ends its last action.

    Args:
        warmup: forwards of each stage before its first backward, never rising; ``micro_batches`` each is GPipe.
        micro_batches: of the step.
        stages: seconds of each stage.
        hop_s: seconds of a message between stage s and s + 1, either way.

    Raises:
        HeteroError: if the warm-up makes stages wait for one another for ever.
    """
    count = len(stages)
    rows = [_row(depth, micro_batches) for depth in warmup]
    places, free = [0] * count, [0.0] * count
    # When the input of each forward, and the gradient for each backward, is there; None until it is sent.
    inputs: list[list[float | None]] = [[None] * micro_batches for _ in range(count)]
    gradients: list[list[float | None]] = [[None] * micro_batches for _ in range(count)]
    inputs[0] = [0.0] * micro_batches
    up, down = [0.0] * count, [0.0] * count  # when the link to the next, and to the previous, stage is free
    # Stages that may go on; each is there once. Up and down in turn, so that a visit finds several things to do.
    waiting, listed = deque([0]), [True] + [False] * (count - 1)
    while waiting:
        stage = waiting.popleft()
        listed[stage] = False
        row, place, now = rows[stage], places[stage], free[stage]
        forward, backward = stages[stage].forward_s, stages[stage].backward_s
        above, below = inputs[stage], gradients[stage]
        is_last = stage == count - 1
        while place < len(row):
            k = row[place]
            if k >= 0:
                ready = above[k]
                if ready is None:
                    break
                now = (now if now > ready else ready) + forward
                if is_last:
                    below[k] = now
                else:
                    sent = up[stage]
                    up[stage] = sent = (sent if sent > now else now) + hop_s[stage]
                    inputs[stage + 1][k] = sent
                    if not listed[stage + 1]:
                        listed[stage + 1] = True
                        waiting.append(stage + 1)
            else:
                k = ~k
                ready = below[k]
                if ready is None:
                    break
                now = (now if now > ready else ready) + backward
                if stage:
                    sent = down[stage]
                    down[stage] = sent = (sent if sent > now else now) + hop_s[stage - 1]
                    gradients[stage - 1][k] = sent
                    if not listed[stage - 1]:
                        listed[stage - 1] = True
                        waiting.append(stage - 1)
            place += 1
        places[stage], free[stage] = place, now
    if any(place < 2 * micro_batches for place in places):
        raise HeteroError(f"warm-up depths {list(warmup)} rise from a stage to the next: both wait for ever")
    return tuple(free)


@lru_cache(maxsize=4096)
def _row(warmup: int, micro_batches: int) -> tuple[int, ...]:
    """What a stage does: k is the forward of micro-batch k, ~k its backward."""
    row = list(range(warmup))
    for k in range(micro_batches):
        row.append(~k)
        if k + warmup < micro_batches:
            row.append(k + warmup)
    return tuple(row)
