"""The speed-up figure says what it shows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure

from lightning_hetero.report import speedup
from lightning_hetero.report.speedup import plot_speedup


def _case(emulated: bool, kinds: list[str]) -> dict[str, Any]:
    return {
        "emulated": emulated,
        "case": {"name": "case", "kind_of_rank": kinds, "global_batch": 128},
        "even_images_per_s": 11.0,
        "hetero_images_per_s": 16.0,
        "efficiency": 0.97,
        "speedup": 1.45,
        "theoretical_speedup": 1.5,
        "raw": {f"{kind} alone": {"images_per_s": 5.5} for kind in kinds},
    }


def test_panels_name_emulation_and_units(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[Figure] = []
    save = speedup.save_figure
    monkeypatch.setattr(speedup, "save_figure", lambda figure, path: (drawn.append(figure), save(figure, path)))
    results = {
        **_case(True, ["fast", "fast", "slow"]),
        "real_work": _case(False, ["plain", "doubled"]),
    }
    plot_speedup(results, tmp_path / "deep" / "plot.png")
    assert (tmp_path / "deep" / "plot.png").read_bytes().startswith(b"\x89PNG")
    assert [p.name for p in (tmp_path / "deep").iterdir()] == ["plot.png"]
    emulated, real = drawn[0].axes
    assert "EMULATED devices" in emulated.get_title()
    assert "nothing emulated" in real.get_title()
    assert {axes.get_ylabel() for axes in (emulated, real)} == {"throughput (images/s)"}


def test_results_without_a_case_are_refused(tmp_path: Path) -> None:
    with pytest.raises(KeyError, match="no case"):
        plot_speedup({"overhead_equal_devices": 1.0}, tmp_path / "plot.png")
