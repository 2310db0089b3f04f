"""Where tables go: the terminal, or a file or pipe without cutting them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

WIDTH = 180
"""columns where the output is no terminal"""


def console(*, stderr: bool = False) -> Console:
    """A console on standard output or error, wide enough where it is no terminal."""
    made = Console(stderr=stderr, highlight=False)
    return made if made.is_terminal else Console(stderr=stderr, highlight=False, width=WIDTH)


@contextmanager
def progress_bar(what: str) -> Iterator[Callable[[int, int, str], None]]:
    """Show how far long work is: a bar on a terminal, else a line per step; both on standard error.

    Args:
        what: the work, as in "profiling vit_1b".

    Yields:
        ``update(done, total, current)``.
    """
    out = console(stderr=True)
    if not out.is_terminal:

        def line(done: int, total: int, current: str) -> None:
            out.print(f"{what}: {done} of {total}: {current}", markup=False, soft_wrap=True)

        yield line
        return
    # not the totals by format: there is none until the first call
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(separator=" of "))
    with Progress(
        *columns, TimeElapsedColumn(), TextColumn("{task.fields[current]}"), console=out, transient=True
    ) as bar:
        task = bar.add_task(what, total=None, current="")

        def update(done: int, total: int, current: str) -> None:
            bar.update(task, completed=done, total=total, current=current)

        yield update
