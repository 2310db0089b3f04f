"""A table that is shown in a terminal and on a page: title, columns, cells, and what is to be said below it."""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass, field

from rich.console import Console
from rich.table import Table
from rich.text import Text

ABSENT = "-"


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
            table = Table(title=Text(self.title), title_justify="left")
            for name in self.columns:
                table.add_column(Text(name), justify="left" if name in self.left else "right")
            for row in self.rows:
                table.add_row(*map(Text, row))
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

    def _side(self, name: str) -> str:
        return " class=left" if name in self.left else ""


def cells(values: Sequence[str | None]) -> tuple[str, ...]:
    """Texts, with a dash for what is absent."""
    return tuple(ABSENT if value is None else value for value in values)


def _text(cell: str) -> str:
    return html.escape(cell).replace("\n", "<br>")
