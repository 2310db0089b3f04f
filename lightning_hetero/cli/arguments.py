"""Parsers of argument values; what they raise becomes the parser's one-line error."""

from __future__ import annotations

import argparse


def positive_integers(text: str) -> tuple[int, ...]:
    """``1,2,4`` as (1, 2, 4)."""
    try:
        values = tuple(int(part) for part in text.split(","))
    except ValueError:
        values = ()
    if not values or min(values) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: write whole numbers of samples with commas, such as 1,2,4")
    return values


def positive_integer(text: str) -> int:
    """A whole number, 1 or more."""
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: write a whole number, 1 or more")
    return value
