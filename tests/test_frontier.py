"""The Frontier benchmark keeps its promises on the committed constants."""

import json
from dataclasses import asdict, fields

import numpy as np
import pytest

from benchmarks.frontier import __main__ as command
from benchmarks.frontier import machine
from benchmarks.frontier.fit import FIELDS, Case, fit, minimise
from benchmarks.frontier.predict import MODES, predict, simulate
from benchmarks.frontier.tables import Throughput, models, weak_scaling
from benchmarks.frontier.vit import model_costs
from lightning_hetero.simulator.execution import Execution
from lightning_hetero.simulator.topology import Topology

PUBLISHED = ["vit_base", "vit_1b", "vit_3b", "vit_5b"]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    path = tmp_path_factory.mktemp("frontier") / "all.json"
    assert command.main(["--out", str(path)]) == 0
    return json.loads(path.read_text())


def test_throughput_is_within_the_limits_and_closer_than_a_ruler(results):
    ours, ruler = (results["summary"]["throughput"][name] for name in ("ours", "ruler"))
    assert ours["rows"] == ruler["rows"] == 125
    assert ours["mean"] <= 0.06
    assert ours["by_sharding"]["FULL_SHARD"] <= 0.12
    assert ours["by_sharding"]["SHARD_GRAD_OP"] <= 0.10
    # what a straight line reaches, with four constants of its own
    assert ruler["mean"] == pytest.approx(0.083, abs=5e-4)
    assert ruler["by_sharding"]["FULL_SHARD"] == pytest.approx(0.196, abs=5e-4)
    assert ruler["by_sharding"]["SHARD_GRAD_OP"] == pytest.approx(0.120, abs=5e-4)


def test_the_mode_predicted_best_is_close_to_the_best(results):
    choice = results["summary"]["choice"]
    assert len(choice["runs"]) == 4 * 5  # four models on 8 to 128 nodes
    assert choice["mean_loss"] <= 0.01
    assert choice["worst_loss"] <= 0.05


def test_memory_is_within_a_tenth_in_every_row(results):
    memory = results["summary"]["memory"]
    assert memory["rows"] == 23
    assert abs(memory["worst"]) <= 0.10


def test_the_order_of_prefetch_modes_follows_from_the_events(results):
    full = {
        row["backward_prefetch"]: row["images_per_s"] for row in results["options"] if row["sharding"] == "FULL_SHARD"
    }
    assert full["BACKWARD_PRE"] > full["BACKWARD_POST"] > full["NONE"]
    # no constant makes it so: without any cost of overlap, and with links ten times as quick, it stays
    free = machine.Constants(**asdict(machine.FITTED) | {"contention_bytes_per_s": 1e30, "hop_s": 4e-6})
    order = [
        predict("vit_5b", "FULL_SHARD", 8, free, Execution(engine="fsdp1", backward_prefetch=when)).images_per_s
        for when in ("BACKWARD_PRE", "BACKWARD_POST", "NONE")
    ]
    assert order[0] > order[1] > order[2]


def test_no_more_than_eight_constants():
    names = {field.name for field in fields(machine.Constants)}
    assert len(names) <= 8  # fitted or not
    assert set(FIELDS) < names


def test_every_model_mode_and_number_of_nodes_has_a_row(results):
    rows = {(row["model"], row["sharding"], row["nodes"]): row for row in results["rows"]}
    for model in models():
        for mode in MODES:
            for nodes in (1, 2, 4, 8, 16, 32, 64, 128):
                if (mode, nodes) != ("HYBRID_16", 1):
                    row = rows.pop((model, mode, nodes))
                    assert row["peak_memory_gb"] > 0
                    assert row["images_per_s"] > 0
    assert not rows


def test_what_fits_is_what_the_study_says(results):
    fewest = {"vit_base": 1, "vit_huge": 1, "vit_1b": 1, "vit_3b": 1, "vit_5b": 2, "vit_15b": 4}
    for row in results["rows"]:
        if row["sharding"].startswith("HYBRID"):
            assert row["fits"] == (int(row["sharding"][7:]) >= fewest[row["model"]])


def test_a_step_of_1024_gcds_is_as_quick_as_one_of_16(results):
    tasks = {len(simulate("vit_5b", "HYBRID_8", nodes, machine.FITTED).timeline.names) for nodes in (2, 128)}
    assert len(tasks) == 1
    assert results["simulated_s"] < 120  # 378 runs


@pytest.mark.parametrize("name", list(models()))
def test_parameters_are_the_published_ones(name):
    published = {"vit_base": 87, "vit_huge": 635, "vit_1b": 914, "vit_3b": 3067, "vit_5b": 5349, "vit_15b": 14720}
    assert model_costs(models()[name]).parameters / 1e6 == pytest.approx(published[name], abs=0.6)


@pytest.mark.slow
@pytest.mark.parametrize("name", list(models()))
def test_costs_by_hand_are_those_that_the_package_counts(name):
    import torch

    from lightning_hetero.models.presets import build_preset
    from lightning_hetero.profiler.analytic import analytic_costs

    by_hand = model_costs(models()[name])
    model = build_preset(name, device="meta", depth=2)
    counted = analytic_costs(model, [torch.empty(1, 3, 224, 224, device="meta")])
    blocks = [unit for unit in counted.units if unit.is_block]
    assert [unit.parameters for unit in blocks] == [unit.parameters for unit in by_hand.units[1:3]]
    for mine, theirs in zip(by_hand.units[1:3], blocks, strict=True):
        assert mine.forward_flops == pytest.approx(theirs.forward_flops, rel=0.01)


@pytest.mark.parametrize("sharding", ["NO_SHARD", "HYBRID_1", "HYBRID_2", "HYBRID_16", "FULL_SHARD", "SHARD_GRAD_OP"])
@pytest.mark.parametrize("model", ["vit_base", "vit_5b"])
def test_what_is_fitted_is_what_is_simulated(model, sharding):
    for nodes in (2, 64):
        topology = Topology(machine.cluster(nodes, machine.FITTED))
        case = Case(Throughput(model, sharding, nodes, 1.0), topology)
        expected = simulate(model, sharding, nodes, machine.FITTED).step_s
        assert case.step_s(machine.FITTED, topology) == pytest.approx(expected, rel=1e-9)


@pytest.mark.slow
def test_the_constants_are_found_again():
    found = asdict(fit())
    for name, value in asdict(machine.FITTED).items():
        assert found[name] == pytest.approx(value, rel=0.02), name


def test_the_simplex_finds_a_minimum():
    point, error = minimise(lambda x: (x[0] - 3) ** 2 + 10 * (x[1] + 1) ** 4, np.zeros(2), 0.5, 200)
    assert point == pytest.approx([3, -1], abs=0.02)
    assert error < 1e-4


def test_some_models_alone(tmp_path, capsys):
    path = tmp_path / "part.json"
    arguments = ["--models", "vit_huge", "--sharding", "FULL_SHARD", "--nodes", "1", "2"]
    assert command.main([*arguments, "--out", str(path), "--plot", str(tmp_path / "part.png")]) == 0
    part = json.loads(path.read_text())
    assert [(row["model"], row["sharding"], row["nodes"]) for row in part["rows"]] == [
        ("vit_huge", "FULL_SHARD", 1),
        ("vit_huge", "FULL_SHARD", 2),
    ]
    assert part["options"] == []
    assert (tmp_path / "part.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(SystemExit):
        command.main(["--nodes", "0"])
    assert "argument --nodes: 0" in capsys.readouterr().err


def test_the_figure_shows_predictions_and_what_was_published(results, tmp_path, monkeypatch):
    from lightning_hetero.report import frontier

    drawn = []
    monkeypatch.setattr(frontier, "save_figure", lambda figure, path: drawn.append(figure))
    frontier.plot_frontier(results, tmp_path / "x.png")
    panels = {axes.get_title(): axes for axes in drawn[0].axes}
    assert list(panels)[:6] == list(models())
    known = [row for row in weak_scaling() if row.model == "vit_5b"]
    marks = [line for line in panels["vit_5b"].lines if line.get_marker() == "o"]
    assert sum(len(line.get_xdata()) for line in marks) == len(known)
    assert len(panels["memory by sharding mode and nodes"].patches) == 23
    with pytest.raises(KeyError, match="no rows"):
        frontier.plot_frontier({"rows": [], "options": []}, tmp_path / "y.png")
