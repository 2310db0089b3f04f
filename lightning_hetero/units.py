"""Parse and print quantities as people write them: ``2 GiB``, ``10 GB/s``, ``6 GFLOP/s``, ``10 us``.

GiB is 2**30 bytes, GB is 10**9. A FLOP is one floating-point operation; a multiply-add counts as 2.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from fractions import Fraction

from lightning_hetero.errors import HeteroError

_DECIMAL = {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}
_BINARY = {"Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40, "Pi": 2.0**50}

BYTES: dict[str, float] = {prefix + "B": factor for prefix, factor in (_DECIMAL | _BINARY).items()}
BYTES_PER_S: dict[str, float] = {unit + "/s": factor for unit, factor in BYTES.items()} | {
    prefix + "bit/s": factor / 8 for prefix, factor in _DECIMAL.items()
}
FLOPS_PER_S: dict[str, float] = {
    prefix + word: factor
    for prefix, factor in (_DECIMAL | {"E": 1e18}).items()
    for word in ("FLOP/s", "FLOPS", "FLOPs/s")
}
SECONDS: dict[str, float] = {
    "ns": 1e-9,
    "us": 1e-6,
    "µs": 1e-6,  # micro sign
    "μs": 1e-6,  # Greek mu
    "ms": 1e-3,
    "s": 1.0,
    "min": 60.0,
    "h": 3600.0,
}

_QUANTITY = re.compile(r"\s*([+-]?(?:\d[\d_]*\.?\d*|\.\d+)(?:[eE][+-]?\d+)?|[+-]?(?:inf|nan))\s*(\S.*?)?\s*$", re.I)
_EXAMPLES = {"bytes": "2 GiB", "bandwidth": "10 GB/s", "speed": "6 GFLOP/s", "time": "10 us"}
_NAMED = {
    "bytes": "B, kB, MB, GB, TB (powers of 1000), KiB, MiB, GiB, TiB (powers of 1024)",
    "bandwidth": "B/s, kB/s, MB/s, GB/s, KiB/s, MiB/s, GiB/s, Mbit/s, Gbit/s",
    "speed": "FLOP/s, MFLOP/s, GFLOP/s, TFLOP/s, PFLOP/s",
    "time": "ns, us, ms, s, min, h",
}


def parse_bytes(text: object, *, positive: bool = True) -> int:
    """Bytes in a text such as ``"2 GiB"`` or ``"80 GB"``, rounded to whole bytes.

    Args:
        text: number and unit; the unit is needed, a bare number is refused.
        positive: whether zero is refused. Negative, NaN and infinite values always are.

    Raises:
        HeteroError: naming the value and the accepted units.
    """
    count = round(_parse(text, "bytes", BYTES, positive))
    if positive and count == 0:
        raise HeteroError(f"{text!r} is less than one byte: give at least '1 B'")
    return count


def parse_bytes_per_s(text: object, *, positive: bool = True) -> float:
    """Bytes per second in a text such as ``"10 GB/s"`` or ``"100 Gbit/s"``; see :func:`parse_bytes`."""
    return _parse(text, "bandwidth", BYTES_PER_S, positive)


def parse_flops_per_s(text: object, *, positive: bool = True) -> float:
    """FLOP/s in a text such as ``"6 GFLOP/s"`` or ``"989 TFLOPS"``; see :func:`parse_bytes`."""
    return _parse(text, "speed", FLOPS_PER_S, positive)


def parse_seconds(text: object, *, positive: bool = False) -> float:
    """Seconds in a text such as ``"10 us"``; zero passes unless ``positive``; see :func:`parse_bytes`."""
    return _parse(text, "time", SECONDS, positive)


def _parse(text: object, kind: str, units: dict[str, float], positive: bool) -> float:
    wanted = f"write a number and a unit, such as {_EXAMPLES[kind]!r} (units: {_NAMED[kind]})"
    if isinstance(text, bool) or not isinstance(text, (str, int, float)):
        raise HeteroError(f"{text!r} is not a {kind} quantity: {wanted}")
    match = _QUANTITY.match(str(text))
    if match is None:
        has_unit = isinstance(text, str) and text.strip() in units
        raise HeteroError(f"{text!r} {'has a unit but no number' if has_unit else 'has no number'}: {wanted}")
    number, unit = float(match[1]), match[2]
    if unit is None:
        raise HeteroError(f"{text!r} has no unit: {wanted}")
    if unit not in units:
        raise HeteroError(f"{text!r} has the unknown unit {unit!r}: {wanted}{_case_hint(unit, units)}")
    if not math.isfinite(number):
        raise HeteroError(f"{text!r} is not finite: {wanted}")
    # In fractions, so that "10 us" is the float 1e-05 and not the rounded product 10 * 1e-6.
    value = float(Fraction(match[1].replace("_", "")) * Fraction(repr(units[unit])))
    if value < 0 or (positive and value == 0):
        fault = "negative" if value < 0 else "zero"
        raise HeteroError(f"{text!r} is {fault}: write a value above zero, such as {_EXAMPLES[kind]!r}")
    return value


def _case_hint(unit: str, units: dict[str, float]) -> str:
    near = [known for known in units if known.lower() == unit.lower()]
    return f"; did you mean {near[0]!r}?" if near else ""


def format_bytes(count: float) -> str:
    """Bytes in powers of 1024, three or four digits: ``"37.4 GiB"``, ``"512 B"``."""
    for unit, factor in (
        ("PiB", 2.0**50),
        ("TiB", 2.0**40),
        ("GiB", 2.0**30),
        ("MiB", 2.0**20),
        ("KiB", 2.0**10),
    ):
        if abs(count) >= factor:
            return f"{_digits(count / factor)} {unit}"
    return f"{_digits(count)} B"


def format_bytes_per_s(rate: float) -> str:
    """Bytes per second in powers of 1000: ``"10 GB/s"``."""
    return _format_decimal(rate, "B/s")


def format_flops_per_s(rate: float) -> str:
    """FLOP/s in powers of 1000: ``"6 GFLOP/s"``."""
    return _format_decimal(rate, "FLOP/s")


def format_seconds(seconds: float) -> str:
    """Seconds with the unit that keeps the number readable: ``"10 us"``, ``"158.8 ms"``, ``"2.5 s"``."""
    for unit, factor in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if abs(seconds) >= factor:
            return f"{_digits(seconds / factor)} {unit}"
    return f"{_digits(seconds / 1e-9)} ns" if seconds else "0 s"


def exact_bytes(count: int) -> str:
    """The shortest text that :func:`parse_bytes` reads back as exactly ``count``: ``"2 GiB"``."""
    units = {unit: factor for unit, factor in BYTES.items() if not unit.startswith("K") or unit == "KiB"}
    return _exact(count, units, lambda text: parse_bytes(text, positive=False), "B")


def exact_bytes_per_s(rate: float) -> str:
    """The shortest text that :func:`parse_bytes_per_s` reads back as exactly ``rate``."""
    units = {unit: factor for unit, factor in BYTES_PER_S.items() if unit[0] in "kMGTP" and "i" not in unit}
    return _exact(rate, units, lambda text: parse_bytes_per_s(text, positive=False), "B/s")


def exact_flops_per_s(rate: float) -> str:
    """The shortest text that :func:`parse_flops_per_s` reads back as exactly ``rate``."""
    units = {unit: factor for unit, factor in FLOPS_PER_S.items() if unit.endswith("FLOP/s") and unit[0] != "K"}
    return _exact(rate, units, lambda text: parse_flops_per_s(text, positive=False), "FLOP/s")


def exact_seconds(seconds: float) -> str:
    """The shortest text that :func:`parse_seconds` reads back as exactly ``seconds``."""
    units = {unit: SECONDS[unit] for unit in ("us", "ms", "s")}
    return _exact(seconds, units, parse_seconds, "s")


def _exact(value: float, units: dict[str, float], parse: Callable[[str], float], base: str) -> str:
    texts = [f"{value!r} {base}"]
    for unit, factor in units.items():
        text = f"{value / factor:.6g} {unit}"
        if "e" not in text.split()[0] and parse(text) == value:
            texts.append(text)
    # Of equally short texts the one in the largest unit: "1 GiB", not "1024 MiB".
    return min(texts, key=lambda text: (len(text.split()[0]), -units.get(text.split()[1], 1.0)))


def _format_decimal(value: float, word: str) -> str:
    for prefix, factor in (("E", 1e18), ("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(value) >= factor and prefix + word in (BYTES_PER_S | FLOPS_PER_S):
            return f"{_digits(value / factor)} {prefix}{word}"
    return f"{_digits(value)} {word}"


def _digits(value: float) -> str:
    """Four significant digits, no exponent below 10**6, no trailing zeros."""
    text = f"{value:.4g}"
    if "e" in text:
        return f"{value:.0f}"
    return text
