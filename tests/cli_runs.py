"""Commands that must fail."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def failed(capsys: Any, run: Callable[[], int]) -> str:
    """Standard error of a command that must end with status 2 and one message, and nothing on standard output."""
    try:
        status: Any = run()
    except SystemExit as stopped:  # argparse's own errors
        status = stopped.code
    assert status == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "Traceback" not in err
    return str(err)
