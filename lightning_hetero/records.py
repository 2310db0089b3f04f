"""Read records that people edit by hand, and write them whole: what cluster, costs and plan files share.

A :class:`Record` collects problems instead of raising at the first, so that one error lists them all.
"""

from __future__ import annotations

import difflib
import json
import math
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from lightning_hetero.errors import HeteroError, raise_all

T = TypeVar("T")


class Record:
    """Checks nested mappings and lists, noting every problem with its place.

    Args:
        source: what is read, for the headline of the error ("cluster file a.yaml").
        kind: class of the error that :meth:`finish` raises.
    """

    def __init__(self, source: str, kind: type[HeteroError]) -> None:
        self.source = source
        self.kind = kind
        self.problems: list[str] = []

    def note(self, place: str, problem: str) -> None:
        """Add a problem found at ``place`` (``nodes[1].devices[0].speed``; empty for the whole record)."""
        self.problems.append(f"{place}: {problem}" if place else problem)

    def finish(self) -> None:
        """Raise one error with every problem noted, if there is any."""
        count = len(self.problems)
        raise_all(self.kind, f"{self.source} has {count} problem{'s' if count > 1 else ''}", self.problems)

    def mapping(
        self, value: object, place: str, required: Iterable[str], optional: Iterable[str] = ()
    ) -> dict[str, Any] | None:
        """``value`` as a mapping; notes missing and unknown keys. ``None`` if it is no mapping at all."""
        required, known = list(required), [*required, *optional]
        if not isinstance(value, Mapping):
            self.note(place, f"is {shown(value)}, not a mapping: write the keys {', '.join(known)}")
            return None
        for key in value:
            if key not in known:
                near = difflib.get_close_matches(str(key), known, n=1, cutoff=0.6)
                hint = f"did you mean {near[0]!r}? Known" if near else "known"
                self.note(place, f"unknown key {key!r}: {hint} keys are {', '.join(known)}")
        for key in required:
            if key not in value:
                self.note(place, f"key {key!r} is missing: add it")
        return dict(value)

    def items(self, value: object, place: str, what: str) -> list[tuple[str, Any]]:
        """``(place, item)`` of every item of a non-empty list; notes what is not one."""
        if not isinstance(value, list) or not value:
            self.note(place, f"is {shown(value)}: write a list with at least one {what}")
            return []
        return [(f"{place}[{index}]", item) for index, item in enumerate(value)]

    def take(self, data: Mapping[str, Any], key: str, place: str, parse: Callable[[Any], T], default: T) -> T:
        """``parse(data[key])``, or ``default`` if the key is absent or ``parse`` raises, which is noted."""
        if key not in data:
            return default
        try:
            return parse(data[key])
        except HeteroError as error:
            self.note(f"{place}.{key}" if place else key, str(error))
            return default


def shown(value: object) -> str:
    """``value`` as it appears in an error: short, with ``nothing`` for an empty one."""
    if value is None:
        return "empty"
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def text(value: object) -> str:
    """A non-empty text; a number is refused, since ``type: 100`` in YAML is most likely a slip."""
    if not isinstance(value, str) or not value.strip():
        raise HeteroError(f"{shown(value)} is not a text: write a non-empty text (in quotes if it is a number)")
    return value


def boolean(value: object) -> bool:
    """``true`` or ``false``."""
    if not isinstance(value, bool):
        raise HeteroError(f"{shown(value)} is neither true nor false: write true or false")
    return value


def integer(minimum: int) -> Callable[[object], int]:
    """A parser of whole numbers from ``minimum`` up."""

    def parse(value: object) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            raise HeteroError(f"{shown(value)} is not valid: write a whole number >= {minimum}")
        return value

    return parse


def number(minimum: float = -math.inf, maximum: float = math.inf) -> Callable[[object], float]:
    """A parser of finite numbers between ``minimum`` and ``maximum``, both included."""
    accepted = "a finite number" + (f" >= {minimum:g}" if math.isfinite(minimum) else "")
    accepted += f" and <= {maximum:g}" if math.isfinite(maximum) else ""

    def parse(value: object) -> float:
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not is_number or not math.isfinite(value) or not minimum <= value <= maximum:  # type: ignore
            raise HeteroError(f"{shown(value)} is not valid: write {accepted}")
        return float(value)  # type: ignore[arg-type]

    return parse


def optional(parse: Callable[[Any], T]) -> Callable[[Any], T | None]:
    """``parse``, or ``None`` for an empty value."""
    return lambda value: None if value is None else parse(value)


def tuple_of(parse: Callable[[Any], T]) -> Callable[[object], tuple[T, ...]]:
    """A parser of lists; its error names the index of every bad item."""

    def parse_all(value: object) -> tuple[T, ...]:
        if not isinstance(value, (list, tuple)):
            raise HeteroError(f"{shown(value)} is not a list: write a list in brackets")
        parsed, problems = [], []
        for index, item in enumerate(value):
            try:
                parsed.append(parse(item))
            except HeteroError as error:
                problems.append(f"[{index}] {error}")
        if problems:
            raise HeteroError("; ".join(problems))
        return tuple(parsed)

    return parse_all


def read_text(path: Path, what: str, kind: type[HeteroError], next_step: str) -> str:
    """The text of a file, or an error that names the file and says what to do."""
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise kind(f"{what} {path} does not exist (looked in {path.absolute().parent}): {next_step}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise kind(f"{what} {path} cannot be read ({error}): {next_step}") from error


def read_json(path: Path, what: str, kind: type[HeteroError], next_step: str) -> Any:
    """The value in a JSON file, or an error that names the file, the line and what to do."""
    content = read_text(path, what, kind, next_step)
    try:
        return json.loads(content)
    except json.JSONDecodeError as error:
        raise kind(
            f"{what} {path} is not JSON: {error.msg} in line {error.lineno}, column {error.colno}: "
            f"correct that line, or {next_step}"
        ) from None


def write_json(path: Path, data: object) -> None:
    """Write indented JSON, whole or not at all. NaN and infinity are refused by ``ValueError``."""
    write_text(path, json.dumps(data, indent=2, allow_nan=False, ensure_ascii=False) + "\n")


def write_text(path: Path, content: str) -> None:
    """Write a file, whole or not at all; folders above it are made."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    # A reader, or a crash half-way, sees the old file or the new one, never a part: the name changes last.
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_text(content, encoding="utf-8")
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
