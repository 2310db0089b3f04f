"""What became of one rank, and the errors that a test sees."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Outcome:
    """How one rank ended.

    Args:
        rank: the rank.
        status: "ok", "error", or "running" when it had to be killed.
        value: what the function returned, when ok.
        error_type: qualified name of the exception's type, e.g. ``ValueError``.
        message: ``str`` of the exception.
        traceback: its traceback as text, or the rank's stack when it was killed.
        output: what the rank wrote to stdout and stderr.
        ended_s: when it ended, on the machine's monotonic clock.
        exit_code: of a process that ended without a result; negative for the signal that ended it.
    """

    rank: int
    status: str
    value: Any = None
    error_type: str = ""
    message: str = ""
    traceback: str = ""
    output: str = ""
    ended_s: float = float("inf")
    exit_code: int | None = None

    @property
    def crashed(self) -> bool:
        """Whether it broke memory: compiled code did so, no test sends these signals."""
        return self.exit_code in (-signal.SIGSEGV, -signal.SIGBUS)

    @property
    def short(self) -> tuple[Any, ...]:
        """``("ok", value)`` or ``("error", type name, message)``."""
        return ("ok", self.value) if self.status == "ok" else ("error", self.error_type, self.message)

    def describe(self) -> str:
        """One line without the value."""
        if self.status == "ok":
            return f"rank {self.rank}: ok"
        if self.status == "running":
            return f"rank {self.rank}: still running, killed"
        return f"rank {self.rank}: {self.error_type}: {self.message.splitlines()[0] if self.message else ''}"


class RankFailedError(AssertionError):
    """A rank raised: carries the first failure in time; ``outcomes`` holds every rank's."""

    def __init__(self, outcomes: Sequence[Outcome]) -> None:
        self.outcomes = tuple(outcomes)
        first = min((o for o in outcomes if o.status == "error"), key=lambda o: o.ended_s)
        self.rank, self.error_type, self.message = first.rank, first.error_type, first.message
        others = "\n".join(f"  {o.describe()}" for o in outcomes if o.rank != first.rank)
        super().__init__(
            f"rank {first.rank} failed first: {first.error_type}: {first.message}\n{first.traceback}"
            f"other ranks:\n{others or '  none'}{_output(first)}"
        )


class RanksTimedOutError(AssertionError):
    """Ranks were still running at the time limit: carries their stacks; ``outcomes`` holds every rank's."""

    def __init__(self, outcomes: Sequence[Outcome], timeout_s: float) -> None:
        self.outcomes = tuple(outcomes)
        self.running = tuple(o.rank for o in outcomes if o.status == "running")
        lines = "\n".join(f"  {o.describe()}" for o in outcomes)
        details = "\n".join(
            f"--- rank {o.rank} ({o.status}) ---\n{o.traceback}{_output(o)}" for o in outcomes if o.status != "ok"
        )
        who = ", ".join(map(str, self.running))
        super().__init__(f"ranks {who} were still running after {timeout_s:g} s\n{lines}\n{details}")


def _output(outcome: Outcome) -> str:
    tail = outcome.output[-3000:]
    return f"\noutput of rank {outcome.rank} (its end):\n{tail}" if tail.strip() else ""
