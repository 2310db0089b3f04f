"""What the ranks of a pipeline read: the same batches, which one of them reads and hands on, a batch ahead."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from lightning_hetero.strategies.pipe.hand import Hand

_FAILED = "failed"
"""what is handed on in place of a batch that could not be read"""


class Reader:
    """Reads for a pipeline's ranks.

    Args:
        hand: of the rank that reads; nothing but batches goes through it.
    """

    def __init__(self, hand: Hand) -> None:
        self._hand = hand
        self._current: _Reading | None = None

    def batches(self, loader: Iterable[Any]) -> Iterator[Any]:
        """Yield the batches of the reading rank's ``loader``, on every rank; the others do not touch theirs."""
        if self._hand.alone:
            yield from loader
            return
        reading = _Reading(self._hand, loader)
        try:
            for batch in reading:
                self._current = reading  # again: an evaluation may have read in between
                yield batch
        finally:
            if self._current is reading:  # and not one that has begun since
                self._current = None

    def read_ahead(self) -> None:
        """Read and hand on the next batch of the iteration at hand (on all ranks, which go on at once)."""
        if self._current is not None:
            self._current.read_ahead()

    def go_on(self) -> None:
        """Ask for the rest of what was read ahead, if its beginning has come; waits for nothing."""
        self._hand.go_on()

    def end(self) -> None:
        """Take what was read ahead and is not wanted any more."""
        self._hand.end()


class _Reading:
    """An iteration; what reading raises is raised where that batch is asked for."""

    def __init__(self, hand: Hand, loader: Iterable[Any]) -> None:
        self._hand = hand
        self._iterator = iter(loader) if hand.gives else iter(())
        self._ahead: deque[Callable[[], Any]] = deque()

    def __iter__(self) -> _Reading:
        return self

    def __next__(self) -> Any:
        self.read_ahead()
        return self._ahead.popleft()()

    def read_ahead(self) -> None:
        """Begin with the next batch, if it is not under way yet."""
        if not self._ahead:
            self._ahead.append(self._read() if self._hand.gives else self._ask())

    def _read(self) -> Callable[[], Any]:
        try:
            batch = next(self._iterator)
        except BaseException as error:
            ended, caught = isinstance(error, StopIteration), error
            self._hand.hand_on(None if ended else _FAILED)
            if not isinstance(error, Exception):
                raise  # whoever interrupts does not wait for the next batch

            def again() -> Any:
                raise caught

            return again
        self._hand.hand_on((batch,))
        return lambda: batch

    def _ask(self) -> Callable[[], Any]:
        asked = self._hand.ask()

        def take() -> Any:
            found = asked.take()
            if found == _FAILED:
                self._hand.give(None)  # waits until the rank that failed ends the run with its error
            if found is None:
                raise StopIteration
            return found[0]

        return take
