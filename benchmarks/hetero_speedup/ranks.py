"""The processes of an arm: started once, stepped by the conductor, ended together."""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import pickle
import shutil
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from benchmarks.hetero_speedup.gate import Gate
from benchmarks.hetero_speedup.preload import PRELOAD
from lightning_hetero.strategies.parent import ParentWatch
from lightning_hetero.strategies.peers import Process

Arm = Callable[[Any, int, Gate], "dict[str, Any] | None"]
"""An arm's function in each of its ranks: (its case, rank, gate); it returns what is known of it at its end."""

_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # of malloc.h

START_TIMEOUT_S = 300.0
STEP_TIMEOUT_S = 300.0


class ArmFailedError(RuntimeError):
    """A rank of an arm raised, died or hung; carries its traceback and the end of its output."""


class ArmRanks:
    """An arm's ranks, each a process of its own under torchrun's environment.

    Args:
        name: what to call the arm.
        arm: module-level function that trains and lets the gate hold it between steps.
        case: handed to the arm.
        world_size: number of ranks.
    """

    def __init__(self, name: str, arm: Arm, case: Any, world_size: int) -> None:
        self.name = name
        self.folder = Path(tempfile.mkdtemp(prefix="hetero-speedup-"))
        context = multiprocessing.get_context("forkserver")
        # torch and Lightning are imported once for all arms
        context.set_forkserver_preload(PRELOAD)
        port = _free_port()
        self.processes: list[Any] = []
        self.connections: list[Connection] = []
        for rank in range(world_size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_run_rank,
                args=(arm, case, rank, world_size, port, theirs, self.folder, Process.own()),
                daemon=True,
            )
            process.start()
            theirs.close()
            self.processes.append(process)
            self.connections.append(ours)

    def wait_ready(self) -> dict[str, Any]:
        """Wait until every rank stands before its first step; returns what rank 0 said of itself."""
        info: dict[str, Any] = self._gather("ready", START_TIMEOUT_S)[0]
        return info

    def step(self) -> float:
        """Run one step; returns seconds from its start to the end of the last rank."""
        self._tell("step")
        times = self._gather("step", STEP_TIMEOUT_S)
        return float(max(end for _, end in times) - min(start for start, _ in times))

    def stop(self) -> dict[str, Any]:
        """Let every rank finish its run, and check that it does; returns what rank 0 said of itself then."""
        self._tell("stop")
        told: dict[str, Any] | None = self._gather("done", STEP_TIMEOUT_S)[0]
        self.close()
        return told or {}

    def close(self) -> None:
        """End the processes, finished or not, and remove their folder."""
        for process, connection in zip(self.processes, self.connections, strict=True):
            connection.close()
            process.join(0.2)
            if process.is_alive():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGKILL)
            process.join()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _tell(self, word: str) -> None:
        for rank, connection in enumerate(self.connections):
            try:
                connection.send(word)
            except OSError:
                self._fail(rank, "ended early")

    def _gather(self, kind: str, timeout_s: float) -> list[Any]:
        """One message of ``kind`` from each rank, by rank."""
        found: dict[int, Any] = {}
        deadline = time.monotonic() + timeout_s
        while len(found) < len(self.connections):
            waiting = {c: r for r, c in enumerate(self.connections) if r not in found}
            ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                self._fail(min(waiting.values()), f"sent no {kind!r} within {timeout_s:g} s")
            for connection in ready:
                rank = waiting[connection]  # type: ignore[index]
                found[rank] = self._receive(rank, kind)
        return [found[rank] for rank in range(len(self.connections))]

    def _receive(self, rank: int, kind: str) -> Any:
        try:
            told, value = self.connections[rank].recv()
        except (EOFError, OSError):
            self._fail(rank, "died")
        if told != kind:
            self._fail(rank, f"failed:\n{value}" if told == "error" else f"sent {told!r} in place of {kind!r}")
        return value

    def _fail(self, rank: int, why: str) -> None:
        log = self.folder / f"rank{rank}.log"
        output = log.read_text(errors="replace")[-3000:] if log.exists() else ""
        self.close()
        raise ArmFailedError(f"arm {self.name!r}, rank {rank} {why}\nend of its output:\n{output}")


def _run_rank(
    arm: Arm,
    case: Any,
    rank: int,
    world_size: int,
    port: int,
    connection: Connection,
    folder: Path,
    conductor: Process,
) -> None:
    log = os.open(folder / f"rank{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.chdir(folder)
    os.environ.update(_environment(rank, world_size, port, folder.name))
    # a conductor that was killed ends no rank, and one in mid-step or in a collective would not notice
    ParentWatch(conductor).start()
    try:
        _prepare(rank)
        connection.send(("done", arm(case, rank, Gate(connection))))
    except BaseException:  # whatever ended the arm is the conductor's to tell
        with contextlib.suppress(OSError):
            connection.send(("error", traceback.format_exc()))
    sys.stdout.flush()
    sys.stderr.flush()
    with contextlib.suppress(EOFError, OSError, pickle.UnpicklingError):
        connection.recv()  # hold the sockets until all ranks are through
    os._exit(0)


def _prepare(rank: int) -> None:
    import torch
    from lightning_utilities.core.rank_zero import rank_zero_only

    _keep_freed_memory()
    torch.set_num_threads(1)  # more ranks than cores: threads of one would take another's time
    torch.manual_seed(0)
    rank_zero_only.rank = rank  # the forkserver imported Lightning as rank 0


def _keep_freed_memory() -> None:
    """Have glibc keep freed memory, as the caching allocator of a GPU does.

    It otherwise gives every large tensor back to the system, which then finds and clears its pages anew, up to half of
    a step's time on a virtual machine, and more so the larger the batch.
    """
    with contextlib.suppress(OSError, AttributeError):  # another C library
        libc = ctypes.CDLL("libc.so.6")
        for option, value in ((_M_MMAP_MAX, 0), (_M_TRIM_THRESHOLD, 2**31 - 1)):
            libc.mallopt(option, value)


def forget_peers() -> None:
    """Make this rank train as if it were the only one."""
    for name in _environment(0, 2, 0, "").keys() - _environment(0, 1, 0, "").keys():
        os.environ.pop(name, None)


def _environment(rank: int, world_size: int, port: int, run: str) -> dict[str, str]:
    alone = {"OMP_NUM_THREADS": "1", "LIGHTNING_HETERO_CACHE": "off"}
    if world_size == 1:
        return alone
    return alone | {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "GROUP_RANK": "0",
        "NODE_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": run,
    }


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
