"""A calibration as tables: the constants and where they come from, and how well they explain each run."""

from __future__ import annotations

import shutil
import textwrap

from lightning_hetero.report.run_tables import EMULATED
from lightning_hetero.report.table import ReportTable, cells
from lightning_hetero.simulator.calibration import Calibration
from lightning_hetero.units import format_bytes_per_s, format_seconds

WIDTH = 100
"""columns that a table takes at most, and where nobody says how many there are"""

_BESIDE, _LEAST = 63, 16
"""columns that all but "from" take, borders too; and that it has at least"""


def calibration_tables(calibration: Calibration, width: int = WIDTH) -> list[ReportTable]:
    """Constants; errors. Texts are folded so that neither is wider than ``width`` characters, from 80 up."""
    emulated = f" ({EMULATED})" if calibration.emulated else ""
    return [_constants(calibration, emulated, width), _errors(calibration, emulated)]


def table_width() -> int:
    """Columns of the terminal or of COLUMNS, at most :data:`WIDTH`."""
    return min(WIDTH, shutil.get_terminal_size((WIDTH, 24)).columns)


def _constants(calibration: Calibration, emulated: str, width: int) -> ReportTable:
    def fold(text: str | None) -> str | None:
        return None if text is None else "\n".join(textwrap.wrap(text, max(_LEAST, width - _BESIDE)))

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
                rows.append(cells([kind, name, value, fold(source)]))
    for name, link in calibration.links.items():
        value = f"{format_bytes_per_s(link.bandwidth_bytes_per_s)},\n{format_seconds(link.latency_s)}"
        rows.append(cells([name, "bandwidth, latency", value, fold(calibration.sources.get(f"links.{name}"))]))
    notes = tuple(f"refused: {text}" for text in calibration.refused)
    columns = ("device\nor link", "constant", "value", "from")
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
