"""One rank's failure ends the run on all ranks, with that rank's message.

A rank that fails writes its message into the process group's store. The others either notice by themselves (gloo:
their peer's connection closes) and then find the message there, or are ended by a watching thread after a grace
period (NCCL: a collective would wait for its timeout). For a rank that was killed, and wrote nothing, another one
writes (peers.py).
"""

from __future__ import annotations

import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress

from lightning_hetero.errors import HeteroError
from lightning_hetero.strategies.peers import Peers, Store

_KEY = "lightning_hetero/first_failure"
_GONE = "its process ended without a word (killed, or out of memory?)"
_SILENCE_S = 3.0
"""without a sign of life from another machine, once a connection is lost"""


class RankFailedError(HeteroError):
    """Another rank failed; the message is that rank's."""


class FailureWatch:
    """Publishes this rank's failure and ends this process when another rank has failed.

    Args:
        store: of the process group.
        rank: this rank.
        world_size: number of ranks.
        where: says what this rank is doing, for the message about a rank that cannot say so itself.
        poll_s: seconds between two looks at the store.
        grace_s: seconds that this rank gets to end by itself after another one failed.

    Attributes:
        beside: called at every look at the store, for what else is to be looked for.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        world_size: int,
        *,
        where: Callable[[], str] = lambda: "somewhere",
        poll_s: float = 0.5,
        grace_s: float = 10.0,
    ) -> None:
        self.store = store
        self.rank = rank
        self.peers = Peers(store, rank, world_size)
        self.poll_s = poll_s
        self.grace_s = grace_s
        self.beside: Callable[[], None] = lambda: None
        self._where = where
        self._found: str | None = None
        self._failed_looks = 0
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="hetero-failure-watch", daemon=True)

    def start(self) -> None:
        """Begin to watch."""
        self.peers.announce()
        self._thread.start()

    def stop(self) -> None:
        """Stop watching; call when this rank has ended, well or not."""
        self._done.set()
        if self._thread.is_alive():
            self._thread.join(timeout=5 * self.poll_s)
        if self._found is None:
            with suppress(RuntimeError):  # the store may have ended with rank 0
                self.peers.leave()

    def publish(self, error: BaseException, where: str) -> None:
        """Write this rank's failure where the others look; only the first one of the run is kept."""
        last = traceback.extract_tb(error.__traceback__)[-1:]
        line = "".join(f" ({frame.filename}:{frame.lineno})" for frame in last)
        self._write(f"rank {self.rank} failed {where}: {type(error).__name__}: {error}{line}")

    def _write(self, message: str) -> None:
        try:
            self.store.compare_set(_KEY, "", message)
            self.first_failure()
        except RuntimeError as gone:
            # the store lives on rank 0, which may have ended first
            print(f"[rank {self.rank}] could not publish a failure: {gone}", file=sys.stderr)

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

    def wait_for_cause(self) -> str | None:
        """Return whose failure has ended a connection, once that is known; None if nothing tells.

        Another rank may still be writing its message. One that was killed is looked for, and written about.
        """
        deadline_s = time.monotonic() + 1.0
        try:
            if not self.peers.all_here():
                deadline_s += _SILENCE_S
            while time.monotonic() < deadline_s and self.first_failure() is None:
                gone = self.peers.find_gone(_SILENCE_S)
                if gone is not None:
                    self._write(f"rank {gone} failed {self._where()}: {_GONE}")
                time.sleep(0.05)
        except RuntimeError:
            self._note_lost_store()
        return self.first_failure()

    def _note_lost_store(self) -> None:
        """Take the store's end for rank 0's, which holds it, unless that one has ended well or is seen to live."""
        unexplained = self._found is None and self.rank != 0 and not self.peers.zero_has_left
        if unexplained and self.peers.zero_has_ended() is not False:
            self._found = f"rank 0 failed {self._where()}: {_GONE}, and the process group's store with it"

    def wait_until_seen(self, world_size: int, timeout_s: float = 5.0) -> None:
        """Return when all ranks know of the first failure: for the rank whose end is the store's end."""
        first = self.first_failure()
        if first is None:
            return
        ranks = [rank for rank in range(world_size) if rank != self.rank and not first.startswith(f"rank {rank} ")]
        others = [f"{_KEY}/seen_by/{rank}" for rank in ranks]
        deadline_s = time.monotonic() + timeout_s
        while others and time.monotonic() < deadline_s:
            try:
                others = [key for key in others if not self.store.check([key])]
            except RuntimeError:
                return
            time.sleep(0.02)

    def _watch(self) -> None:
        while not self._done.wait(self.poll_s):
            self.beside()
            message = self.first_failure() or self._look_around()
            if message is None or message.startswith(f"rank {self.rank} "):
                continue
            if not self._done.wait(self.grace_s):
                print(f"[rank {self.rank}] ends because {message}", file=sys.stderr, flush=True)
                os._exit(1)
            return

    def _look_around(self) -> str | None:
        """Give a sign of life, and write for a rank that gives none."""
        try:
            self.peers.beat()
            gone = self.peers.look_around()
            if gone is not None:
                self._write(f"rank {gone} failed {self._where()}: {_GONE}")
            self._failed_looks = 0
        except RuntimeError:
            self._failed_looks += 1
            if self._failed_looks >= 3:
                self._note_lost_store()
        return self.first_failure()
