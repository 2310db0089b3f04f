"""The pool of warm ranks, as the test process sees it."""

from __future__ import annotations

import contextlib
import math
import multiprocessing
import os
import pickle
import signal
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from tests.harness.outcome import Outcome, RankFailedError, RanksTimedOutError
from tests.harness.worker import Job, run_rank

GRACE_S = 3.0
"""How long the other ranks may go on after the first failure, so that their own words are heard."""


class WarmRanks:
    """Runs module-level functions on real gloo ranks that start in milliseconds.

    Args:
        root: the repository; it is put on the forkserver's path.
        warning_filters: filters in pytest's ini form, applied in every rank, the last one wins.

    Attributes:
        crashes: runs that were run again because a rank broke memory, each with the rank's last stack.
    """

    def __init__(self, root: Path, warning_filters: tuple[str, ...] = ("error",)) -> None:
        self.warning_filters = warning_filters
        self.crashes: list[str] = []
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["tests.harness.preload"])
        with _python_path(root):
            multiprocessing.forkserver.ensure_running()

    def run(
        self,
        world_size: int,
        fn: Callable[..., Any],
        *args: Any,
        timeout: float = 60,
        process_group: bool = True,
        **kwargs: Any,
    ) -> list[Any]:
        """Call ``fn(*args, **kwargs)`` on every rank and return the results by rank.

        The ranks see torchrun's environment, one thread, seed 0, warnings as errors, a shared temporary
        working directory, and an initialised gloo process group unless ``process_group`` is False.
        A run in which a rank breaks memory (SIGSEGV) is run again once, and told at the end of the tests.

        Args:
            world_size: number of ranks.
            fn: a module-level function; arguments and result are pickled.
            timeout: seconds until the ranks are killed.
            process_group: whether gloo is initialised before the call.

        Raises:
            RankFailedError: a rank raised; the first in time is told, with its traceback.
            RanksTimedOutError: ranks were still running; told with every rank's stack.
        """
        outcomes = self._run(world_size, fn, args, kwargs, timeout, process_group, grace_s=GRACE_S)
        if any(o.crashed for o in outcomes):
            # once in some ten thousand runs torch 2.14 on CPU does; what it was at is told at the end of the tests
            self.crashes.append(str(RankFailedError(outcomes)))
            outcomes = self._run(world_size, fn, args, kwargs, timeout, process_group, grace_s=GRACE_S)
        if any(o.status == "error" for o in outcomes):
            raise RankFailedError(outcomes)
        if any(o.status == "running" for o in outcomes):
            raise RanksTimedOutError(outcomes, timeout)
        return [o.value for o in outcomes]

    def run_outcomes(
        self,
        world_size: int,
        fn: Callable[..., Any],
        *args: Any,
        timeout: float = 60,
        process_group: bool = True,
        **kwargs: Any,
    ) -> list[tuple[Any, ...]]:
        """As :meth:`run`, for tests of failures: ``("ok", value)`` or ``("error", type, message)`` by rank.

        Every rank must end by itself: one that hangs after a peer's failure fails the test.

        Raises:
            RanksTimedOutError: ranks were still running.
        """
        outcomes = self._run(world_size, fn, args, kwargs, timeout, process_group, grace_s=math.inf)
        if any(o.status == "running" for o in outcomes):
            raise RanksTimedOutError(outcomes, timeout)
        return [o.short for o in outcomes]

    def _run(
        self,
        world_size: int,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        timeout_s: float,
        process_group: bool,
        grace_s: float,
    ) -> list[Outcome]:
        with tempfile.TemporaryDirectory(prefix="ranks-", ignore_cleanup_errors=True) as name:
            folder = Path(name)
            (folder / "work").mkdir()
            job = Job(
                call=pickle.dumps((fn, args, kwargs)),
                world_size=world_size,
                folder=folder,
                port=_free_port(),
                warning_filters=self.warning_filters,
                process_group=process_group,
                limit_s=math.ceil(timeout_s) + 30,
            )
            outcomes = self._fork_and_wait(job, timeout_s, grace_s)
            logs = [folder / f"rank{o.rank}.log" for o in outcomes]
            return [
                replace(o, output=log.read_text(errors="replace") if log.exists() else "")
                for o, log in zip(outcomes, logs, strict=True)
            ]

    def _fork_and_wait(self, job: Job, timeout_s: float, grace_s: float) -> list[Outcome]:
        processes: list[BaseProcess] = []
        connections: list[Connection] = []
        found: dict[int, Outcome] = {}
        try:
            for rank in range(job.world_size):
                ours, theirs = self._context.Pipe()
                # not a daemon: a rank may start loader workers of its own
                process = self._context.Process(target=run_rank, args=(rank, job, theirs), daemon=False)
                process.start()
                theirs.close()
                processes.append(process)
                connections.append(ours)
            found = _collect(processes, connections, timeout_s, grace_s)
            found = {r: _with_last_stack(o, job.folder) for r, o in found.items()}
            missing = [rank for rank in range(job.world_size) if rank not in found]
            stacks = _stacks(missing, processes, job.folder)
            killed = {r: Outcome(r, "running", error_type="Killed", traceback=stacks[r]) for r in missing}
            return [{**found, **killed}[rank] for rank in range(job.world_size)]
        finally:
            _end(processes, connections, finished=set(found))


def _collect(
    processes: list[BaseProcess], connections: list[Connection], timeout_s: float, grace_s: float
) -> dict[int, Outcome]:
    """Wait for every rank's outcome, until the time limit or ``grace_s`` after the first failure."""
    found: dict[int, Outcome] = {}
    deadline = time.monotonic() + timeout_s
    while len(found) < len(connections):
        waiting = {connections[r]: r for r in range(len(connections)) if r not in found}
        ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            break
        for connection in ready:
            rank = waiting[connection]  # type: ignore[index]
            found[rank] = _receive(rank, processes[rank], connection)  # type: ignore[arg-type]
            if found[rank].status == "error":
                deadline = min(deadline, time.monotonic() + grace_s)
    return found


def _receive(rank: int, process: BaseProcess, connection: Connection) -> Outcome:
    try:
        status, *rest, ended_s = pickle.loads(connection.recv_bytes())
    except EOFError:
        process.join(5)
        code = process.exitcode
        message = f"the process ended without a result, exit code {code}"
        return Outcome(rank, "error", error_type="RankDied", message=message, ended_s=time.monotonic(), exit_code=code)
    if status == "ok":
        return Outcome(rank, "ok", value=rest[0], ended_s=ended_s)
    error_type, message, trace = rest
    return Outcome(rank, "error", error_type=error_type, message=message, traceback=trace, ended_s=ended_s)


def _stacks(ranks: list[int], processes: list[BaseProcess], folder: Path) -> dict[int, str]:
    """Every thread's stack of the given ranks, by faulthandler, which needs no working interpreter loop."""
    for rank in ranks:
        pid = processes[rank].pid
        if pid is not None and processes[rank].is_alive():
            os.kill(pid, signal.SIGUSR1)
    if ranks:
        time.sleep(0.5)
    paths = {rank: folder / f"rank{rank}.stacks" for rank in ranks}
    return {rank: path.read_text() if path.exists() else "not started\n" for rank, path in paths.items()}


def _with_last_stack(outcome: Outcome, folder: Path) -> Outcome:
    """A rank that died of a signal left what it was at to faulthandler."""
    path = folder / f"rank{outcome.rank}.stacks"
    if outcome.error_type != "RankDied" or not path.exists():
        return outcome
    return replace(outcome, traceback=path.read_text(errors="replace"))


def _end(processes: list[BaseProcess], connections: list[Connection], finished: set[int]) -> None:
    """Let finished ranks go, kill the others, and whatever either started."""
    for connection in connections:
        with contextlib.suppress(OSError):
            connection.send_bytes(b"go")
    patience = time.monotonic() + 2
    for rank, process in enumerate(processes):
        if rank in finished:
            process.join(max(0.0, patience - time.monotonic()))
        if process.pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        process.join()
        process.close()
    for connection in connections:
        connection.close()


@contextlib.contextmanager
def _python_path(root: Path) -> Iterator[None]:
    """The forkserver takes its path from the environment; ranks get the test process's own at each fork."""
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(root), *([before] if before else [])])
    try:
        yield
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
