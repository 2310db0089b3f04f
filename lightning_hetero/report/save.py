"""Write a figure whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path

from matplotlib.figure import Figure


def save_figure(figure: Figure, path: str | os.PathLike[str]) -> None:
    """Write ``figure`` to ``path``, through a file beside it, so that no half of it is ever seen.

    Args:
        figure: what to write.
        path: image file; its suffix gives the format, its folder is made where it is missing.
    """
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f".{target.stem}.{os.getpid()}{target.suffix}")
    try:
        figure.savefig(temporary, dpi=150)
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)
