"""Ranks of a benchmark end with their conductor, however it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks.hetero_speedup import preload
from benchmarks.hetero_speedup.gate import Gate

ROOT = Path(__file__).parents[1]


def stuck(case: Any, rank: int, gate: Gate) -> None:
    """An arm that never comes back to its gate, as one whose collective hangs."""
    gate.ready({"pid": os.getpid()})
    time.sleep(1000)


def conduct() -> None:
    from benchmarks.hetero_speedup.ranks import ArmRanks

    preload.PRELOAD.clear()  # nothing is trained here
    ranks = ArmRanks("stuck", stuck, None, 2)
    ranks.wait_ready()
    print("ranks", *(process.pid for process in ranks.processes), flush=True)
    time.sleep(1000)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_no_rank_outlives_its_conductor(number: signal.Signals) -> None:
    command = [sys.executable, "-c", "from tests.test_benchmark_ranks import conduct; conduct()"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True) as conductor:
        assert conductor.stdout is not None
        try:
            word, *pids = conductor.stdout.readline().split()
        finally:
            conductor.send_signal(number)
    assert word == "ranks"
    deadline_s = time.monotonic() + 10
    while (left := [pid for pid in pids if _runs(int(pid))]) and time.monotonic() < deadline_s:
        time.sleep(0.1)
    for pid in left:
        os.kill(int(pid), signal.SIGKILL)
    assert left == []


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False
