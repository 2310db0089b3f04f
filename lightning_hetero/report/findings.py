"""What the doctor found, as text."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console

from lightning_hetero.doctor import CHECKS, Finding, RankFacts, can_start

_STYLES = {"error": "bold red", "warning": "yellow", "note": "dim"}
_INDENT = " " * 9


def show_findings(screen: Console, findings: Sequence[Finding], facts: Sequence[RankFacts]) -> None:
    """Print every finding with its next step, and at the end whether training can start."""
    # checks that could not be made for one and the same reason are told together
    alike: dict[tuple[str, str, str, str, str], list[str]] = {}
    for finding in findings:
        alone = finding.check if finding.checked else ""
        key = (finding.level, alone, finding.where, finding.what, finding.next_step)
        alike.setdefault(key, []).append(finding.check)
    for (level, _, where, what, next_step), checks in alike.items():
        screen.print(f"{level:8} ", style=_STYLES[level], end="")
        screen.print(f"{', '.join(dict.fromkeys(checks))}: {where}", markup=False, soft_wrap=True)
        screen.print(f"{_INDENT}{what}", markup=False, soft_wrap=True)
        if next_step:
            screen.print(f"{_INDENT}next: {next_step}", markup=False, soft_wrap=True)
    screen.print(verdict(findings, facts), markup=False, soft_wrap=True)


def verdict(findings: Sequence[Finding], facts: Sequence[RankFacts]) -> str:
    """One line: whether training can start, how many findings of each level, and what was looked at."""
    counts = ", ".join(
        f"{number} {level}{'' if number == 1 else 's'}"
        for level in ("error", "warning", "note")
        if (number := sum(finding.level == level for finding in findings)) or level == "error"
    )
    nodes = len({each.node for each in facts})
    seen = f"{len(facts)} rank{'s' if len(facts) > 1 else ''} on {nodes} node{'s' if nodes > 1 else ''}"
    skipped = dict.fromkeys(finding.check for finding in findings if not finding.checked)
    text = f"training {'can' if can_start(findings) else 'cannot'} start: {counts}; {seen}; looked at "
    text += ", ".join(check for check in CHECKS if check not in skipped)
    return text + (f"; in part or not at all: {', '.join(skipped)}" if skipped else "")
