"""metrics.jsonl: a file per rank while a run goes on, one afterwards, and nothing lost whenever a process dies."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from lightning_hetero.errors import HeteroError
from lightning_hetero.metrics import MERGED, RankFile, merge_rank_files, rank_path, read_metrics


def write_run(folder: Path, run: str, blocked_s: tuple[float, ...], steps: int = 2) -> None:
    """A run of as many ranks, whose steps take 1 s."""
    for rank, blocked in enumerate(blocked_s):
        file = RankFile(folder, rank)
        file.write("run", {"schema": 1, "run": run, "world_size": len(blocked_s), "device": f"d{rank}"})
        for step in range(1, steps + 1):
            values = {"step": step, "step_s": 1.0, "compute_s": 1.0 - blocked, "blocked_s": blocked}
            file.write("step", {**values, "messages_s": 0.0, "mfu": float("nan")})
        file.write("end", {"step": steps})
        file.close()


def places(lines: list[dict[str, Any]]) -> list[tuple[str, int, int]]:
    return [(line["kind"], line["step"], line["rank"]) for line in lines]


EXPECTED = [("step", 1, 0), ("step", 1, 1), ("step", 2, 0), ("end", 2, 0), ("step", 2, 1), ("end", 2, 1)]


def test_the_ranks_files_become_one(tmp_path: Path) -> None:
    write_run(tmp_path, "a", (0.1, 0.4))
    (before,) = read_metrics(tmp_path)
    assert merge_rank_files(tmp_path) == tmp_path / MERGED
    assert [path.name for path in tmp_path.iterdir()] == [MERGED]
    (run,) = read_metrics(tmp_path)
    assert run == before == read_metrics(tmp_path / MERGED)[0]
    assert (run.run, [run.ranks[rank]["device"] for rank in (0, 1)]) == ("a", ["d0", "d1"])
    assert places(run.lines) == EXPECTED
    assert run.steps[0]["mfu"] is None
    assert merge_rank_files(tmp_path) is None


def test_waiting_is_what_others_are_not_blocked_for(tmp_path: Path) -> None:
    write_run(tmp_path, "a", (0.1, 0.4))
    (run,) = read_metrics(tmp_path)
    for line in run.steps:
        assert line["communication_s"] == 0.1
        assert line["waiting_s"] == pytest.approx(0.3 * line["rank"])
        assert line["compute_s"] + line["communication_s"] + line["waiting_s"] == pytest.approx(line["step_s"])


def test_a_line_that_was_being_written_is_all_that_is_lost(tmp_path: Path) -> None:
    write_run(tmp_path, "a", (0.1, 0.4))
    path = rank_path(tmp_path, 1)
    path.write_bytes(path.read_bytes()[:-5])
    (run,) = read_metrics(tmp_path)
    assert places(run.lines) == EXPECTED[:-1]
    # another run in the same folder does not write behind that part of a line
    write_run(tmp_path, "b", (0.2, 0.2))
    assert [each.run for each in read_metrics(tmp_path)] == ["a", "b"]
    merge_rank_files(tmp_path)
    first, second = read_metrics(tmp_path)
    assert places(first.lines) == EXPECTED[:-1]
    assert places(second.lines) == EXPECTED
    lines = (tmp_path / MERGED).read_text().splitlines()
    assert [json.loads(line)["kind"] for line in lines].count("run") == 4


def test_a_step_that_one_rank_did_not_finish_is_not_split(tmp_path: Path) -> None:
    write_run(tmp_path, "a", (0.1, 0.4))
    path = rank_path(tmp_path, 1)
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:2]))
    (run,) = read_metrics(tmp_path)
    assert ["waiting_s" in line for line in run.steps] == [True, True, False]


def test_a_process_that_dies_while_it_merges_doubles_nothing(tmp_path: Path) -> None:
    write_run(tmp_path, "a", (0.1, 0.4))
    kept = tmp_path / "kept"
    kept.mkdir()
    for rank in (0, 1):
        shutil.copy(rank_path(tmp_path, rank), kept)
    merge_rank_files(tmp_path)
    for rank in (0, 1):  # it had died before it deleted them
        shutil.copy(rank_path(kept, rank), tmp_path)
    (run,) = read_metrics(tmp_path)
    assert places(run.lines) == EXPECTED
    merge_rank_files(tmp_path)
    assert read_metrics(tmp_path) == [run]
    assert not rank_path(tmp_path, 0).exists()


def test_the_ranks_files_are_there_until_the_merged_one_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_run(tmp_path, "a", (0.1, 0.4))

    def full(old: Any, new: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("lightning_hetero.metrics.os.replace", full)
    with pytest.raises(OSError, match="No space left"):
        merge_rank_files(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["metrics.rank_0.jsonl", "metrics.rank_1.jsonl"]
    (run,) = read_metrics(tmp_path)
    assert places(run.lines) == EXPECTED


def test_what_is_no_metrics_file_is_told(tmp_path: Path) -> None:
    with pytest.raises(HeteroError, match=r"has no metrics.jsonl: give the folder of a run"):
        read_metrics(tmp_path)
    merged = tmp_path / MERGED
    for content, words in (
        ('{"kind": "step", "rank": 0, "step": 1}\n', "does not begin with a line of kind 'run'"),
        ("what\n", "not JSON"),
        ("[1]\n", "without kind and rank"),
        ('{"kind": "run", "rank": 0, "run": "a", "schema": 2}\n', "has schema 2, this version reads 1"),
    ):
        merged.write_text(content)
        with pytest.raises(HeteroError, match=words):
            read_metrics(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(HeteroError, match=r"rank 0 cannot write its metrics to .*: give another folder"):
        RankFile(tmp_path / "file" / "below", 0)
