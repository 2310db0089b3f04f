"""A signal is heard while the main thread is in a call that does not return, where Python runs no handler.

A rank that waits in a collective for one that hangs is in such a call. What Python does at once, in C, is to write the
signal's number to a file descriptor (``signal.set_wakeup_fd``); a thread that runs beside can read it.
"""

from __future__ import annotations

import os
import signal
import threading


class Ears:
    """Hears one signal, of which Python has a handler.

    Made and closed in the main thread; hears nothing elsewhere, or where someone else (asyncio) hears signals this way.

    Args:
        number: of the signal.
    """

    def __init__(self, number: int) -> None:
        self._number = number
        self._lock = threading.Lock()  # the descriptor's number may be another file's once it is closed
        self._ends: tuple[int, int] | None = None
        if threading.current_thread() is threading.main_thread():
            self._open()

    def _open(self) -> None:
        ends = os.pipe()
        for end in ends:
            os.set_blocking(end, False)
        others = signal.set_wakeup_fd(ends[1], warn_on_full_buffer=False)
        if others != -1:
            signal.set_wakeup_fd(others)
            _close(ends)
            return
        self._ends = ends
        _open.add(ends[1])

    def heard(self) -> bool:
        """Whether the signal has come since the last call."""
        with self._lock:
            if self._ends is None:
                return False
            try:
                return self._number in os.read(self._ends[0], 4096)
            except BlockingIOError:
                return False

    def close(self) -> None:
        """Hear no more."""
        with self._lock:
            ends, self._ends = self._ends, None
            if ends is None:
                return
            signal.set_wakeup_fd(-1)
            _open.discard(ends[1])
            _close(ends)


_open: set[int] = set()


def _close(ends: tuple[int, int]) -> None:
    for end in ends:
        os.close(end)


def _after_fork() -> None:
    """A signal to a forked process, such as a loader's worker that is to end, is not one to this rank."""
    if _open:
        signal.set_wakeup_fd(-1)
        _open.clear()


os.register_at_fork(after_in_child=_after_fork)
