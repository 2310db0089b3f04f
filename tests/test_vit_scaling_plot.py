"""The scaling figure says what it shows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure

from lightning_hetero.report import vit_scaling
from lightning_hetero.report.vit_scaling import plot_scaling


def row(arm: str, **changes: Any) -> dict[str, Any]:
    return {
        "arm": arm,
        "model": "vit_base",
        "sharding": arm,
        "emulated": False,
        "accelerator": "cpu",
        "precision": "32-true",
        "local_batch": 4,
        "cluster": "two kinds",
        "compiled": False,
        "backward_prefetch": "NONE",
        "limit_all_gathers": True,
        "ranks": 2,
        "outcome": "ok",
        "images_per_s": 8.0,
        "median_step_s": 1.0,
        "tflops_per_device": 0.03,
        "peak_bytes": [2**20, 2**21],
        "predicted_peak_bytes": 2**21,
        "efficiency": 0.9,
    } | changes


FAILED = row("ddp", outcome="out of memory", emulated=True)
PARTS = {"compute_s": 0.5, "communication_s": -0.1, "input_s": 0.6, "step_s": 1.0, "limited_by": "input"}
RESULTS = {
    "environment": {"cpu": "a processor", "cores": 2},
    "models": {"vit_base": {"scaled_down": True, "width_divisor": 8, "depth_divisor": 4}},
    "topics": {
        "sharding": {"rows": [row("FULL_SHARD"), row("DDP")]},
        "options": {"rows": [row("a"), row("b", limit_all_gathers=False)]},
        "weak_scaling": {"rows": [row("1 rank", ranks=1), row("FULL_SHARD"), row("DDP", emulated=True)]},
        "limits": {"rows": [row("synthetic data"), row("image files"), row("no communication")], "parts": PARTS},
        "mixed": {"rows": [row("hetero_fsdp", emulated=True), row("fsdp2", emulated=True)]},
        "little_memory": {"rows": [row("hetero_fsdp", emulated=True), FAILED]},
        "gpt": {"rows": [row("hetero_fsdp, FULL_SHARD"), row("hetero_pipe")]},
        "one_gpu": {"rows": [row("eager", accelerator="cuda", ranks=1)]},
    },
}


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    figures: list[Figure] = []
    save = vit_scaling.save_figure
    monkeypatch.setattr(vit_scaling, "save_figure", lambda figure, path: (figures.append(figure), save(figure, path)))
    return figures


def texts(axes: Any) -> str:
    legend = axes.get_legend()
    labels = [] if legend is None else [text.get_text() for text in legend.get_texts()]
    return " | ".join([axes.get_title(), *(text.get_text() for text in axes.texts), *labels])


def test_every_topic_is_drawn_and_named(tmp_path: Path, drawn: list[Figure]) -> None:
    plot_scaling(RESULTS, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
    panels = [axes for axes in drawn[0].axes if axes.get_visible()]
    assert len(panels) == 10
    for axes in panels:
        assert "(" in axes.get_ylabel() or "per device" in axes.get_ylabel() or axes.get_ylabel() == "TFLOP/s"
    assert "SCALED DOWN" in drawn[0].get_suptitle()
    found = [texts(axes) for axes in panels]
    emulated = [text for text in found if "two kinds" in text]
    assert len(emulated) == 2
    assert all("EMULATED devices" in text for text in emulated)
    assert "out of memory" in emulated[1]
    assert any({"DDP", "EMULATED", "ideal"} <= set(text.split(" | ")) for text in found)
    assert any("input 0.600 s" in text for text in found)


def test_results_without_topics_are_refused(tmp_path: Path) -> None:
    with pytest.raises(KeyError, match="no topic"):
        plot_scaling({"topics": {}}, tmp_path / "plot.png")
