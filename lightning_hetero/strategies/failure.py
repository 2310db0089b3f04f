"""One rank's failure ends the run on all ranks, with that rank's message.

A rank that fails writes its message into the process group's store. The others either notice by themselves (gloo:
their peer's connection closes) and then find the message there, or are ended by a watching thread after a grace
period (NCCL: a collective would wait for its timeout).
"""

from __future__ import annotations

import os
import sys
import threading
import time
import traceback
from typing import Protocol

from lightning_hetero.errors import HeteroError

_KEY = "lightning_hetero/first_failure"


class Store(Protocol):
    """The part of ``torch.distributed.Store`` that is used."""

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """Set ``key`` to ``desired`` if it is ``expected`` (or absent and "" expected)."""

    def set(self, key: str, value: str) -> None:
        """Set ``key`` to ``value``."""

    def check(self, keys: list[str]) -> bool:
        """Whether all ``keys`` are there."""

    def get(self, key: str) -> bytes:
        """Return the value of ``key``, waiting for it."""


class RankFailedError(HeteroError):
    """Another rank failed; the message is that rank's."""


class FailureWatch:
    """Publishes this rank's failure and ends this process when another rank has failed.

    Args:
        store: of the process group.
        rank: this rank.
        poll_s: seconds between two looks at the store.
        grace_s: seconds that this rank gets to end by itself after another one failed.
    """

    def __init__(self, store: Store, rank: int, *, poll_s: float = 0.5, grace_s: float = 10.0) -> None:
        self.store = store
        self.rank = rank
        self.poll_s = poll_s
        self.grace_s = grace_s
        self._found: str | None = None
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="hetero-failure-watch", daemon=True)

    def start(self) -> None:
        """Begin to watch."""
        self._thread.start()

    def stop(self) -> None:
        """Stop watching; call when this rank has ended, well or not."""
        self._done.set()
        if self._thread.is_alive():
            self._thread.join(timeout=5 * self.poll_s)

    def publish(self, error: BaseException, where: str) -> None:
        """Write this rank's failure where the others look; only the first one of the run is kept."""
        last = traceback.extract_tb(error.__traceback__)[-1:]
        line = "".join(f" ({frame.filename}:{frame.lineno})" for frame in last)
        message = f"rank {self.rank} failed {where}: {type(error).__name__}: {error}{line}"
        try:
            self.store.compare_set(_KEY, "", message)
            self.first_failure()
        except RuntimeError as gone:
            # the store lives on rank 0, which may have ended first
            print(f"[rank {self.rank}] could not publish its failure: {gone}", file=sys.stderr)

    def first_failure(self) -> str | None:
        """Return the message of the first rank that failed, or None."""
        if self._found is None:
            try:
                if self.store.check([_KEY]):
                    # kept, since the store ends with rank 0
                    self._found = self.store.get(_KEY).decode()
                    self.store.set(f"{_KEY}/seen_by/{self.rank}", "1")
            except RuntimeError:
                pass
        return self._found

    def wait_until_seen(self, world_size: int, timeout_s: float = 5.0) -> None:
        """Return when all ranks know of the first failure: for the rank whose end is the store's end."""
        if self.first_failure() is None:
            return
        others = [f"{_KEY}/seen_by/{rank}" for rank in range(world_size) if rank != self.rank]
        deadline_s = time.monotonic() + timeout_s
        while others and time.monotonic() < deadline_s:
            try:
                others = [key for key in others if not self.store.check([key])]
            except RuntimeError:
                return
            time.sleep(0.02)

    def _watch(self) -> None:
        while not self._done.wait(self.poll_s):
            message = self.first_failure()
            if message is None or message.startswith(f"rank {self.rank} "):
                continue
            if not self._done.wait(self.grace_s):
                print(f"[rank {self.rank}] ends because {message}", file=sys.stderr, flush=True)
                os._exit(1)
            return
