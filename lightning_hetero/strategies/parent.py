"""A process that ends when the one that started it has ended: nobody would be there to end it.

Ranks that are in a process group find each other's end themselves (peers.py); before that, they would wait for the
others for as long as a process group's timeout is.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict

from lightning_hetero.strategies.peers import Process

_VARIABLE = "LIGHTNING_HETERO_LAUNCHED_BY"


class ParentWatch:
    """Ends this process with status 1 when another one has ended.

    Args:
        process: the other one, of this machine; one of which nothing can be told is never found to have ended.
        poll_s: seconds between two looks.
    """

    def __init__(self, process: Process, *, poll_s: float = 0.5) -> None:
        self._process = process
        self._poll_s = poll_s
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="hetero-parent-watch", daemon=True)

    def start(self) -> None:
        """Begin to watch."""
        self._thread.start()

    def stop(self) -> None:
        """Stop watching."""
        self._done.set()

    def _watch(self) -> None:
        while not self._done.wait(self._poll_s):
            if self._process.has_ended():
                print(
                    f"process {os.getpid()} ends: {self._process.pid}, which started it, has ended",
                    file=sys.stderr,
                    flush=True,
                )
                os._exit(1)


@contextmanager
def launching() -> Iterator[None]:
    """What is started within knows which process started it: :func:`watch_launcher`."""
    os.environ[_VARIABLE] = json.dumps(asdict(Process.own()))
    try:
        yield
    finally:
        del os.environ[_VARIABLE]


def watch_launcher() -> ParentWatch | None:
    """Watch the process that launched this rank, from its first Trainer on; None where no launcher of ours did."""
    text = os.environ.pop(_VARIABLE, None)
    if text is None:
        return None
    watch = ParentWatch(Process(**json.loads(text)))
    watch.start()
    return watch
