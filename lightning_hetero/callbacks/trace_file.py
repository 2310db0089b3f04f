"""One chrome trace of all ranks: the planned step on top, the measured one below it, and what torch's profiler saw.

``chrome://tracing`` and https://ui.perfetto.dev show such files. Times are microseconds from the moment at which all
ranks had met before the step::

    planned       rank 0 | 0F0 | 0F1 | ...         what the plan predicts
    measured      rank 0 | 0F0 | 0F1 | ...         actions of a pipeline, else units
    parts         rank 0 | compute | messages ...  where the time of the step went
    rank 0        every operation, as the profiler of that rank has it
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lightning_hetero.callbacks.span_recorder import ActionSpan, UnitSpan
from lightning_hetero.errors import HeteroError
from lightning_hetero.profiler.step_timeline import Span
from lightning_hetero.simulator.chrome_trace import (
    Event,
    process_events,
    sort_index_event,
    span_event,
    thread_events,
)
from lightning_hetero.simulator.planned_step import PlannedStep

MARK = "lightning_hetero: all ranks have met"
"""what is noted in each rank's trace at time 0"""

_PLANNED, _MEASURED, _PARTS, _FIRST = 1, 2, 3, 100
_PROCESSES_OF_A_RANK = 100


@dataclass(frozen=True)
class RankTimeline:
    """What one rank did in a step, in seconds from the moment at which all had met.

    Attributes:
        device: what it is called.
        parts: where its time went.
        units: forwards and backwards of its units.
        actions: of a pipeline's stages; empty elsewhere.
        trace: the file with what the profiler saw; None where it did not look, or could not be written.
        trace_bytes: its size: a file of this name that rank 0 sees may be an older one, on a disk of its own.
    """

    device: str
    parts: list[Span] = field(default_factory=list)
    units: list[UnitSpan] = field(default_factory=list)
    actions: list[ActionSpan] = field(default_factory=list)
    trace: str | None = None
    trace_bytes: int = 0


def write_whole(path: Path, trace: Mapping[str, Any]) -> None:
    """Write a trace under a temporary name and rename it, so that no half of one is ever seen."""
    temporary = temporary_name(path)
    try:
        with temporary.open("w") as file:
            json.dump(trace, file)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def temporary_name(path: Path) -> Path:
    """A name beside a file for while it is being written; the suffix stays, by which the profiler goes."""
    return path.with_name(f".{path.stem}.{os.getpid()}{path.suffix}")


def merged_trace(
    ranks: Sequence[RankTimeline], planned: PlannedStep | str, emulated: bool
) -> tuple[dict[str, Any], list[str]]:
    """One trace of all ranks.

    Args:
        ranks: what each did; of those whose trace is not there only that.
        planned: of the step, or why there is no plan.
        emulated: whether devices are emulated, which names of processes say then.

    Returns:
        The trace, and what is missing in it, in words.
    """
    label = ", EMULATED devices" if emulated else ""
    events: list[Event] = []
    missing: list[str] = []
    if isinstance(planned, str):
        events += process_events(_PLANNED, f"planned: absent, {planned}")
        missing.append(f"no planned timeline: {planned}")
    else:
        events += process_events(_PLANNED, f"planned{f' ({planned.assumed})' if planned.assumed else ''}{label}")
        events += _threads(_PLANNED, ranks)
        events += [
            span_event(_PLANNED, each.rank, each.name, each.start_s, each.end_s, each.kind) for each in planned.spans
        ]
    events += [*process_events(_MEASURED, f"measured{label}"), *_threads(_MEASURED, ranks)]
    events += [*process_events(_PARTS, f"measured, parts of the step{label}"), *_threads(_PARTS, ranks)]
    for rank, own in enumerate(ranks):
        if own.actions:
            events += [span_event(_MEASURED, rank, name, start, end, "action") for name, start, end in own.actions]
        else:
            events += [
                span_event(_MEASURED, rank, f"{name} {phase}", start, end, phase)
                for name, phase, start, end in own.units
            ]
        events += [span_event(_PARTS, rank, name, start, end, "part") for name, start, end in own.parts]
        if own.trace is None:
            continue
        try:
            events += rank_events(Path(own.trace), rank, own.trace_bytes)
        except (OSError, ValueError, KeyError) as error:
            missing.append(f"not the operations of rank {rank}: {error}")
    return {"displayTimeUnit": "ms", "traceEvents": events}, missing


def rank_events(path: Path, rank: int, size_bytes: int) -> list[Event]:
    """What one rank's profiler saw, on the common clock, with processes and flows of its own.

    Raises:
        OSError: if the file cannot be read here: ranks of another machine may keep theirs there.
        HeteroError: if it is another file, or has no mark, by which clocks are brought together.
    """
    found_bytes = path.stat().st_size
    if found_bytes != size_bytes:
        raise HeteroError(f"{path} has {found_bytes} bytes here, the rank wrote {size_bytes}: its own is elsewhere")
    with path.open() as file:
        events: list[Event] = json.load(file)["traceEvents"]
    marks = [event["ts"] for event in events if event.get("name") == MARK and "ts" in event]
    if not marks:
        raise HeteroError(f"{path} has no event {MARK!r}: it was not written by TraceCapture")
    begin_us = min(marks)
    processes: dict[Any, int] = {}
    found = []
    for event in events:
        if event.get("ph") == "M" and event.get("name") in ("process_sort_index", "process_labels"):
            continue
        own = dict(event)
        pid = processes.setdefault(event.get("pid"), _FIRST + _PROCESSES_OF_A_RANK * rank + len(processes))
        own["pid"] = pid
        if "ts" in own:
            own["ts"] = own["ts"] - begin_us
        if "id" in own:
            own["id"] = f"{rank}.{own['id']}"
        if own.get("ph") == "M" and own.get("name") == "process_name":
            own["args"] = {"name": f"rank {rank}: {own['args'].get('name', '')}"}
        found.append(own)
    found += [sort_index_event(pid) for pid in processes.values()]
    return found


def _threads(pid: int, ranks: Sequence[RankTimeline]) -> Iterator[Event]:
    return thread_events(pid, (f"rank {rank} ({own.device})" for rank, own in enumerate(ranks)))
