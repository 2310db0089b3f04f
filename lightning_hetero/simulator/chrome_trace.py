"""Chrome traces, as ``chrome://tracing`` and https://ui.perfetto.dev show them: events; a simulated step."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from lightning_hetero.records import write_text
from lightning_hetero.simulator.simulated_step import (
    BETWEEN,
    COMMUNICATION,
    COMPUTE,
    MESSAGES,
    REST,
    SimulatedStep,
)

Event = dict[str, Any]

_ORDER = (COMPUTE, COMMUNICATION, BETWEEN, MESSAGES, REST)


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
    streams = _streams(step)
    for rank, names in streams.items():
        own = step.ranks[rank]
        events += process_events(rank, f"SIMULATED rank {rank} ({own.device} on {own.node})")
        events += thread_events(rank, names)
    for span in step.spans:
        tid = streams[span.rank].index(span.stream)
        events.append(span_event(span.rank, tid, span.name, span.start_s, span.end_s, span.stream))
    about = f"simulated, nothing was run: {what}{_not_drawn(step, set(streams))}"
    other = {"label": about, "step_s": step.step_s, "assumed": list(step.assumed)}
    return {"displayTimeUnit": "ms", "otherData": other, "traceEvents": events}


def _streams(step: SimulatedStep) -> dict[int, list[str]]:
    """By rank, those on which something happens: compute first, the rest last."""

    def place(stream: str) -> tuple[int, int, str]:
        kind = next(index for index, name in enumerate(_ORDER) if stream.startswith(name))
        return kind, len(stream), stream  # rank 10 after rank 9

    found: dict[int, set[str]] = {}
    for span in step.spans:
        found.setdefault(span.rank, set()).add(span.stream)
    return {rank: sorted(found[rank], key=place) for rank in sorted(found)}


def _not_drawn(step: SimulatedStep, drawn: Collection[int]) -> str:
    """How many ranks have no spans, and why."""
    others = [rank for rank in step.ranks if rank.rank not in drawn]
    idle = sum(not rank.busy_s for rank in others)
    are = "is" if len(drawn) == 1 else "are"
    about = f"; {len(drawn)} of {len(step.ranks)} ranks {are} drawn" if others else ""
    if len(others) > idle:
        about += f", {len(others) - idle} do as one of these"
    return about + (f", {idle} have nothing to do" if idle else "")


def write_trace(path: str | os.PathLike[str], trace: Mapping[str, Any]) -> None:
    """Write a trace, whole or not at all."""
    write_text(Path(path), json.dumps(trace, allow_nan=False))
