"""The schedules that have names: GPipe, 1F1B, interleaved 1F1B and a zero-bubble one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from lightning_hetero.errors import HeteroError, raise_all
from lightning_hetero.schedule.action import BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD, Action, Schedule

SCHEDULES = ("gpipe", "1f1b", "interleaved_1f1b", "zero_bubble")


def build_schedule(
    name: str,
    ranks: int,
    micro_batches: int,
    *,
    warmup: Sequence[int] | None = None,
    stages_per_rank: int = 1,
) -> Schedule:
    """The schedule called ``name``: one of ``SCHEDULES``.

    Args:
        name: "gpipe", "1f1b", "interleaved_1f1b" or "zero_bubble".
        ranks: number of ranks of the pipeline.
        micro_batches: number of micro-batches.
        warmup: for 1f1b, forwards of each stage before its first backward (:func:`warmup_depths`).
        stages_per_rank: for interleaved 1f1b; stage s is on rank s % ranks.

    Raises:
        HeteroError: listing what the schedule does not allow.
    """
    problems = [] if name in SCHEDULES else [f"schedule is {name!r}: give one of {', '.join(SCHEDULES)}"]
    if stages_per_rank != 1 and name in SCHEDULES and name != "interleaved_1f1b":
        problems.append(f"stages_per_rank is {stages_per_rank} with {name}: only interleaved_1f1b has more than 1")
    if warmup is not None and name in SCHEDULES and name != "1f1b":
        problems.append(f"warmup is given with {name}: only 1f1b takes it")
    raise_all(HeteroError, "the schedule cannot be made", problems)
    if name == "gpipe":
        return gpipe(ranks, micro_batches)
    if name == "1f1b":
        return one_f_one_b(ranks, micro_batches, warmup)
    if name == "zero_bubble":
        return zero_bubble(ranks, micro_batches)
    return interleaved_1f1b(ranks, stages_per_rank, micro_batches)


def gpipe(stages: int, micro_batches: int) -> Schedule:
    """All forwards, then all backwards (Huang et al. 2019): every micro-batch is in flight at once."""
    _check_sizes(stages=stages, micro_batches=micro_batches)
    rows = tuple(
        tuple(Action(stage, kind, k) for kind in (FORWARD, BACKWARD) for k in range(micro_batches))
        for stage in range(stages)
    )
    return Schedule(rows, stages, micro_batches, "gpipe")


def warmup_depths(stages: int, micro_batches: int, extra: int = 0) -> tuple[int, ...]:
    """Forwards of each stage before its first backward: one per stage from here on, and more where wanted.

    Args:
        stages: number of stages.
        micro_batches: number of micro-batches, which is the largest depth.
        extra: further warm-up micro-batches per *following* stage. 0 is the usual 1F1B; 1 hides the time that
            messages take, where memory allows (one micro-batch on the way to each following stage).
    """
    following = [stages - 1 - stage for stage in range(stages)]
    return tuple(min(micro_batches, 1 + after * (1 + extra)) for after in following)


def one_f_one_b(stages: int, micro_batches: int, warmup: Sequence[int] | None = None) -> Schedule:
    """One forward, one backward in turn, after a warm-up (PipeDream-Flush; Narayanan et al. 2021).

    Args:
        stages: number of stages, one per rank.
        micro_batches: number of micro-batches.
        warmup: forwards of each stage before its first backward, at least 1 and at most ``micro_batches``,
            never rising from a stage to the next; by default ``warmup_depths(stages, micro_batches)``. A stage
            has at most so many micro-batches in flight.

    Raises:
        HeteroError: listing every value that is not so.
    """
    _check_sizes(stages=stages, micro_batches=micro_batches)
    depths = list(warmup_depths(stages, micro_batches) if warmup is None else warmup)
    raise_all(HeteroError, "the schedule cannot be made", warmup_problems(depths, stages, micro_batches))
    rows = []
    for stage, depth in enumerate(depths):
        row = [Action(stage, FORWARD, k) for k in range(depth)]
        for k in range(micro_batches):
            row.append(Action(stage, BACKWARD, k))
            if k + depth < micro_batches:
                row.append(Action(stage, FORWARD, k + depth))
        rows.append(tuple(row))
    return Schedule(tuple(rows), stages, micro_batches, "1f1b")


def warmup_problems(warmup: Sequence[int], stages: int, micro_batches: int) -> list[str]:
    """What is wrong with warm-up depths, one text each; see :func:`one_f_one_b`."""
    problems = []
    if len(warmup) != stages:
        problems.append(f"warmup has {len(warmup)} depths for {stages} stages: give one per stage")
    problems += [
        f"warmup of stage {stage} is {depth}: give 1 to {micro_batches} (the number of micro-batches)"
        for stage, depth in enumerate(warmup)
        if not 1 <= depth <= micro_batches
    ]
    problems += [
        f"warmup of stage {stage} is {warmup[stage]}, of the next {warmup[stage + 1]}: a stage whose next one needs "
        f"{warmup[stage + 1]} forwards before its first backward needs as many itself, or both wait for ever"
        for stage in range(len(warmup) - 1)
        if warmup[stage] < warmup[stage + 1]
    ]
    return problems


def interleaved_1f1b(ranks: int, stages_per_rank: int, micro_batches: int) -> Schedule:
    """1F1B over several stages per rank; stage s is on rank s % ranks (Narayanan et al. 2021).

    Micro-batches go in rounds: a rank runs one round through its first stage, then through its next one.

    Raises:
        HeteroError: if a size is below 1 or micro-batches do not fill whole rounds (of ``ranks`` micro-batches;
            fewer than that are one round).
    """
    _check_sizes(ranks=ranks, stages_per_rank=stages_per_rank, micro_batches=micro_batches)
    raise_all(HeteroError, "the schedule cannot be made", interleaving_problems(ranks, micro_batches))
    per_round = micro_batches // max(1, micro_batches // ranks)
    total = micro_batches * stages_per_rank
    rows = []
    for rank in range(ranks):
        warmup = min(total, (stages_per_rank - 1) * per_round + 2 * (ranks - 1 - rank))
        if ranks == 1:
            warmup = min(total, (stages_per_rank - 1) * per_round)
        # Per stage the next micro-batch, forward and backward.
        forwards = _in_rounds(range(stages_per_rank), per_round, micro_batches, FORWARD, rank, ranks)
        backwards = _in_rounds(reversed(range(stages_per_rank)), per_round, micro_batches, BACKWARD, rank, ranks)
        row = [next(forwards) for _ in range(warmup)]
        for _ in range(total - warmup):
            row += [next(forwards), next(backwards)]
        rows.append((*row, *backwards))
    return Schedule(tuple(rows), ranks * stages_per_rank, micro_batches, "interleaved_1f1b")


def interleaving_problems(ranks: int, micro_batches: int) -> list[str]:
    """Why interleaved 1f1b cannot run so many micro-batches, if it cannot."""
    rounds = max(1, micro_batches // ranks)
    if micro_batches % rounds == 0:
        return []
    problem = f"{micro_batches} micro-batches do not fill {rounds} equal rounds over {ranks} ranks"
    return [f"{problem}: give a multiple of {rounds}, such as {rounds * ranks}"]


def _in_rounds(
    order: Iterable[int], per_round: int, micro_batches: int, kind: str, rank: int, ranks: int
) -> Iterator[Action]:
    turns = list(order)
    for first in range(0, micro_batches, per_round):
        for turn in turns:
            for k in range(first, first + per_round):
                yield Action(turn * ranks + rank, kind, k)


def zero_bubble(stages: int, micro_batches: int) -> Schedule:
    """ZB-H1: backward in two parts, of which the second fills the bubble (Qi et al. 2023, "Zero Bubble").

    A stage warms up as in 1F1B; then gradients of inputs (``I``) are sent on at once, and gradients of parameters
    (``W``) follow so much later on later stages that every stage has at most ``stages`` micro-batches in flight,
    which is what the first stage of 1F1B has.
    """
    _check_sizes(stages=stages, micro_batches=micro_batches)
    rows = []
    for stage, depth in enumerate(warmup_depths(stages, micro_batches)):
        row = [Action(stage, FORWARD, k) for k in range(depth)]
        weights = 0
        for k in range(micro_batches):
            row.append(Action(stage, BACKWARD_INPUT, k))
            # In the last rounds there is no forward left, and waiting for the next I is the time to catch up.
            last = k + depth >= micro_batches
            if k - weights >= stage or last:
                row.append(Action(stage, BACKWARD_WEIGHT, weights))
                weights += 1
            if not last:
                row.append(Action(stage, FORWARD, k + depth))
        row += [Action(stage, BACKWARD_WEIGHT, k) for k in range(weights, micro_batches)]
        rows.append(tuple(row))
    return Schedule(tuple(rows), stages, micro_batches, "zero_bubble")


def _check_sizes(**sizes: int) -> None:
    problems = [f"{name} is {size!r}: give a whole number >= 1" for name, size in sizes.items() if size < 1]
    raise_all(HeteroError, "the schedule cannot be made", problems)
