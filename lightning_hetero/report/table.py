"""A table that is shown in a terminal and on a page: title, columns, cells, and what is to be said below it."""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

ABSENT = "-"

_WHOLE = 24
"""characters up to which a cell's line is not wrapped"""


@dataclass(frozen=True)
class ReportTable:
    """Cells as text.

    Attributes:
        title: what it shows.
        columns: headings.
        rows: cells of each row.
        notes: below it: over what, and why something is absent.
        left: headings of columns whose cells stand to the left.
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...] = ()
    left: tuple[str, ...] = field(default=("device", "run", "strategy"))

    def without_empty(self) -> ReportTable:
        """Without columns in which all is absent."""
        kept = [
            place for place, _ in enumerate(self.columns) if any(row[place] != ABSENT for row in self.rows) or place < 2
        ]
        return ReportTable(
            self.title,
            tuple(self.columns[place] for place in kept),
            tuple(tuple(row[place] for place in kept) for row in self.rows),
            self.notes,
            self.left,
        )

    def show(self, screen: Console) -> None:
        """Print it."""
        if self.rows:
            # as Text, since names of devices and folders are no markup
            table = Table()
            for place, name in enumerate(self.columns):
                justify: Literal["left", "right"] = "left" if name in self.left else "right"
                table.add_column(Text(name), justify=justify, min_width=self._least_width(place))
            for row in self.rows:
                table.add_row(*map(Text, row))
            screen.print(self.title, markup=False, soft_wrap=True, style="italic")
            needed = sum(map(self._least_width, range(len(self.columns)))) + 3 * len(self.columns) + 1
            if needed > screen.width:  # a figure of which a digit is cut off is wrong, a line that is wrapped is ugly
                screen = Console(file=screen.file, width=needed, highlight=False)
            screen.print(table)
        else:
            screen.print(self.title, markup=False, soft_wrap=True, style="italic")
        for note in self.notes:
            screen.print(f"  {note}", markup=False, soft_wrap=True)
        screen.print()

    def as_html(self) -> str:
        """The same for a page."""
        parts = [f"<h3>{html.escape(self.title)}</h3>"]
        if self.rows:
            heads = "".join(f"<th{self._side(name)}>{_text(name)}</th>" for name in self.columns)
            parts.append(f"<div class=wide><table><thead><tr>{heads}</tr></thead><tbody>")
            for row in self.rows:
                cells = zip(self.columns, row, strict=True)
                parts.append("<tr>" + "".join(f"<td{self._side(n)}>{_text(cell)}</td>" for n, cell in cells) + "</tr>")
            parts.append("</tbody></table></div>")
        parts += [f"<p class=note>{html.escape(note)}</p>" for note in self.notes]
        return "\n".join(parts)

    def _least_width(self, place: int) -> int:
        """Characters that a column needs so that no figure is cut or wrapped; words of long texts may be."""
        lines = [
            line for cell in (self.columns[place], *(row[place] for row in self.rows)) for line in cell.split("\n")
        ]
        pieces = [piece for line in lines for piece in ([line] if len(line) <= _WHOLE else line.split())]
        return max(map(cell_len, pieces), default=1)

    def _side(self, name: str) -> str:
        return " class=left" if name in self.left else ""


def cells(values: Sequence[str | None]) -> tuple[str, ...]:
    """Texts, with a dash for what is absent."""
    return tuple(ABSENT if value is None else value for value in values)


def _text(cell: str) -> str:
    return html.escape(cell).replace("\n", "<br>")
