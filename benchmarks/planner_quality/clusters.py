"""The cases: published layer times of mixed GPUs, and random clusters."""

from __future__ import annotations

import csv
import random
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

TIMES = Path(__file__).parents[2] / "tests" / "data" / "anchors" / "opt350_layer_times_tp1.csv"
MICRO_BATCH = 2
MODELS = ("transformer", "uneven")


@dataclass(frozen=True)
class Case:
    """Devices and the seconds that each needs for each unit.

    Args:
        name: what it is.
        seconds: forward and backward seconds for one micro-batch, shape (devices, units).
        kinds: type of each device, in the order of the stages.
    """

    name: str
    seconds: tuple[tuple[float, ...], ...]
    kinds: tuple[str, ...]


def anchors() -> list[Case]:
    """Two plus two devices of every pair of the seven GPU types measured by the Sailor project (SOSP 2025).

    OPT-350M, 26 layers with embedding and head, micro-batch 2, tensor parallel 1; faster type first.
    """
    layers: dict[str, dict[int, float]] = {}
    with TIMES.open(newline="") as file:
        for row in csv.DictReader(file):
            if int(row["micro_batch"]) == MICRO_BATCH:
                seconds = float(row["forward_s"]) + float(row["backward_s"])
                layers.setdefault(row["gpu"], {})[int(row["layer"])] = seconds
    rows = {gpu: tuple(times[layer] for layer in sorted(times)) for gpu, times in layers.items()}
    cases = []
    for pair in combinations(sorted(rows, key=lambda gpu: sum(rows[gpu])), 2):
        kinds = tuple(gpu for gpu in pair for _ in range(2))
        cases.append(Case(f"2 {pair[0]} + 2 {pair[1]}", tuple(rows[gpu] for gpu in kinds), kinds))
    return cases


def random_clusters(count: int, seed: int = 0) -> list[Case]:
    """2 to 16 devices of 1 to 4 types, listed at random, and 16 to 100 units.

    Types differ in speed by up to 5 x, and each does each *kind* of unit up to 20 % better or worse than its
    speed says, as measured tables show. Two thirds of the models are transformers (equal blocks, a cheap
    embedding, a head as dear as some blocks), the others have units that differ by up to 4 x.
    """
    dice = random.Random(seed)
    return [_random_cluster(dice, number) for number in range(count)]


def _random_cluster(dice: random.Random, number: int) -> Case:
    units, devices = dice.randint(16, 100), dice.randint(2, 16)
    if number % 3:
        unit_kinds = ["embedding", *["block"] * (units - 2), "head"]
        work = {"embedding": dice.uniform(0.02, 0.3), "block": 1.0, "head": dice.uniform(0.3, 4)}
    else:
        unit_kinds = [f"unit {unit}" for unit in range(units)]
        work = {kind: dice.uniform(0.5, 2) for kind in unit_kinds}
    rows = []
    for _ in range(dice.randint(1, 4)):
        speed = dice.uniform(0.2, 1)
        took = {kind: 0.01 * w / speed * dice.uniform(0.8, 1.25) for kind, w in work.items()}
        rows.append(tuple(took[kind] for kind in unit_kinds))
    kinds = [dice.randrange(len(rows)) for _ in range(devices)]
    return Case(
        f"random {number}: {MODELS[number % 3 == 0]}, {units} units, {devices} devices",
        tuple(rows[kind] for kind in kinds),
        tuple(f"type {kind}" for kind in kinds),
    )
