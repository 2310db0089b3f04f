"""Chrome traces, as ``chrome://tracing`` and https://ui.perfetto.dev show them: events; a simulated step."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from lightning_hetero.records import write_text
from lightning_hetero.simulator.simulated_step import COMMUNICATION, COMPUTE, REST, SimulatedStep

Event = dict[str, Any]

_STREAMS = (COMPUTE, COMMUNICATION, REST)


def process_events(pid: int, name: str) -> Iterator[Event]:
    """What names a process, and keeps processes in the order of their numbers."""
    yield {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": name}}
    yield sort_index_event(pid)


def sort_index_event(pid: int) -> Event:
    """What keeps a process in the order of its number."""
    return {"ph": "M", "name": "process_sort_index", "pid": pid, "tid": 0, "args": {"sort_index": pid}}


def thread_events(pid: int, names: Iterable[str]) -> Iterator[Event]:
    """What names the threads of a process, numbered from 0, and keeps them in this order."""
    for tid, name in enumerate(names):
        yield {"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": name}}
        yield {"ph": "M", "name": "thread_sort_index", "pid": pid, "tid": tid, "args": {"sort_index": tid}}


def span_event(pid: int, tid: int, name: str, start_s: float, end_s: float, category: str) -> Event:
    """Something that begins and ends, in seconds from the trace's start."""
    return {
        "ph": "X",
        "pid": pid,
        "tid": tid,
        "name": name,
        "cat": category,
        "ts": start_s * 1e6,
        "dur": (end_s - start_s) * 1e6,
    }


def simulated_trace(step: SimulatedStep, what: str) -> dict[str, Any]:
    """A simulated step as a trace: a process for each rank that has spans, a thread for each of its streams.

    Args:
        step: the step.
        what: it is of, for the trace's names.
    """
    events: list[Event] = []
    drawn = sorted({span.rank for span in step.spans})
    for rank in drawn:
        own = step.ranks[rank]
        events += process_events(rank, f"SIMULATED rank {rank} ({own.device} on {own.node})")
        events += thread_events(rank, _STREAMS)
    for span in step.spans:
        tid = _STREAMS.index(span.stream)
        events.append(span_event(span.rank, tid, span.name, span.start_s, span.end_s, span.stream))
    about = f"simulated, nothing was run: {what}"
    if len(drawn) < len(step.ranks):
        about += f"; {len(drawn)} of {len(step.ranks)} ranks are drawn, the others do as one of these"
    other = {"label": about, "step_s": step.step_s, "assumed": list(step.assumed)}
    return {"displayTimeUnit": "ms", "otherData": other, "traceEvents": events}


def write_trace(path: str | os.PathLike[str], trace: Mapping[str, Any]) -> None:
    """Write a trace, whole or not at all."""
    write_text(Path(path), json.dumps(trace, allow_nan=False))
