"""Costs as a table: one line per run of units that cost the same."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import groupby

from rich.table import Table

from lightning_hetero.costs import ModelCosts, UnitCost
from lightning_hetero.units import format_bytes, format_seconds


def costs_table(costs: ModelCosts) -> Table:
    """One line per run of alike units: parameters, FLOPs, bytes and, by device type, seconds."""
    table = Table(title=_title(costs), title_justify="left")
    for name in ("unit", "count", "parameters", "GFLOP forward", "backward", "kept", "passed on"):
        table.add_column(name, justify="left" if name == "unit" else "right")
    for kind in costs.timed_types:
        table.add_column(f"{kind}:\nforward fixed + per sample", justify="right")
        table.add_column(f"{kind}:\nbackward fixed + per sample", justify="right")
    for units in _alike(costs):
        table.add_row(*_cells(units, costs.timed_types))
    table.add_section()
    table.add_row(*_total(costs))
    return table


def costs_lines(costs: ModelCosts) -> list[str]:
    """What a table does not show: the speed that the seconds amount to, what was shared, what is not measured."""
    lines = []
    for kind in costs.timed_types:
        points = [unit.timings[kind].points for unit in costs.units]
        samples = max((point.samples for each in points for point in each), default=1)
        seconds = sum(
            unit.timings[kind].forward_s(samples) + unit.timings[kind].backward_s(samples) for unit in costs.units
        )
        flops = samples * sum(unit.forward_flops + unit.backward_flops for unit in costs.units)
        name = costs.devices.get(kind, kind)
        speed = f", {flops / seconds / 1e12:.3g} TFLOP/s" if seconds else ""
        lines.append(
            f"on {name}: {format_seconds(seconds)} for forward and backward of {samples} sample"
            f"{'s' if samples > 1 else ''}{speed}, all units one after another"
        )
    if not costs.timed_types:
        lines.append("no seconds were measured: a plan takes FLOPs over the speed of each device")
    shared = sum(unit.shared_parameters for unit in costs.units)
    if shared:
        lines.append(f"{shared} parameters are shared between units and count with the first")
    return lines


def _title(costs: ModelCosts) -> str:
    inputs = ", ".join(map(str, costs.inputs))
    return f"{costs.model}, {costs.dtype}" + (f", inputs {inputs} per sample" if inputs else "")


def _alike(costs: ModelCosts) -> Iterator[list[UnitCost]]:
    for _, units in groupby(costs.units, key=lambda unit: replace(unit, name="", timings={})):
        run = list(units)
        for _, timed in groupby(run, key=lambda unit: dict(unit.timings)):
            yield list(timed)


def _cells(units: list[UnitCost], types: tuple[str, ...]) -> list[str]:
    unit = units[0]
    name = unit.name if len(units) == 1 else f"{unit.name} to {units[-1].name}"
    cells = [name, str(len(units)), str(unit.parameters)]
    cells += [f"{unit.forward_flops / 1e9:.4g}", f"{unit.backward_flops / 1e9:.4g}"]
    cells += [format_bytes(unit.kept_activation_bytes), format_bytes(unit.output_bytes)]
    for kind in types:
        timing = unit.timings[kind]
        cells.append(f"{format_seconds(timing.forward_fixed_s)} + {format_seconds(timing.forward_per_sample_s)}")
        cells.append(f"{format_seconds(timing.backward_fixed_s)} + {format_seconds(timing.backward_per_sample_s)}")
    return cells


def _total(costs: ModelCosts) -> list[str]:
    units = costs.units
    cells = ["all", str(len(units)), str(costs.parameters)]
    cells += [f"{sum(unit.forward_flops for unit in units) / 1e9:.4g}"]
    cells += [f"{sum(unit.backward_flops for unit in units) / 1e9:.4g}"]
    cells += [format_bytes(sum(unit.kept_activation_bytes for unit in units)), f"loss {format_bytes(costs.loss_bytes)}"]
    for kind in costs.timed_types:
        timings = [unit.timings[kind] for unit in units]
        for phase in ("forward", "backward"):
            fixed, each = (sum(getattr(t, f"{phase}_{part}_s") for t in timings) for part in ("fixed", "per_sample"))
            cells.append(f"{format_seconds(fixed)} + {format_seconds(each)}")
    return cells
