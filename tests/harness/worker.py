"""What runs in a forked rank: set-up, the test's function, and the way its outcome is sent home."""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import pickle
import random
import signal
import sys
import time
import traceback
import warnings
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Job:
    """One call of a function on every rank.

    Args:
        call: pickled ``(function, args, kwargs)``.
        world_size: number of ranks.
        folder: temporary folder shared by the ranks; its ``work`` is their working directory.
        port: a free port for whoever opens a store of its own.
        warning_filters: filters in pytest's ini form, the last one wins.
        process_group: whether to initialise gloo before the call.
        limit_s: the rank ends itself this long after the start, should the test process die.
    """

    call: bytes
    world_size: int
    folder: Path
    port: int
    warning_filters: tuple[str, ...]
    process_group: bool
    limit_s: int


def rank_environment(rank: int, job: Job) -> dict[str, str]:
    """The variables that torchrun would set on one node."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(job.world_size),
        "LOCAL_WORLD_SIZE": str(job.world_size),
        "GROUP_RANK": "0",
        "NODE_RANK": "0",
        "ROLE_RANK": str(rank),
        "ROLE_WORLD_SIZE": str(job.world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(job.port),
        "TORCHELASTIC_RUN_ID": job.folder.name,
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "OMP_NUM_THREADS": "1",
        "LIGHTNING_HETERO_CACHE": "off",
    }


def run_rank(rank: int, job: Job, connection: Connection) -> None:
    """Run one rank's call; never returns into multiprocessing's own clean-up."""
    os.setpgrp()  # so that the rank is killed together with its own children
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(job.limit_s)
    _redirect_output(job.folder / f"rank{rank}.log")
    # held for the life of the process: faulthandler keeps only the descriptor
    stacks = (job.folder / f"rank{rank}.stacks").open("w")
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    faulthandler.enable(file=stacks)
    try:
        message = ("ok", _call(rank, job), "", "", time.monotonic())
        payload = pickle.dumps(message)
    except BaseException as error:  # every way out of the call is the test's to judge, SystemExit too
        name = type(error).__qualname__
        message = ("error", name, str(error), traceback.format_exc(), time.monotonic())
        payload = pickle.dumps(message)
    sys.stdout.flush()
    sys.stderr.flush()
    connection.send_bytes(payload)
    if message[0] == "error":
        os._exit(1)  # closed sockets make the peers' collectives fail at once
    # a rank that left while a peer still talks to it would reset that peer's connection
    connection.recv_bytes()
    _destroy_process_group()
    os._exit(0)


def _call(rank: int, job: Job) -> Any:
    os.environ.update(rank_environment(rank, job))
    os.chdir(job.folder / "work")
    # as in a user's process: workers of a DataLoader would otherwise import torch anew, for half a minute
    multiprocessing.set_start_method("fork", force=True)
    import torch
    from lightning_utilities.core.rank_zero import rank_zero_only

    torch.set_num_threads(1)
    rank_zero_only.rank = rank
    random.seed(0)
    torch.manual_seed(0)
    _filter_warnings(job.warning_filters)
    function, args, kwargs = pickle.loads(job.call)
    if job.process_group:
        store = torch.distributed.FileStore(str(job.folder / "store"), job.world_size)
        torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=job.world_size)
    return function(*args, **kwargs)


def _destroy_process_group() -> None:
    import torch

    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def _filter_warnings(filters: tuple[str, ...]) -> None:
    from _pytest.config import parse_warning_filter

    warnings.resetwarnings()
    for text in filters:
        warnings.filterwarnings(*parse_warning_filter(text, escape=False))


def _redirect_output(path: Path) -> None:
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
