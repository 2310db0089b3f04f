"""How planning time grows with devices and units."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable
from typing import Any

from lightning_hetero.planner import partition_units

DEVICES = {
    "fixed order, 4 types": (4, (4, 8, 16, 32, 64, 128, 256, 512)),
    "free order, 2 types": (2, (4, 8, 16, 32, 64, 128, 256, 512)),
    "free order, 3 types": (3, (6, 12, 24, 48, 96, 192, 384)),
    "free order, all different": (None, (4, 8, 12, 16, 18)),
}
UNITS = (25, 50, 100, 200, 400, 800, 1600)


def seconds_of(devices: int, types: int, units: int) -> list[list[float]]:
    """Devices of types that differ in speed up to 5 x, and by up to 10 % more from unit to unit."""
    dice = random.Random(f"{devices} {types} {units}")
    work = [dice.uniform(0.5, 2) for _ in range(units)]
    rows = []
    for _ in range(types):
        speed = dice.uniform(0.2, 1)
        rows.append([w / speed * dice.uniform(0.9, 1.1) for w in work])
    return [rows[device % types] for device in range(devices)]


def measure_growth(quick: bool, tell: Callable[[str], None]) -> dict[str, Any]:
    """Planning seconds against devices (three units each, at least 100) and against units (16 devices).

    Args:
        quick: leave out what takes more than a tenth of a second or so.
        tell: called with what is measured next.
    """
    by_devices: dict[str, list[dict[str, float]]] = {}
    for name, (types, sizes) in DEVICES.items():
        for devices in sizes[:5] if quick else sizes:
            kinds = devices if types is None else types
            units = max(100, 3 * devices)
            by_devices.setdefault(name, []).append(_timed(devices, kinds, units, name.startswith("fixed"), quick, tell))
    by_units: dict[str, list[dict[str, float]]] = {}
    for name, kinds, fixed in (
        ("fixed order, 2 types", 2, True),
        ("free order, 2 types", 2, False),
        ("free order, 3 types", 3, False),
    ):
        for units in UNITS[:4] if quick else UNITS:
            by_units.setdefault(name, []).append(_timed(16, kinds, units, fixed, quick, tell))
    return {"by_devices": by_devices, "by_units": by_units}


def _timed(
    devices: int, types: int, units: int, fixed: bool, quick: bool, tell: Callable[[str], None]
) -> dict[str, float]:
    tell(f"{devices} devices, {types} types, {units} units, {'fixed' if fixed else 'free'} order")
    seconds = seconds_of(devices, types, units)
    taken: list[float] = []
    while not taken or (len(taken) < (3 if quick else 9) and sum(taken) < 10):
        start_s = time.perf_counter()
        partition_units(seconds, fixed_order=fixed)
        taken.append(time.perf_counter() - start_s)
    return {
        "devices": devices,
        "types": types,
        "units": units,
        "repeats": len(taken),
        "median_s": statistics.median(taken),
        "fastest_s": min(taken),
    }
