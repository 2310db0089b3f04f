"""SIGTERM ends all ranks after the same batch.

Lightning (from 2.5.2 on) broadcasts within the signal's handler: a rank that is interrupted in mid-step waits in that
broadcast for ranks that wait for it in another collective. Here the handler only notes the signal. Threads agree on a
batch through the process group's store, so that no rank's training has to get anywhere for it: each says how many
batches its rank has ended, and all end after the next one that none has ended yet.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress

from lightning_hetero.strategies.peers import Store

_PREFIX = "lightning_hetero/sigterm"


class Termination:
    """What one rank knows of a SIGTERM that any rank got.

    Args:
        store: of the process group.
        rank: this rank.
        world_size: number of ranks.
        give_up: ends this process, told why: no batch ends.
        failed: whether another rank failed meanwhile; then nothing is agreed on any more.
        patience_s: for the batch at hand to end, beside twice the longest time between two ends of batches so far.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        world_size: int,
        *,
        give_up: Callable[[str], None],
        failed: Callable[[], object],
        patience_s: float = 10.0,
    ) -> None:
        self._store = store
        self._rank = rank
        self._world_size = world_size
        self._give_up = give_up
        self._failed = failed
        self._patience_s = patience_s
        self._run = f"{_PREFIX}/{store.add(f'{_PREFIX}/runs/{rank}', 1)}"
        self._asked = False
        self._lock = threading.Lock()
        self._ended = 0  # batches, of all loops
        self._ended_at_s: float | None = None
        self._longest_s = 0.0
        self._told: int | None = None  # what the others were told of _ended
        self._last: int | None = None  # after so many batches all ranks end
        self._known = threading.Event()
        self._deadline_s: float | None = None
        self._is_due = False

    @property
    def is_asked(self) -> bool:
        """Whether this rank itself got the signal."""
        return self._asked

    @property
    def is_due(self) -> bool:
        """Whether this rank has ended its last batch."""
        return self._is_due

    def ask(self) -> None:
        """Note that this rank got the signal. Safe in a signal's handler: takes no lock and sends nothing."""
        self._asked = True

    def end_batch(self) -> bool:
        """Note that a batch has ended, of whatever loop; return whether it was the last: all ranks say so together."""
        with self._lock:
            now_s = time.monotonic()
            if self._ended_at_s is not None:
                self._longest_s = max(self._longest_s, now_s - self._ended_at_s)
            self._ended, self._ended_at_s = self._ended + 1, now_s
            told = self._told
        if told is None:
            return False
        while not self._known.wait(0.1):
            if self._failed():
                return False
        assert self._last is not None
        self._is_due = self._ended == self._last
        return self._is_due

    def look(self) -> None:
        """Tell and hear, and give up in the end; called now and then by a thread that runs beside the rank's work."""
        if self._is_due:
            return
        with suppress(RuntimeError):  # the store may end with rank 0, which is found elsewhere
            self._tell()
            self._hear()
        if self._deadline_s is not None and time.monotonic() > self._deadline_s:
            self._give_up(f"SIGTERM: no batch has ended within {self._allowed_s():.0f} s, so it ends in mid-batch")

    def _tell(self) -> None:
        if self._told is not None:
            return
        if self._asked:
            self._store.set(f"{self._run}/asked", str(self._rank))
        elif not self._store.check([f"{self._run}/asked"]):
            return
        with self._lock:
            self._told = self._ended
        self._deadline_s = time.monotonic() + self._allowed_s()
        self._store.set(f"{self._run}/ended/{self._rank}", str(self._told))

    def _hear(self) -> None:
        keys = [f"{self._run}/ended/{rank}" for rank in range(self._world_size)]
        if self._told is not None and self._last is None and self._store.check(keys):
            self._last = 1 + max(int(self._store.get(key)) for key in keys)
            self._known.set()

    def _allowed_s(self) -> float:
        return self._patience_s + 2 * self._longest_s
