"""Layer times and layer sizes of a model.

What the columns of the sizes mean was worked out from OPT-350M's (README.md): the first one, named ``micro_batch`` in
the published table, is the tensor-parallel degree; ``params_bytes`` are those of one GPU of that many, 4 bytes a
parameter; ``activation_output_bytes`` are of one sample, 4 bytes a number.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from lightning_hetero.errors import HeteroError, raise_all

BUNDLED = Path(__file__).parent


@dataclass(frozen=True)
class LayerSeconds:
    """What one layer takes: forward and backward of one micro-batch, and its part of the optimizer."""

    forward_s: float
    backward_s: float
    update_s: float


@dataclass(frozen=True)
class LayerSizes:
    """What one layer holds on one GPU.

    Args:
        params_bytes: of its parameters, and so of its gradients.
        output_bytes: of what it gives to the next layer, for one sample.
    """

    params_bytes: int
    output_bytes: int


@dataclass(frozen=True)
class Tables:
    """Both tables.

    Args:
        times_path: file of the times.
        sizes_path: file of the sizes.
        times: by GPU type, tensor-parallel degree and micro-batch, then by layer.
        sizes: by tensor-parallel degree, then by layer.
    """

    times_path: Path
    sizes_path: Path
    times: Mapping[tuple[str, int, int], Mapping[int, LayerSeconds]]
    sizes: Mapping[int, Mapping[int, LayerSizes]]

    def problems(self, gpu: str, tensor_parallel: int, micro_batch: int, first: int, last: int) -> list[str]:
        """Why these layers cannot be looked up: one text for each reason, empty where they can."""
        found, layers = [], range(first, last + 1)
        times = self.times.get((gpu, tensor_parallel, micro_batch), {})
        lacking = [layer for layer in layers if layer not in times]
        if lacking:
            found.append(
                f"no layer time for {gpu}, tensor_parallel {tensor_parallel}, micro_batch {micro_batch}, "
                f"layer {_shown(lacking)} in {self.times_path}, which has {self._known(gpu, tensor_parallel)}: "
                "change the run, or add what was profiled"
            )
        absent = [layer for layer in layers if layer not in self.sizes.get(tensor_parallel, {})]
        if absent:
            found.append(
                f"no layer sizes for tensor_parallel {tensor_parallel}, layer {_shown(absent)} in {self.sizes_path}, "
                f"which has tensor_parallel {_shown(sorted(self.sizes))}: change the run, or add them"
            )
        return found

    def _known(self, gpu: str, tensor_parallel: int) -> str:
        """The nearest that there is to what was asked for."""
        if micro_batches := sorted(m for g, t, m in self.times if (g, t) == (gpu, tensor_parallel)):
            return f"micro_batch {_shown(micro_batches)} for these GPUs"
        if degrees := sorted({t for g, t, _ in self.times if g == gpu}):
            return f"tensor_parallel {_shown(degrees)} for {gpu}"
        return f"the GPUs {_shown(sorted({g for g, _, _ in self.times}))}"


def _shown(values: Sequence[object]) -> str:
    text = ", ".join(map(str, values[:12]))
    return text + (f" and {len(values) - 12} more" if len(values) > 12 else "")


def find_table(runs_path: Path, model: str, kind: str, option: str) -> Path:
    """The table that belongs to a file of runs: beside it, or the one that is published with this benchmark.

    Args:
        runs_path: the file of runs.
        model: name of its model; ``OPT-350`` has tables that begin with ``opt350_``.
        kind: ``layer_times`` or ``layer_sizes``.
        option: of the command line that names another one, for the error.

    Raises:
        HeteroError: where there is none.
    """
    name = f"{''.join(filter(str.isalnum, model)).lower()}_{kind}.csv"
    for folder in (runs_path.parent, BUNDLED):
        if (folder / name).is_file():
            return folder / name
    raise HeteroError(f"{name} is neither in {runs_path.parent} nor in {BUNDLED}: give {option} FILE.csv")


def read_tables(times_path: Path, sizes_path: Path) -> Tables:
    """Read both.

    Raises:
        HeteroError: listing missing columns and bad numbers, with file and line.
    """
    times: dict[tuple[str, int, int], dict[int, LayerSeconds]] = {}
    sizes: dict[int, dict[int, LayerSizes]] = {}
    problems: list[str] = []
    seconds = ("forward_s", "backward_s", "update_s")
    for place, row in _rows(times_path, ("gpu", "tensor_parallel", "micro_batch", "layer", *seconds), problems):
        try:
            key = row["gpu"], int(row["tensor_parallel"]), int(row["micro_batch"])
            taken = [float(row[name]) for name in seconds]
            layer = int(row["layer"])
        except (TypeError, ValueError) as error:
            problems.append(f"{place}: {error}: correct it")
            continue
        if not all(0 <= value < float("inf") for value in taken):
            problems.append(f"{place}: seconds are {taken}: give zero or more")
        times.setdefault(key, {})[layer] = LayerSeconds(*taken)
    for place, row in _rows(sizes_path, ("layer", "params_bytes", "activation_output_bytes"), problems):
        try:
            # The published table names it micro_batch (see the head of this file).
            degree = int(row["tensor_parallel"] if "tensor_parallel" in row else row["micro_batch"])
            held = LayerSizes(int(row["params_bytes"]), int(row["activation_output_bytes"]))
            sizes.setdefault(degree, {})[int(row["layer"])] = held
        except (KeyError, TypeError, ValueError) as error:
            problems.append(f"{place}: {error}: correct it")
    raise_all(HeteroError, "the layer tables cannot be read", problems)
    return Tables(times_path, sizes_path, times, sizes)


def _rows(path: Path, columns: Sequence[str], problems: list[str]) -> list[tuple[str, dict[str, str]]]:
    """Each row with its place; notes a file that is not there or lacks columns."""
    try:
        with path.open(newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file)
            lacking = [name for name in columns if name not in (reader.fieldnames or ())]
            if lacking:
                problems.append(f"{path} has no column {', '.join(lacking)}: add it")
                return []
            return [(f"{path} line {reader.line_num}", row) for row in reader]
    except (OSError, UnicodeDecodeError) as error:
        problems.append(f"{path} cannot be read ({error}): give another file")
        return []
