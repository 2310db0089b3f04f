"""A finding: what stands in a training's way, where, and what to do about it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, Literal

Level = Literal["error", "warning", "note"]
LEVELS: tuple[Level, ...] = ("error", "warning", "note")


@dataclass(frozen=True)
class Finding:
    """One thing that a check found, or could not look at.

    Args:
        level: "error": training cannot start, or would hang; "warning": it starts, but slowly, wrongly or not for long;
            "note": worth knowing.
        check: name of the check.
        where: nodes and ranks ("node b (ranks 4-7)").
        what: what was found, with the values.
        next_step: what to do; empty where nothing has to be done.
        checked: False where the check could not be made; ``what`` then says why.
    """

    level: Level
    check: str
    where: str
    what: str
    next_step: str = ""
    checked: bool = True

    def to_dict(self) -> dict[str, Any]:
        """The finding as JSON has it."""
        return asdict(self)


def not_checked(check: str, where: str, why: str, next_step: str = "") -> Finding:
    """A check that could not be made."""
    return Finding("note", check, where, f"not checked: {why}", next_step, checked=False)


def can_start(findings: Iterable[Finding]) -> bool:
    """Whether training can start: there is no error."""
    return all(finding.level != "error" for finding in findings)
