"""Pipeline schedules as data: what each rank of a pipeline does, in order.

An action prints as ``2F0`` (stage 2, forward, micro-batch 0) and parses back; a schedule is one row of actions per
rank. The letters are those of ``torch.distributed.pipelining``: ``F`` forward, ``B`` backward, or in its place ``I``
(gradients of inputs) and ``W`` (gradients of parameters).

What an action waits for::

    F(stage, k)          F(stage - 1, k)
    B or I(stage, k)     F(stage, k) and B or I(stage + 1, k)
    W(stage, k)          I(stage, k)
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from lightning_hetero.errors import HeteroError, raise_all

FORWARD, BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT = "F", "B", "I", "W"
KINDS = (FORWARD, BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT)

_ACTION = re.compile(r"(\d+)([FBIW])(\d+)")


@dataclass(frozen=True, order=True)
class Action:
    """One thing that a rank does with one micro-batch.

    Args:
        stage: index of the stage, from 0.
        kind: "F", "B", "I" or "W".
        micro_batch: index of the micro-batch, from 0.
    """

    stage: int
    kind: str
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.micro_batch}"

    @classmethod
    def parse(cls, text: str) -> Action:
        """Read what ``str`` gives: ``Action.parse("2F0")``.

        Raises:
            HeteroError: for any other text.
        """
        match = _ACTION.fullmatch(text.strip())
        if match is None:
            raise HeteroError(
                f"{text!r} is no action: write stage, kind and micro-batch, such as 2F0 (kinds: {', '.join(KINDS)})"
            )
        return cls(int(match[1]), match[2], int(match[3]))


Row = tuple[Action, ...]


@dataclass(frozen=True)
class Schedule:
    """What each rank of one pipeline does in one step.

    Args:
        rows: actions of each rank, in order. A stage belongs to the rank that has its actions.
        stages: number of stages.
        micro_batches: number of micro-batches.
        name: how it was made; of no effect.
    """

    rows: tuple[Row, ...]
    stages: int
    micro_batches: int
    name: str = ""

    def __str__(self) -> str:
        """One line per rank, actions parted by commas; :meth:`parse` reads it."""
        return "\n".join(",".join(map(str, row)) for row in self.rows)

    @classmethod
    def parse(cls, text: str, name: str = "") -> Schedule:
        """Read what ``str`` gives; the numbers of stages and micro-batches are the highest that appear, plus 1.

        Raises:
            HeteroError: listing every text that is no action.
        """
        rows, problems = [], []
        for rank, line in enumerate(text.strip().splitlines()):
            row = []
            for index, word in enumerate(filter(str.strip, line.split(","))):
                try:
                    row.append(Action.parse(word))
                except HeteroError as error:
                    problems.append(f"rank {rank}, action {index}: {error}")
            rows.append(tuple(row))
        raise_all(HeteroError, "the schedule cannot be read", problems)
        actions = [action for row in rows for action in row]
        stages = 1 + max((action.stage for action in actions), default=-1)
        return cls(tuple(rows), stages, 1 + max((action.micro_batch for action in actions), default=-1), name)


def needs(action: Action, stages: int, split: bool = False) -> list[Action]:
    """What must be done before ``action`` (the table at the head of this file).

    Args:
        action: the action.
        stages: number of stages.
        split: whether the *next* stage's backward is in two parts.
    """
    stage, k = action.stage, action.micro_batch
    if action.kind == FORWARD:
        return [Action(stage - 1, FORWARD, k)] if stage else []
    if action.kind == BACKWARD_WEIGHT:
        return [Action(stage, BACKWARD_INPUT, k)]
    before = [Action(stage, FORWARD, k)]
    if stage + 1 < stages:
        before.append(Action(stage + 1, BACKWARD_INPUT if split else BACKWARD, k))
    return before


def peaks_in_flight(row: Row) -> list[dict[int, int]]:
    """The moments at which a rank holds most micro-batches, as micro-batches in flight per stage.

    A micro-batch is in flight from its forward to the end of its backward (``B``, or ``W`` after ``I``). Moments
    that another one covers in every stage are left out, so a rank with one stage has one.
    """
    counts: dict[int, int] = {action.stage: 0 for action in row}
    peaks: list[dict[int, int]] = []
    for action in row:
        if action.kind == FORWARD:
            counts[action.stage] += 1
        elif action.kind in (BACKWARD, BACKWARD_WEIGHT):
            # Before anything is freed is when most is held.
            if not any(_covers(peak, counts) for peak in peaks):
                peaks = [peak for peak in peaks if not _covers(counts, peak)] + [dict(counts)]
            counts[action.stage] -= 1
    if not any(_covers(peak, counts) for peak in peaks):
        peaks.append(dict(counts))
    return peaks


def _covers(larger: dict[int, int], smaller: dict[int, int]) -> bool:
    return all(larger[stage] >= count for stage, count in smaller.items())
