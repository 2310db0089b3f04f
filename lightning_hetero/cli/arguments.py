"""Parsers of argument values; what they raise becomes the parser's one-line error."""

from __future__ import annotations

import argparse
import math

from lightning_hetero.errors import HeteroError
from lightning_hetero.units import parse_bytes


def positive_integers(text: str) -> tuple[int, ...]:
    """``1,2,4`` as (1, 2, 4)."""
    try:
        values = tuple(int(part) for part in text.split(","))
    except ValueError:
        values = ()
    if not values or min(values) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: write whole numbers of samples with commas, such as 1,2,4")
    return values


def node_counts(text: str) -> tuple[int, ...]:
    """``1,2,4`` as (1, 2, 4), each once, ascending."""
    parts = [part.strip() for part in text.split(",")]
    bad = [part for part in parts if not part.isdecimal() or int(part) < 1]
    if bad:
        raise argparse.ArgumentTypeError(
            f"{text!r}: {', '.join(map(repr, bad))} {'is' if len(bad) == 1 else 'are'} no number of nodes: write whole "
            "numbers, 1 or more, with commas, such as 1,2,4"
        )
    return tuple(sorted(set(map(int, parts))))


def names(text: str) -> tuple[str, ...]:
    """``a,b`` as ("a", "b"), each once."""
    found = tuple(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    if not found:
        raise argparse.ArgumentTypeError(f"{text!r}: write names with commas")
    return found


def positive_integer(text: str) -> int:
    """A whole number, 1 or more."""
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: write a whole number, 1 or more")
    return value


def whole_number(text: str) -> int:
    """A whole number, 0 or more."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r}: write a whole number, 0 or more")
    return int(text)


def positive_seconds(text: str) -> float:
    """Seconds, above 0."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r}: write a number of seconds above 0, such as 60")
    return value


def bytes_count(text: str) -> int:
    """Bytes with their unit, such as ``64 MiB``."""
    try:
        return parse_bytes(text)
    except HeteroError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
