"""A calibration as tables: the constants and where they come from, and how well they explain each run."""

from __future__ import annotations

from lightning_hetero.report.run_tables import EMULATED
from lightning_hetero.report.table import ReportTable, cells
from lightning_hetero.simulator.calibration import Calibration
from lightning_hetero.units import format_bytes_per_s, format_seconds


def calibration_tables(calibration: Calibration) -> list[ReportTable]:
    """Constants; errors."""
    emulated = f" ({EMULATED})" if calibration.emulated else ""
    return [_constants(calibration, emulated), _errors(calibration, emulated)]


def _constants(calibration: Calibration, emulated: str) -> ReportTable:
    rows = []
    for kind, device in calibration.devices.items():
        values = {
            "compute_scale": f"{device.compute_scale:.4g} x",
            "fixed_s": format_seconds(device.fixed_s),
            "optimizer_s_per_parameter": f"{device.optimizer_s_per_parameter:.4g} s",
            "busy_power_w": None if device.busy_power_w is None else f"{device.busy_power_w:.4g} W",
            "idle_power_w": None if device.idle_power_w is None else f"{device.idle_power_w:.4g} W",
        }
        for name, value in values.items():
            source = calibration.sources.get(f"devices.{kind}.{name}")
            if value is not None and source is not None:
                rows.append(cells([kind, name, value, source]))
    for name, link in calibration.links.items():
        value = f"{format_bytes_per_s(link.bandwidth_bytes_per_s)}, {format_seconds(link.latency_s)}"
        rows.append(cells([name, "bandwidth, latency", value, calibration.sources.get(f"links.{name}")]))
    notes = tuple(f"refused: {text}" for text in calibration.refused)
    columns = ("device or link", "constant", "value", "from")
    return ReportTable(f"Constants{emulated}", columns, tuple(rows), notes, columns)


def _errors(calibration: Calibration, emulated: str) -> ReportTable:
    rows = [
        cells(
            [
                run.run,
                format_seconds(run.measured_step_s),
                format_seconds(run.predicted_step_s),
                f"{100 * run.error:+.1f} %",
                format_seconds(run.uncalibrated_step_s),
                f"{100 * (run.uncalibrated_step_s / run.measured_step_s - 1):+.1f} %",
            ]
        )
        for run in calibration.runs
    ]
    notes = []
    if calibration.runs:
        mean = f"mean error {100 * calibration.mean_error:.1f} %"
        notes.append(f"{mean}, of the runs that the constants were fitted to: other runs are the test")
    if calibration.warning:
        notes.append(f"MIND: {calibration.warning}")
    columns = ("run", "step\nmeasured", "step\nsimulated", "error", "as costs\nand cluster", "error of that")
    return ReportTable(f"How well they explain each run{emulated}", columns, tuple(rows), tuple(notes))
