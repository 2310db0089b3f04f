"""A run as its metrics.jsonl tells it: who measured what, by which plan, and what is missing and why."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from lightning_hetero.errors import HeteroError
from lightning_hetero.metrics import PLAN, TIMELINE, WHOLE_PLAN, Line, RunMetrics, read_metrics
from lightning_hetero.plan import PipelinePlan, ShardPlan
from lightning_hetero.simulator.planned_step import PipelineSeconds, PlannedStep, plan_step

Plan = ShardPlan | PipelinePlan

_NEEDED = ("step_s", "compute_s", "samples")
"""numbers that each step's line has, whichever callback wrote it"""

_FULL = 0.999
"""of the most samples that a step has: steps with fewer are short batches"""


@dataclass(frozen=True)
class Run:
    """One run.

    Attributes:
        path: where it was read.
        name: short, and of its own among the runs of a report.
        metrics: its lines.
        earlier: how many earlier runs the folder has.
    """

    path: Path
    name: str
    metrics: RunMetrics
    earlier: int = 0

    # -- who ran -------------------------------------------------------------------------------------------------------

    @cached_property
    def ranks(self) -> list[int]:
        """Those that have finished a step, in order."""
        return sorted({line["rank"] for line in self.metrics.steps})

    @property
    def first(self) -> Line:
        """The first line of the first rank that has one."""
        return self.metrics.ranks[self.ranks[0]]

    @property
    def world_size(self) -> int:
        """Ranks of the run, with lines or without."""
        return int(self.first["world_size"])

    @property
    def missing_ranks(self) -> list[int]:
        """Ranks without a step: their files are on another machine, or they died before."""
        return sorted(set(range(self.world_size)) - set(self.ranks))

    @property
    def strategy(self) -> str:
        """Name of the strategy."""
        return str(self.first.get("strategy", "unknown strategy"))

    @property
    def emulated(self) -> bool:
        """Whether any of its devices is emulated: then all of it is a rehearsal."""
        return any(line.get("emulated") for line in self.metrics.ranks.values())

    def device(self, rank: int) -> str:
        """What the device of a rank is called."""
        return str(self.metrics.ranks[rank].get("device", "unknown"))

    def had(self, callback: str) -> bool | None:
        """Whether a callback was there; None where the lines do not say."""
        names = self.first.get("callbacks")
        return callback in names if isinstance(names, list) else None

    @cached_property
    def ended_badly(self) -> list[int]:
        """Ranks whose lines have no end: killed, failed, or still running."""
        well = {line["rank"] for line in self.metrics.lines if line["kind"] == "end"}
        return [rank for rank in self.ranks if rank not in well]

    # -- what was planned ----------------------------------------------------------------------------------------------

    @cached_property
    def plan(self) -> Plan | None:
        """The plan that held last; None where there is none, or rank 0's lines are not there."""
        line = self._whole_plan
        if line is None or line.get("plan") is None:
            return None
        kind = PipelinePlan if line["plan"].get("kind") == PipelinePlan.KIND else ShardPlan
        return kind.from_dict(line["plan"], f"the plan of step {line.get('step', 0)} in {self.path}")

    @cached_property
    def planned_step(self) -> PlannedStep | str:
        """When each rank is to do what, by the plan that held last, or why nobody knows."""
        if self.plan is None:
            return self.no_plan
        line = self._whole_plan
        assert line is not None
        given = line.get("pipelines")
        source = f"the seconds of the plan's stages in {self.path}"
        pipelines = None if given is None else [PipelineSeconds.from_dict(each, source) for each in given]
        try:
            return plan_step(self.plan, pipelines)
        except HeteroError as error:
            return str(error)

    @property
    def no_plan(self) -> str:
        """Why there is no plan."""
        if 0 in self.missing_ranks:
            return "the plan is in the lines of rank 0, which are not here"
        return f"{self.strategy} made no plan"

    @property
    def _whole_plan(self) -> Line | None:
        last = self.compared[-1]
        found = [line for line in self.metrics.lines if line["kind"] == WHOLE_PLAN and line["step"] < last]
        return found[-1] if found else None

    def planned(self, rank: int) -> Line | None:
        """What the plan that held last expects of a rank in one batch of a step; None without a plan."""
        return self.metrics.plan(rank, self.compared[-1] - 1)

    # -- what was measured ---------------------------------------------------------------------------------------------

    @cached_property
    def by_rank(self) -> dict[int, list[Line]]:
        """Lines of steps, by rank, in order."""
        found: dict[int, list[Line]] = {rank: [] for rank in self.ranks}
        for line in self.metrics.steps:
            found[line["rank"]].append(line)
        return found

    @property
    def first_step(self) -> int:
        """The first one that any rank has."""
        return int(min(line["step"] for line in self.metrics.steps))

    @property
    def last_step(self) -> int:
        """The last one that any rank has."""
        return max((line["step"] for line in self.metrics.steps), default=0)

    @cached_property
    def compared(self) -> list[int]:
        """The steps that are compared with the plan: full ones that all ranks have, under the plan that held last.

        Without the first, which warms up, and without those that are longer for being looked at (memory counted
        operation by operation, traced), unless there are no others.
        """
        own = [{line["step"]: line for line in lines} for lines in self.by_rank.values()]
        common = sorted(set.intersection(*(set(lines) for lines in own))) if own else []
        changes = [
            line["step"]
            for line in self.metrics.lines
            if line["kind"] == PLAN and line["step"] < max(common, default=0)
        ]
        samples = {step: sum(lines[step]["samples"] for lines in own) for step in common}
        most = max(samples.values(), default=0.0)

        first = common[0] if common else 0

        def is_plain(step: int) -> bool:
            return not any(lines[step].get("sampled") or lines[step].get("traced") for lines in own)

        sieves: list[Callable[[int], bool]] = [
            lambda step: samples[step] >= _FULL * most,
            lambda step: step > max(changes, default=0),
            lambda step: step != first,
            is_plain,
        ]
        for sieve in sieves:
            common = list(filter(sieve, common)) or common
        return common

    def lines_compared(self, rank: int) -> list[Line]:
        """A rank's lines of these steps."""
        steps = set(self.compared)
        return [line for line in self.by_rank[rank] if line["step"] in steps]

    @property
    def stragglers(self) -> list[Line]:
        """Lines of ranks that were named, in order."""
        found = [line for line in self.metrics.lines if line["kind"] == "straggler"]
        return sorted(found, key=lambda line: (line["step"], line["rank"]))

    @cached_property
    def timelines(self) -> dict[int, Line]:
        """By rank, when it ran what in the last step that was traced; empty where none was."""
        found = [line for line in self.metrics.lines if line["kind"] == TIMELINE]
        last = max((line["step"] for line in found), default=0)
        return {line["rank"]: line for line in found if line["step"] == last}

    def reason(self, name: str, key: str) -> str | None:
        """What lines of a kind say of why there is no value: of the first rank that says it."""
        for line in (*self.metrics.ranks.values(), *self.metrics.lines):
            if line["kind"] == name and line.get(key):
                return str(line[key])
        return None


def read_runs(
    paths: Sequence[str | os.PathLike[str]], update: Callable[[int, int, str], None] = lambda *_: None
) -> list[Run]:
    """Read the last run of each folder.

    Args:
        paths: folders of runs, or their ``metrics.jsonl``.
        update: is told how far it is: runs read, all runs, the one at hand.

    Raises:
        HeteroError: for a folder that is not there, one without metrics, a broken line or another schema, naming file
            and line; for a run without a step.
    """
    runs: list[Run] = []
    names = _names([Path(path) for path in paths])
    for path, name in zip(map(Path, paths), names, strict=True):
        update(len(runs), len(paths), str(path))
        if not path.exists():
            raise HeteroError(f"{path} does not exist: give the folder that holds a run's metrics.jsonl")
        found = read_metrics(path)
        if not found:
            raise HeteroError(f"{path} has an empty metrics.jsonl: the run ended before its first line; give another")
        run = Run(path, name, found[-1], len(found) - 1)
        _check(run)
        runs.append(run)
    update(len(runs), len(paths), "done")
    return runs


def _check(run: Run) -> None:
    if not run.metrics.steps:
        raise HeteroError(f"{run.path} has no step: the run ended before its first one was written; give another run")
    for line in run.metrics.steps:
        bad = [name for name in _NEEDED if not _is_number(line.get(name))]
        if bad or line["step_s"] <= 0:
            problem = f"no number {', '.join(bad)}" if bad else f"step_s {line['step_s']}"
            raise HeteroError(
                f"{run.path}: the line of step {line['step']}, rank {line['rank']} has {problem}: delete it"
            )
        if line["rank"] not in run.metrics.ranks:
            raise HeteroError(
                f"{run.path} has steps of rank {line['rank']} and no line that begins its run: the file was cut; "
                "delete the lines of this rank"
            )
    if not run.compared:
        raise HeteroError(f"{run.path} has no step that all of its ranks have finished: give another run")


def _names(paths: Sequence[Path]) -> list[str]:
    """The shortest ends of the paths that tell them apart."""
    parts = [(path.parent if path.suffix == ".jsonl" else path).resolve().parts for path in paths]
    for length in range(1, max(map(len, parts), default=1) + 1):
        names = ["/".join(each[-length:]) for each in parts]
        if len(set(names)) == len(names):
            return names
    return [f"{'/'.join(each[-2:])} ({index + 1})" for index, each in enumerate(parts)]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
