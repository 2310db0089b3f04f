"""What every rank measured, a line of JSON for each step and rank (docs/callbacks.md says what is in it).

While a run goes on, each rank appends to a file of its own, so that nobody waits for anybody and a run that is killed
loses the line that was being written and no other. At the end rank 0 merges what it sees into one file::

    metrics.rank_0.jsonl   run | step 1 | step 2 | ...
    metrics.rank_1.jsonl   run | step 1 | step 2 | ...
    metrics.jsonl          runs of both | step 1, rank 0 | step 1, rank 1 | step 2, rank 0 | ...

:func:`read_metrics` reads both forms, and whatever a killed run left behind.
"""

from __future__ import annotations

import heapq
import json
import math
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

from lightning_hetero.errors import HeteroError

SCHEMA = 1
MERGED = "metrics.jsonl"
_OF_A_RANK = re.compile(r"metrics\.rank_(\d+)\.jsonl")

RUN, STEP, PLAN = "run", "step", "plan"
"""kinds of lines: the first of a rank in a run, one for each step, a plan that holds from then on; there are more"""

Line = dict[str, Any]


def rank_path(folder: str | os.PathLike[str], rank: int) -> Path:
    """Where a rank writes while a run goes on."""
    return Path(folder) / f"metrics.rank_{rank}.jsonl"


class RankFile:
    """One rank's lines, each of which is in the system's hands when :meth:`write` returns.

    Args:
        folder: where the file is; made where it is not there. A file of an earlier run is continued.
        rank: this rank, noted in every line.

    Raises:
        HeteroError: if the folder cannot be written to.
    """

    def __init__(self, folder: str | os.PathLike[str], rank: int) -> None:
        self.path, self.rank = rank_path(folder, rank), rank
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            _drop_part_of_a_line(self.path)
            self._file = self.path.open("ab", buffering=0)
        except OSError as error:
            raise HeteroError(
                f"rank {rank} cannot write its metrics to {self.path} ({error}): give another folder"
            ) from error

    def write(self, kind: str, values: Mapping[str, Any]) -> None:
        """Append a line; numbers that are not finite become null."""
        line = {"kind": kind, "rank": self.rank, **{name: _finite(value) for name, value in values.items()}}
        self._file.write(_encoded(line))

    def close(self) -> None:
        """Nothing is written any more."""
        self._file.close()


def merge_rank_files(folder: str | os.PathLike[str]) -> Path | None:
    """Append every rank's file to ``metrics.jsonl``, by run, step and rank, and delete it.

    The new file gets its name when it is whole, and the ranks' files go after that: whenever the process dies, each
    line is found. To the steps that all ranks of a run have, the split of :func:`split_blocked` is added.

    Returns:
        The merged file, or None where no rank has one.
    """
    folder = Path(folder)
    paths = [path for _, path in _rank_files(folder)]
    if not paths:
        return None
    merged, temporary = folder / MERGED, folder / f".{MERGED}.{os.getpid()}.tmp"
    try:
        with temporary.open("wb") as out:
            if merged.exists():
                with merged.open("rb") as before:
                    shutil.copyfileobj(before, out)
            for parts in _runs_of(paths, _runs_in(merged)).values():
                for line in _in_order(parts):
                    out.write(_encoded(line))
            out.flush()
            os.fsync(out.fileno())
        os.replace(temporary, merged)
    finally:
        temporary.unlink(missing_ok=True)
    for path in paths:
        path.unlink()
    return merged


@dataclass
class RunMetrics:
    """The lines of one run.

    Attributes:
        run: its identifier.
        ranks: by rank, the first line: device, plan, schema.
        lines: all others, by step and rank.
    """

    run: str
    ranks: dict[int, Line] = field(default_factory=dict)
    lines: list[Line] = field(default_factory=list)

    @property
    def steps(self) -> list[Line]:
        """The lines of steps."""
        return [line for line in self.lines if line["kind"] == STEP]

    def plan(self, rank: int, step: int = 0) -> Line | None:
        """What the plan expects of a rank in the step after ``step``; None without a plan.

        A plan that ranks make at the start of a fit, from what they measure, holds from step 0 on.
        """
        plan = self.ranks[rank].get("plan")
        for line in self.lines:
            if line["kind"] == PLAN and line["rank"] == rank and line["step"] <= step:
                plan = line["plan"]
        return plan


def read_metrics(path: str | os.PathLike[str]) -> list[RunMetrics]:
    """Read the runs of a folder, whether they ended well or were killed.

    Args:
        path: the folder of a run, or a ``metrics.jsonl``.

    Returns:
        The runs, oldest first.

    Raises:
        HeteroError: if there is none, for a line that is none of ours, or for a schema of a later version.
    """
    path = Path(path)
    merged = path / MERGED if path.is_dir() else path
    paths = [each for _, each in _rank_files(path)] if path.is_dir() else []
    if not merged.exists() and not paths:
        raise HeteroError(f"{path} has no {MERGED}: give the folder of a run with RankThroughput or another callback")
    runs: dict[str, RunMetrics] = {}
    if merged.exists():
        at = None
        for line in _lines(merged):
            at = _take(line, runs, at, merged)
    for run, parts in _runs_of(paths, _runs_in(merged)).items():
        for line in _in_order(parts):
            _take(line, runs, run, paths[0])
    return list(runs.values())


def split_blocked(lines: list[Line], ranks: int) -> None:
    """Tell waiting from communication in the lines of one step, in place, where all ranks' lines are there.

    What even the rank that is blocked least is blocked for is communication that nothing hides; what a rank is blocked
    longer than that, it waits for others.

    Args:
        lines: of one step.
        ranks: how many the run has.
    """
    lines = [line for line in lines if line["kind"] == STEP and line.get("blocked_s") is not None]
    if len(lines) != ranks:
        return
    communication_s = min(line["blocked_s"] for line in lines)
    for line in lines:
        line["communication_s"] = communication_s
        line["waiting_s"] = line["blocked_s"] - communication_s + line.get("messages_s", 0.0)


def _take(line: Line, runs: dict[str, RunMetrics], run: str | None, path: Path) -> str:
    if line["kind"] == RUN:
        run = str(line["run"])
        runs.setdefault(run, RunMetrics(run)).ranks[line["rank"]] = line
    elif run is None:
        raise HeteroError(f"{path} does not begin with a line of kind {RUN!r}: it is no metrics file, or was cut")
    else:
        runs[run].lines.append(line)
    return run


@dataclass(frozen=True)
class _Part:
    """One rank's lines of one run: bytes of a file."""

    path: Path
    rank: int
    start: int
    stop: int


def _runs_of(paths: Iterable[Path], merged: set[tuple[str, int]]) -> dict[str, list[_Part]]:
    """The parts of each run, oldest first, without those that were merged before a process died."""
    runs: dict[str, list[_Part]] = {}
    for path in paths:
        starts: list[tuple[int, Line]] = []
        at = 0
        for line, size in _sized_lines(path):
            if line["kind"] == RUN:
                starts.append((at, line))
            at += size
        stops = [start for start, _ in starts[1:]] + [at]
        for (start, line), stop in zip(starts, stops, strict=False):
            if (line["run"], line["rank"]) not in merged:
                runs.setdefault(line["run"], []).append(_Part(path, line["rank"], start, stop))
    return runs


def _runs_in(merged: Path) -> set[tuple[str, int]]:
    if not merged.exists():
        return set()
    return {(line["run"], line["rank"]) for line in _lines(merged) if line["kind"] == RUN}


def _in_order(parts: list[_Part]) -> Iterator[Line]:
    """A run's lines: the ranks' first ones, then by step and rank."""
    parts = sorted(parts, key=lambda part: part.rank)
    firsts, rest = [], []
    for part in parts:
        lines = _slice(part)
        firsts.append(next(lines))
        rest.append(lines)
    yield from firsts
    ranks = int(firsts[0]["world_size"])

    def place(line: Line) -> tuple[int, int]:
        return line.get("step", 0), line["rank"]

    for _, group in groupby(heapq.merge(*rest, key=place), key=lambda line: place(line)[0]):
        together = list(group)
        split_blocked(together, ranks)
        yield from together


def _slice(part: _Part) -> Iterator[Line]:
    for line, _ in _sized_lines(part.path, part.start, part.stop):
        yield line


def _lines(path: Path) -> Iterator[Line]:
    for line, _ in _sized_lines(path):
        yield line


def _sized_lines(path: Path, start: int = 0, stop: float = math.inf) -> Iterator[tuple[Line, int]]:
    """Every whole line and its bytes; what was being written when a process died is left out."""
    with path.open("rb") as file:
        file.seek(start)
        at = start
        for content in file:
            if at >= stop or not content.endswith(b"\n"):
                return
            at += len(content)
            try:
                line = json.loads(content)
            except ValueError as error:
                raise HeteroError(
                    f"{path} has a line that is not JSON, {len(content)} bytes before byte {at} ({error}): delete it"
                ) from None
            if not isinstance(line, dict) or "kind" not in line or "rank" not in line:
                raise HeteroError(f"{path} has a line without kind and rank before byte {at}: it is no metrics file")
            if line["kind"] == RUN and line.get("schema") != SCHEMA:
                raise HeteroError(
                    f"{path} has schema {line.get('schema')!r}, this version reads {SCHEMA}: read it with the version "
                    "of lightning_hetero that wrote it"
                )
            yield line, len(content)


def _rank_files(folder: Path) -> list[tuple[int, Path]]:
    found = []
    for path in folder.iterdir() if folder.is_dir() else ():
        match = _OF_A_RANK.fullmatch(path.name)
        if match:
            found.append((int(match[1]), path))
    return sorted(found)


def _drop_part_of_a_line(path: Path) -> None:
    """What a process was writing when it died would stand before the next line."""
    if not path.exists():
        return
    with path.open("r+b") as file:
        end = file.seek(0, os.SEEK_END)
        step = 1 << 16
        at = end
        while at > 0:
            start = max(0, at - step)
            file.seek(start)
            found = file.read(at - start).rfind(b"\n")
            if found >= 0:
                at = start + found + 1
                break
            at = start
        if at < end:
            file.truncate(at)


def _encoded(line: Line) -> bytes:
    return (json.dumps(line, allow_nan=False, separators=(",", ":")) + "\n").encode()


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
