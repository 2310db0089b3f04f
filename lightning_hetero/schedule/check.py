"""What is wrong with a schedule, and how it looks as a grid of ranks and steps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from lightning_hetero.errors import PlanError, raise_all
from lightning_hetero.schedule.action import (
    BACKWARD,
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    KINDS,
    Action,
    Schedule,
    needs,
)


@dataclass(frozen=True)
class Fault:
    """What is wrong with a schedule.

    Args:
        text: what, where, and what to do.
        rank: row of the action at fault; ``None`` where an action is missing.
        index: its place in the row.
    """

    text: str
    rank: int | None = None
    index: int | None = None


def validate_schedule(schedule: Schedule) -> None:
    """Check that every action is there once, in an order that runs to the end.

    Raises:
        PlanError: listing every fault, with a grid that marks them.
    """
    faults = find_faults(schedule)
    if faults:
        count = f"{len(faults)} fault{'s' if len(faults) > 1 else ''}"
        lines = [*(fault.text for fault in faults), f"in the grid, ! marks them:\n{format_grid(schedule, faults)}"]
        raise_all(PlanError, f"schedule {schedule.name or 'given'!r} has {count}", lines)


def find_faults(schedule: Schedule) -> list[Fault]:
    """Every fault of a schedule: missing, doubled, unknown or misplaced actions, and orders that deadlock."""
    return [*_action_faults(schedule), *_missing(schedule), *_order_faults(schedule), *_deadlocks(schedule)]


def _action_faults(schedule: Schedule) -> list[Fault]:
    """Actions that should not be there: out of range, twice, or on a rank that does not own the stage."""
    faults = []
    seen: dict[Action, str] = {}
    owner: dict[int, int] = {}
    for rank, row in enumerate(schedule.rows):
        for index, action in enumerate(row):
            where = f"rank {rank}, action {index}: {action}"
            if action.kind not in KINDS:
                faults.append(Fault(f"{where} has kind {action.kind!r}: give one of {', '.join(KINDS)}", rank, index))
            if not 0 <= action.stage < schedule.stages:
                faults.append(Fault(f"{where} names a stage outside 0 to {schedule.stages - 1}", rank, index))
            if not 0 <= action.micro_batch < schedule.micro_batches:
                last = schedule.micro_batches - 1
                faults.append(Fault(f"{where} names a micro-batch outside 0 to {last}", rank, index))
            if action in seen:
                faults.append(Fault(f"{where} is there already ({seen[action]}): remove one", rank, index))
            seen.setdefault(action, f"rank {rank}, action {index}")
            if owner.setdefault(action.stage, rank) != rank:
                faults.append(
                    Fault(f"{where} is of a stage that rank {owner[action.stage]} has: move it there", rank, index)
                )
    return faults


def _missing(schedule: Schedule) -> list[Fault]:
    there = Counter(action for row in schedule.rows for action in row)
    faults = []
    for stage in range(schedule.stages):
        for k in range(schedule.micro_batches):
            if Action(stage, FORWARD, k) not in there:
                faults.append(Fault(f"{Action(stage, FORWARD, k)} is missing: add the forward"))
            whole = Action(stage, BACKWARD, k) in there
            parts = [part for part in (BACKWARD_INPUT, BACKWARD_WEIGHT) if Action(stage, part, k) in there]
            if whole and parts:
                both = " and ".join(str(Action(stage, kind, k)) for kind in (BACKWARD, *parts))
                faults.append(Fault(f"{both} are both there: keep B, or I and W"))
            elif not whole and len(parts) < 2:
                lacking = [part for part in (BACKWARD_INPUT, BACKWARD_WEIGHT) if part not in parts]
                names = [str(Action(stage, part, k)) for part in (lacking if parts else [BACKWARD])]
                faults.append(Fault(f"{names[0]} is missing: add the backward"))
    return faults


def _order_faults(schedule: Schedule) -> list[Fault]:
    """Backwards before their own forward, and W before I, within a row."""
    faults = []
    for rank, row in enumerate(schedule.rows):
        place: dict[Action, int] = {}
        for index, action in enumerate(row):
            place.setdefault(action, index)
        for index, action in enumerate(row):
            first = {BACKWARD: FORWARD, BACKWARD_INPUT: FORWARD, BACKWARD_WEIGHT: BACKWARD_INPUT}.get(action.kind)
            if first is None:
                continue
            before = Action(action.stage, first, action.micro_batch)
            if place.get(before, -1) > index:
                faults.append(
                    Fault(f"rank {rank}, action {index}: {action} comes before {before}: swap them", rank, index)
                )
    return faults


def _deadlocks(schedule: Schedule) -> list[Fault]:
    """Ranks that wait for ever, when every row runs in order; none for what is simply missing."""
    steps = _steps(schedule)
    owner = {action: rank for rank, row in enumerate(schedule.rows) for action in row}
    split = _split_stages(schedule)
    done = {schedule.rows[rank][index] for rank, index in steps}
    faults = []
    for rank, row in enumerate(schedule.rows):
        index = next((index for index in range(len(row)) if (rank, index) not in steps), None)
        if index is None:
            continue
        action = row[index]
        waits = [b for b in needs(action, schedule.stages, action.stage + 1 in split) if b not in done]
        # A backward before its own forward, or after a missing action, has its own fault already.
        known = [f"{before} of rank {owner[before]}" for before in waits if owner.get(before, rank) != rank]
        if known:
            faults.append(
                Fault(
                    f"rank {rank}, action {index}: {action} waits for ever for {' and '.join(known)}: change the order",
                    rank,
                    index,
                )
            )
    return faults


def _split_stages(schedule: Schedule) -> set[int]:
    return {action.stage for row in schedule.rows for action in row if action.kind == BACKWARD_INPUT}


def _steps(schedule: Schedule) -> dict[tuple[int, int], int]:
    """Step at which each ``(rank, index)`` runs if every action takes one step; without those that never run."""
    split = _split_stages(schedule)
    done: set[Action] = set()
    steps: dict[tuple[int, int], int] = {}
    places = [0] * len(schedule.rows)
    step = 0
    while True:
        ran = []
        for rank, row in enumerate(schedule.rows):
            if places[rank] < len(row):
                action = row[places[rank]]
                before = needs(action, schedule.stages, action.stage + 1 in split)
                if all(each in done for each in before):
                    ran.append((rank, action))
        if not ran:
            return steps
        for rank, action in ran:
            steps[rank, places[rank]] = step
            places[rank] += 1
            done.add(action)
        step += 1


def format_grid(schedule: Schedule, faults: Sequence[Fault] | None = None) -> str:
    """Ranks x steps as text, every action taking one step; ``!`` marks faults, ``?`` what never runs.

    Args:
        schedule: what to print.
        faults: what :func:`find_faults` said; by default it is asked.
    """
    marked = {(f.rank, f.index) for f in (find_faults(schedule) if faults is None else faults)}
    steps = _steps(schedule)
    cells: dict[tuple[int, int], str] = {}
    for rank, row in enumerate(schedule.rows):
        step = -1
        for index, action in enumerate(row):
            # What never runs is shown after what does, in its order.
            step = steps.get((rank, index), step + 1)
            mark = "!" if (rank, index) in marked else "" if (rank, index) in steps else "?"
            cells[rank, step] = f"{action}{mark}"
    length = 1 + max((step for _, step in cells), default=-1)
    width = max([len(str(length)), *map(len, cells.values())])
    label = f"rank {len(schedule.rows) - 1}"
    lines = [" ".join([" " * len(label), *(f"{step:>{width}}" for step in range(length))])]
    for rank in range(len(schedule.rows)):
        line = [f"rank {rank}".ljust(len(label)), *(cells.get((rank, s), "").rjust(width) for s in range(length))]
        lines.append(" ".join(line).rstrip())
    return "\n".join(lines)
