"""Which of the other ranks are still there: a process that was killed writes no message.

Every rank writes into the process group's store who it is, and signs of life. A process of the same machine that has
ended is seen at once; one on another machine by its silence.
"""

from __future__ import annotations

import json
import os
import platform
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol

_PREFIX = "lightning_hetero/peers"


class Store(Protocol):
    """The part of ``torch.distributed.Store`` that is used."""

    def add(self, key: str, number: int) -> int:
        """Add to the counter ``key`` and return its new value."""

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """Set ``key`` to ``desired`` if it is ``expected`` (or absent and "" expected)."""

    def set(self, key: str, value: str) -> None:
        """Set ``key`` to ``value``."""

    def check(self, keys: list[str]) -> bool:
        """Whether all ``keys`` are there."""

    def get(self, key: str) -> bytes:
        """Return the value of ``key``, waiting for it."""


@dataclass(frozen=True)
class Process:
    """A process that others on its machine can look for.

    Args:
        machine: what tells one machine, or container, from others.
        pid: its number there.
        started: when it started, in the machine's own measure, since numbers are used again.
    """

    machine: str
    pid: int
    started: str

    @classmethod
    def own(cls) -> Process:
        """Return this process."""
        return cls(_machine(), os.getpid(), _started(os.getpid()) or "")

    def has_ended(self) -> bool | None:
        """Whether the process is gone; None where that cannot be told from here."""
        if self.machine != _machine() or not self.started:
            return None
        return _started(self.pid) != self.started


class Peers:
    """The ranks of one run, as one of them sees the others.

    Args:
        store: of the process group.
        rank: this rank.
        world_size: number of ranks.
        silence_s: for how long a rank on another machine may give no sign of life.
    """

    def __init__(self, store: Store, rank: int, world_size: int, *, silence_s: float = 60.0) -> None:
        self.store = store
        self.rank = rank
        self.world_size = world_size
        self.silence_s = silence_s
        # a process may run several fits over one store; all ranks count them alike
        self._run = f"{_PREFIX}/{store.add(f'{_PREFIX}/runs/{rank}', 1)}"
        self._processes: dict[int, Process] = {}
        self._heard: dict[int, tuple[bytes, float]] = {}
        self._left: set[int] = set()
        self._beats = 0

    def announce(self) -> None:
        """Tell the others which process this rank is."""
        self.beat()
        self.store.set(f"{self._run}/who/{self.rank}", json.dumps(asdict(Process.own())))

    def beat(self) -> None:
        """Give a sign of life."""
        self._beats += 1
        self.store.set(f"{self._run}/beat/{self.rank}", str(self._beats))

    def leave(self, timeout_s: float = 2.0) -> None:
        """Say that this rank has ended well; rank 0, whose end may be the store's, waits until the others know."""
        self.store.set(f"{self._run}/left/{self.rank}", "1")
        others = [r for r in range(self.world_size) if self.rank == 0 and r != 0]
        deadline_s = time.monotonic() + timeout_s
        while others and time.monotonic() < deadline_s:
            others = [r for r in others if not self._has(f"left/{r}") and not self._has(f"knows/{r}")]
            time.sleep(0.01)

    def look_around(self) -> int | None:
        """Return a rank that has ended without leaving, or None: of the next rank and of rank 0.

        Each rank looks after one other, so that the store has little to do; rank 0's end may be the store's.
        """
        self._note_departure_of_0()
        for rank in {(self.rank + 1) % self.world_size, 0} - {self.rank}:
            if self._is_gone(rank, self.silence_s):
                return rank
        return None

    def find_gone(self, silence_s: float) -> int | None:
        """Return any rank that has ended without leaving, or None; ask again until ``silence_s`` have passed."""
        return next((r for r in range(self.world_size) if r != self.rank and self._is_gone(r, silence_s)), None)

    def all_here(self) -> bool:
        """Whether all ranks are on this machine, as far as is known, so that none has to be listened for."""
        return all(r == self.rank or self._ended(r) is not None for r in range(self.world_size))

    def zero_has_ended(self) -> bool | None:
        """Whether rank 0's process is gone, found without the store; None where that cannot be told."""
        process = self._processes.get(0)
        return None if process is None else process.has_ended()

    @property
    def zero_has_left(self) -> bool:
        """Whether rank 0 is known to have ended well."""
        return 0 in self._left

    def _note_departure_of_0(self) -> None:
        self._ended(0)  # asked while the store is there: its end may be rank 0's
        if self.rank != 0 and 0 not in self._left and self._has("left/0"):
            self._left.add(0)
            self.store.set(f"{self._run}/knows/{self.rank}", "1")

    def _is_gone(self, rank: int, silence_s: float) -> bool:
        if rank in self._left:
            return False
        ended = self._ended(rank)
        if ended is None:
            ended = self._is_silent(rank, silence_s)
        if ended and self._has(f"left/{rank}"):
            self._left.add(rank)
            return False
        return ended

    def _ended(self, rank: int) -> bool | None:
        if rank not in self._processes:
            if not self._has(f"who/{rank}"):
                return None  # not there yet
            self._processes[rank] = Process(**json.loads(self.store.get(f"{self._run}/who/{rank}")))
        return self._processes[rank].has_ended()

    def _is_silent(self, rank: int, silence_s: float) -> bool:
        if not self._has(f"beat/{rank}"):
            return False
        beat, now_s = self.store.get(f"{self._run}/beat/{rank}"), time.monotonic()
        if rank not in self._heard or self._heard[rank][0] != beat:
            self._heard[rank] = (beat, now_s)
        return now_s - self._heard[rank][1] > silence_s

    def _has(self, key: str) -> bool:
        return self.store.check([f"{self._run}/{key}"])


def _machine() -> str:
    """Return what tells this machine, or the container in which numbers of processes count, from others."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return f"{platform.node()} without /proc"


def _started(pid: int) -> str | None:
    """Return when a process started, by the kernel's clock; None where it has ended, or nothing tells."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else fields[19]
