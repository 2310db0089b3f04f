"""Traces of ranks brought onto one clock, in one file."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from lightning_hetero.callbacks.trace_file import MARK, RankTimeline, merged_trace, rank_events, write_whole
from lightning_hetero.errors import HeteroError
from lightning_hetero.simulator.planned_step import plan_step
from tests.report_runs import SECONDS, pipeline_plan, shard_plan


def written(path: Path, begin_us: float) -> RankTimeline:
    """As torch's profiler writes: the rank's clock, its own process, and an arrow between two of its events."""
    events = [
        {"ph": "M", "name": "process_name", "pid": 7, "tid": 0, "ts": begin_us, "args": {"name": "python"}},
        {"ph": "M", "name": "process_sort_index", "pid": 7, "tid": 0, "args": {"sort_index": 5}},
        {"ph": "X", "name": MARK, "pid": 7, "tid": 1, "ts": begin_us, "dur": 1},
        {"ph": "X", "name": "mm", "pid": 7, "tid": 1, "ts": begin_us + 10, "dur": 5},
        {"ph": "X", "name": "kernel", "pid": 0, "tid": 1, "ts": begin_us + 12, "dur": 5},
        {"ph": "s", "name": "ac2g", "id": 3, "pid": 7, "tid": 1, "ts": begin_us + 10},
    ]
    path.write_text(json.dumps({"traceEvents": events}))
    return seen(path)


def seen(path: Path) -> RankTimeline:
    return RankTimeline("d", trace=str(path), trace_bytes=path.stat().st_size if path.exists() else 0)


def test_ranks_have_one_clock_and_processes_of_their_own(tmp_path: Path) -> None:
    ranks = [written(tmp_path / f"{r}.json", 1e6 * (r + 1)) for r in (0, 1)]
    trace, missing = merged_trace(ranks, plan_step(shard_plan()), emulated=False)
    assert missing == []
    products = [event for event in trace["traceEvents"] if event["name"] == "mm"]
    assert [(event["pid"], event["ts"]) for event in products] == [(100, 10), (200, 10)]
    kernels = [event for event in trace["traceEvents"] if event["name"] == "kernel"]
    assert [(event["pid"], event["ts"]) for event in kernels] == [(101, 12), (201, 12)]
    assert [event["id"] for event in trace["traceEvents"] if event["ph"] == "s"] == ["0.3", "1.3"]
    names = {e["pid"]: e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "process_name"}
    assert names == {1: "planned", 2: "measured", 3: "measured, parts of the step", 100: "rank 0: python"} | {
        200: "rank 1: python"
    }
    order = {e["pid"]: e["args"]["sort_index"] for e in trace["traceEvents"] if e["name"] == "process_sort_index"}
    assert sorted(order, key=order.__getitem__) == [1, 2, 3, 100, 101, 200, 201]


def test_planned_is_above_measured(tmp_path: Path) -> None:
    own = RankTimeline("d", [("compute", 0.0, 0.5)], [("0", "forward", 0.0, 0.2)], [("0F0", 0.0, 0.25)])
    trace, _ = merged_trace([own, own], plan_step(pipeline_plan(), [SECONDS]), emulated=True)
    spans = [(e["pid"], e["tid"], e["name"], e["ts"], e["dur"]) for e in trace["traceEvents"] if e["ph"] == "X"]
    assert spans[:2] == [(1, 0, "0F0", 0, 1e6), (1, 0, "0F1", 1e6, 1e6)]
    assert (2, 1, "0F0", 0, 0.25e6) in spans
    assert (3, 1, "compute", 0, 0.5e6) in spans
    assert not any(name == "0 forward" for _, _, name, _, _ in spans)  # its action stands for it


def test_each_row_is_its_own_ranks(tmp_path: Path) -> None:
    """Of units, where there are no actions, and of parts."""
    ranks = [RankTimeline("d", [("compute", 0.0, end)], [("0", "forward", 0.0, end / 2)]) for end in (1.0, 3.0)]
    trace, _ = merged_trace(ranks, "no plan", emulated=False)
    spans = [(e["pid"], e["tid"], e["name"], e["dur"]) for e in trace["traceEvents"] if e["ph"] == "X"]
    for rank, end_us in enumerate((1e6, 3e6)):
        assert (2, rank, "0 forward", end_us / 2) in spans
        assert (3, rank, "compute", end_us) in spans


def test_what_is_not_there_is_said(tmp_path: Path) -> None:
    (tmp_path / "other.json").write_text('{"traceEvents": []}')
    (tmp_path / "cut.json").write_text('{"traceEv')
    ranks = [seen(tmp_path / f"{name}.json") for name in ("nowhere", "other", "cut")]
    ranks.append(replace(written(tmp_path / "old.json", 0.0), trace_bytes=5))
    trace, missing = merged_trace([*ranks, RankTimeline("d")], "DDP has no plan", emulated=False)
    assert missing[0] == "no planned timeline: DDP has no plan"
    assert [text.split(":")[0] for text in missing[1:]] == [f"not the operations of rank {r}" for r in (0, 1, 2, 3)]
    assert missing[4].endswith("bytes here, the rank wrote 5: its own is elsewhere")
    assert not any(event["ph"] == "X" for event in trace["traceEvents"])
    with pytest.raises(HeteroError, match="it was not written by TraceCapture"):
        rank_events(tmp_path / "other.json", 0, 19)


def test_a_file_is_whole_or_not_there(tmp_path: Path) -> None:
    with pytest.raises(TypeError):
        write_whole(tmp_path / "x.json", {"traceEvents": [object()]})
    assert list(tmp_path.iterdir()) == []
    write_whole(tmp_path / "x.json", {"traceEvents": []})
    assert [path.name for path in tmp_path.iterdir()] == ["x.json"]
