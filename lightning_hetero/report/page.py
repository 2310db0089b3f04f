"""One self-contained page: tables, and figures as images within it."""

from __future__ import annotations

import base64
import html
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from lightning_hetero.report.run_tables import EMULATED
from lightning_hetero.report.table import ReportTable

_DOTS = 110
"""of the page for an inch of a figure: letters of 8 points are 12 dots high"""

_STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; color: #1c2733; max-width: 1320px; margin: 2em auto; padding: 0 1.2em }
h1 { font-size: 1.6em } h2 { font-size: 1.3em; border-top: 1px solid #d9dee4; padding-top: 1em; margin-top: 2em }
h3 { font-size: 1.05em; margin: 1.6em 0 .5em }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: 14px }
th, td { padding: .35em .8em; text-align: right; border-bottom: 1px solid #e6eaee; vertical-align: bottom }
th.left, td.left { text-align: left } th { background: #f5f7f9; font-weight: 600 }
.wide { overflow-x: auto } .note { color: #51606f; margin: .35em 0; font-size: 14px }
.emulated { background: #fdecec; color: #9d1c1c; border: 1px solid #e3b1b1; padding: .7em 1em; font-weight: 600 }
figure { margin: 1em 0 2em } img { max-width: 100%; height: auto } figcaption { color: #51606f; font-size: 14px }
"""


@dataclass(frozen=True)
class Picture:
    """A figure on the page.

    Attributes:
        path: image that was written.
        caption: what it shows.
        width_inches: of the figure.
    """

    path: Path
    caption: str
    width_inches: float


@dataclass(frozen=True)
class Section:
    """A run, or all of them together.

    Attributes:
        title: heading.
        emulated: whether its devices are emulated.
        tables: in order.
        pictures: below them.
    """

    title: str
    emulated: bool
    tables: Sequence[ReportTable]
    pictures: Sequence[Picture] = field(default=())


def write_page(path: Path, sections: Sequence[Section], notes: Sequence[str] = ()) -> None:
    """Write the page, whole or not at all, with every image in it.

    Args:
        path: HTML file.
        sections: in order.
        notes: on top, such as why there are no figures.
    """
    parts = ["<!doctype html><html lang=en><head><meta charset=utf-8>"]
    parts.append("<meta name=viewport content='width=device-width, initial-scale=1'>")
    parts.append(f"<title>lightning-hetero report</title><style>{_STYLE}</style></head><body>")
    parts.append("<h1>What every rank did</h1>")
    parts += [f"<p class=note>{html.escape(note)}</p>" for note in notes]
    for section in sections:
        parts.append(f"<h2>{html.escape(section.title)}</h2>")
        if section.emulated:
            parts.append(f"<p class=emulated>{html.escape(EMULATED)}</p>")
        parts += [table.as_html() for table in section.tables]
        for picture in section.pictures:
            parts.append(_figure(picture))
    parts.append("</body></html>")
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_text("\n".join(parts), encoding="utf-8")
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _figure(picture: Picture) -> str:
    """The image within the page, as wide as its letters are of one size with those of all others."""
    width = round(picture.width_inches * _DOTS)
    text = html.escape(picture.caption)
    source = f"data:image/png;base64,{base64.b64encode(picture.path.read_bytes()).decode()}"
    return f"<figure><img width={width} alt='{text}' src='{source}'><figcaption>{text}</figcaption></figure>"
