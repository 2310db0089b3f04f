"""The figure of planning times shows every point of the benchmark."""

import pytest

from lightning_hetero.report import planning
from lightning_hetero.report.planning import plot_planning_time

POINTS = [{"devices": 2**i, "units": 100 * 2**i, "median_s": 0.01 * 3**i} for i in range(3)]
GROWTH = {"by_devices": {"free order": POINTS, "fixed order": POINTS[:2]}, "by_units": {"free order": POINTS}}


def test_every_line_is_drawn_against_its_variable(tmp_path, monkeypatch):
    drawn = []
    save = planning.save_figure
    monkeypatch.setattr(planning, "save_figure", lambda figure, path: (drawn.append(figure), save(figure, path)))
    plot_planning_time(GROWTH, tmp_path / "deep" / "plot.png")
    assert (tmp_path / "deep" / "plot.png").read_bytes().startswith(b"\x89PNG")
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["plot.png"]
    devices, units = drawn[0].axes
    assert devices.get_xlabel() == "devices"
    assert units.get_xlabel() == "units"
    assert "planning time (s)" in devices.get_ylabel()
    assert [line.get_label() for line in devices.lines] == ["free order", "fixed order"]
    assert list(devices.lines[0].get_xdata()) == [1, 2, 4]
    assert list(units.lines[0].get_xdata()) == [100, 200, 400]
    assert list(units.lines[0].get_ydata()) == [point["median_s"] for point in POINTS]


def test_a_failed_figure_leaves_nothing(tmp_path):
    with pytest.raises(ValueError, match="nonsense"):
        plot_planning_time(GROWTH, tmp_path / "plot.nonsense")
    assert list(tmp_path.iterdir()) == []
