"""Steps the arms in turn."""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Protocol

from benchmarks.hetero_speedup import arms
from benchmarks.hetero_speedup.case import Case, Effort
from benchmarks.hetero_speedup.ranks import Arm, ArmFailedError, ArmRanks
from benchmarks.hetero_speedup.speedup import ArmTimes

Progress = Callable[[str, int], None]
"""Told (what is running, steps done since the last call)."""

Excuse = Callable[[ArmFailedError], "str | None"]
"""Asked of an arm that failed: why that is a result too, or None where it is an error."""

FAILED = "failed"
"""key of an arm's info that holds its excuse"""


class RunsOnRanks(Protocol):
    """What is asked of an arm's case."""

    @property
    def world_size(self) -> int:
        """Ranks."""

    @property
    def global_batch(self) -> int:
        """Samples of a step."""


HETERO, EVEN, PLAIN = "hetero_fsdp", "even FSDP2", "plain FSDP2 loop"
SIDE_BY_SIDE = "devices side by side"


def solo_name(kind: str) -> str:
    """The name of the arm of one device kind alone."""
    return f"{kind} alone"


def measure_case(case: Case, effort: Effort, progress: Progress) -> dict[str, ArmTimes]:
    """Measure hetero_fsdp, the even split and every kind of device alone; returns times by arm name.

    Where work is real, also all devices at once without any strategy.
    """
    with tempfile.TemporaryDirectory() as folder:
        plan: dict[str, tuple[Arm, Case]] = {HETERO: (arms.hetero_fsdp, case)}
        if not case.emulated:
            plan[SIDE_BY_SIDE] = (arms.side_by_side, case)
        plan[EVEN] = (arms.even_fsdp2, case)
        for kind, rank in case.rank_of_kind().items():
            alone = arms.solo_case(case, rank, Path(folder) / f"rank{rank}.yaml")
            plan[solo_name(kind)] = (arms.solo, alone)
        return alternate(case.name, plan, effort, progress)


def measure_overhead(case: Case, effort: Effort, progress: Progress) -> dict[str, ArmTimes]:
    """Measure hetero_fsdp and a plain FSDP2 loop on equal devices; returns times by arm name."""
    plan: dict[str, tuple[Arm, Case]] = {HETERO: (arms.hetero_equal, case), PLAIN: (arms.plain_fsdp2, case)}
    return alternate(case.name, plan, effort, progress)


def steps_of_case(case: Case, effort: Effort) -> int:
    """Steps that :func:`measure_case` will run, for a progress bar."""
    return (2 + len(case.rank_of_kind()) + (not case.emulated)) * effort.steps_per_arm + effort.settling_steps


def alternate(
    title: str,
    plan: Mapping[str, tuple[Arm, RunsOnRanks]],
    effort: Effort,
    progress: Progress,
    excuse: Excuse = lambda error: None,
) -> dict[str, ArmTimes]:
    """Start every arm, then step them in turn; returns times by arm name.

    An arm that fails with an excuse is out of the run: its info has the reason under :data:`FAILED`, and its times are
    those up to there. Any other failure ends the run.

    Raises:
        ArmFailedError: an arm failed without an excuse.
    """
    times = {name: ArmTimes(case.global_batch) for name, (_, case) in plan.items()}
    with contextlib.ExitStack() as stack:
        running: dict[str, ArmRanks] = {}

        @contextlib.contextmanager
        def excused(name: str) -> Iterator[None]:
            try:
                yield
            except ArmFailedError as error:
                reason = excuse(error)
                if reason is None:
                    raise
                times[name].info[FAILED] = reason
                running.pop(name, None)

        # one after the other: arms that start together would measure their devices under each other's load
        for name, (arm, case) in plan.items():
            progress(f"{title}: starting {name}", 0)
            with excused(name):
                began_s = time.monotonic()
                running[name] = stack.enter_context(contextlib.closing(ArmRanks(name, arm, case, case.world_size)))
                times[name].info = running[name].wait_ready()
                times[name].info["start_s"] = time.monotonic() - began_s
                for _ in range(effort.warmup_steps + (effort.settling_steps if name == HETERO else 0)):
                    running[name].step()
                    progress(f"{title}: {name}", 1)
        for turn in range(effort.turns):
            # there and back, so that a drift of the machine's speed meets all arms alike
            for name in list(plan) if turn % 2 == 0 else list(reversed(plan)):
                if name not in running:
                    continue
                progress(f"{title}: {name}", 0)
                with excused(name):
                    times[name].turns.append(list(_steps(running[name], effort.steps, title, progress)))
        for name, ranks in list(running.items()):
            with excused(name):
                times[name].info |= ranks.stop()
    return times


def _steps(ranks: ArmRanks, steps: int, title: str, progress: Progress) -> Iterator[float]:
    for _ in range(steps):
        yield ranks.step()
        progress(f"{title}: {ranks.name}", 1)
