"""The bar of long work, on a terminal and without one."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from lightning_hetero.report import console as console_module
from lightning_hetero.report.console import progress_bar


@pytest.mark.parametrize("terminal", [True, False], ids=["terminal", "pipe"])
def test_it_says_what_is_done(monkeypatch: pytest.MonkeyPatch, terminal: bool) -> None:
    shown = io.StringIO()
    made = Console(file=shown, force_terminal=terminal, width=80)
    monkeypatch.setattr(console_module, "console", lambda *, stderr=False: made)
    with progress_bar("simulating") as progress:
        progress(0, 3, "the first")
        progress(3, 3, "done")
    assert "simulating" in shown.getvalue()
    assert ("3 of 3" if not terminal else "3") in shown.getvalue()


def test_it_may_be_shown_before_its_total_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Console(file=io.StringIO(), force_terminal=True, width=80)
    monkeypatch.setattr(console_module, "console", lambda *, stderr=False: made)
    with progress_bar("simulating"):
        pass
    assert "simulating" in made.file.getvalue()  # type: ignore[attr-defined]
