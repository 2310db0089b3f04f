"""``lightning-hetero simulate``: one plan, sweeps, questions, files; and what it says when it cannot."""

import json
from dataclasses import replace

import pytest
from rich.console import Console

from lightning_hetero.cli import main
from lightning_hetero.cli.cluster_argument import devices_of
from lightning_hetero.cli.precision_notes import precision_notes
from lightning_hetero.cluster import Cluster, Device
from lightning_hetero.costs import ModelCosts, UnitTiming
from lightning_hetero.errors import HeteroError
from lightning_hetero.models.gpt import GPTConfig
from lightning_hetero.models.presets import PRESETS, Preset
from lightning_hetero.planner.pipeline import plan_pipeline
from lightning_hetero.planner.shard import plan_shard
from lightning_hetero.planner.training import Training
from tests import cli_runs
from tests.calibration_runs import MIB, cluster, costs

CLUSTER, COSTS = cluster(), costs()


@pytest.fixture
def files(tmp_path):
    CLUSTER.to_yaml(tmp_path / "cluster.yaml")
    COSTS.save(tmp_path / "costs.json")
    return tmp_path


def simulated(files, *more, batch=("--batch-per-rank", "4")) -> int:
    arguments = ["simulate", *batch, *more]
    if "--cluster" not in more:
        arguments += ["--cluster", str(files / "cluster.yaml")]
    if "--models" not in more and "--costs" not in more:
        arguments += ["--costs", str(files / "costs.json")]
    return main(arguments)


def read(path):
    return json.loads(path.read_text())


@pytest.mark.parametrize("make", [plan_shard, plan_pipeline])
def test_a_plan_with_its_trace_and_figures(files, capsys, make):
    plan = make(CLUSTER, COSTS, Training(40))
    plan.save(files / "plan.json")
    more = ["--plan", str(files / "plan.json"), "--trace", str(files / "t.json"), "--out", str(files / "o.json")]
    assert simulated(files, *more, batch=()) == 0
    shown = capsys.readouterr().out
    assert f"{plan.STRATEGY} of width-1000 on two-kinds (simulated, nothing was run)" in shown
    for text in ("exposed", "waiting", "peak memory", "no energy: watts of fast, slow are not known", "perfetto"):
        assert text in shown
    found = read(files / "o.json")
    assert found["points"][0]["step_s"] == pytest.approx(plan.predicted_step_s, rel=0.01)
    assert [rank["rank"] for rank in found["ranks"]] == list(range(8))
    assert "nothing was run" in found["label"]
    assert "nothing was run" in read(files / "t.json")["otherData"]["label"]


def test_weak_scaling_over_nodes_and_shardings(files, capsys):
    more = ["--nodes", "4,1,2", "--sharding", "FULL_SHARD,HYBRID_4,HYBRID_16,hetero_fsdp,hetero_pipe"]
    assert simulated(files, *more, "--plot", str(files / "s.png"), "--out", str(files / "o.json")) == 0
    points = read(files / "o.json")["points"]
    assert [(point["sharding"], point["nodes"]) for point in points][:3] == [("FULL_SHARD", n) for n in (1, 2, 4)]
    assert {point["global_batch_size"] / point["ranks"] for point in points} == {4}
    by_name = {(point["sharding"], point["nodes"]): point for point in points}
    assert by_name["HYBRID_16", 2]["problem"] == "HYBRID_16 does not divide 8 ranks: give a divisor of 8 as k"
    assert by_name["HYBRID_16", 4]["samples_per_s"] > 0
    assert by_name["hetero_fsdp", 2]["samples_per_s"] >= by_name["FULL_SHARD", 2]["samples_per_s"]
    shown = capsys.readouterr().out
    assert "HYBRID_16, 1 node: HYBRID_16 does not divide 4 ranks" in shown
    assert "plot written to" in shown
    assert (files / "s.png").read_bytes().startswith(b"\x89PNG")


def test_strong_scaling_keeps_the_batch(files):
    assert simulated(files, "--nodes", "1,2", "--out", str(files / "o.json"), batch=("--global-batch", "64")) == 0
    assert [point["global_batch_size"] for point in read(files / "o.json")["points"]] == [64, 64]


def test_what_one_more_node_brings_and_what_one_less_costs(files, capsys):
    more = ["--add", "4xfast", "--add", "2xA6000@4TFLOP/s", "--remove", "node-1", "--sharding", "hetero_fsdp"]
    large = ("--global-batch", "4000")
    assert simulated(files, *more, "--out", str(files / "o.json"), batch=large) == 0
    changes = read(files / "o.json")["changes"]
    assert [change["what"] for change in changes] == [
        "adding a node of 4 x fast",
        "adding a node of 2 x A6000",
        "removing node node-1",
    ]
    assert changes[0]["ratio"] > 1.3  # from 12 to 20 TFLOP/s
    assert changes[2]["ratio"] < 0.9
    assert changes[0]["before"]["ranks"] == 8
    shown = capsys.readouterr().out
    assert f"adding a node of 4 x fast: {changes[0]['before']['samples_per_s']:.0f} to " in shown
    assert f"costs {100 * (1 - changes[2]['ratio']):.1f} % of the throughput" in shown


def test_models_by_name_on_a_bundled_cluster(files, capsys, monkeypatch):
    for name, depth in (("tiny", 2), ("small", 3)):
        config = GPTConfig(vocabulary=50, context=16, width=16, depth=depth, heads=2)
        monkeypatch.setitem(PRESETS, name, Preset(name, config, 10_000, "this test"))
    more = ["--cluster", "frontier", "--models", "tiny,small", "--sequence", "8", "--nodes", "1,16"]
    more += ["--sharding", "FULL_SHARD", "--activation-checkpointing", "--even", "--out", str(files / "o.json")]
    assert simulated(files, *more) == 0
    points = read(files / "o.json")["points"]
    assert [(point["model"], point["ranks"]) for point in points] == [
        ("tiny", 8),
        ("tiny", 128),
        ("small", 8),
        ("small", 128),
    ]
    assert "seconds on MI250X-GCD were not measured" in capsys.readouterr().out


def test_a_step_that_does_not_fit_is_a_row_that_says_so(files, capsys):
    small = tuple(replace(device, memory_bytes=80 * MIB) for device in CLUSTER.devices)
    Cluster("tight", small, CLUSTER.within_node, CLUSTER.between_nodes).to_yaml(files / "cluster.yaml")
    more = ["--sharding", "NO_SHARD,hetero_fsdp", "--out", str(files / "o.json"), "--plot", str(files / "s.png")]
    assert simulated(files, *more) == 0
    points = read(files / "o.json")["points"]
    assert points[0]["fits"] is False
    assert "problem" in points[1]
    shown = capsys.readouterr().out
    assert "width-1000, NO_SHARD, 2 nodes: does not fit: " in shown
    assert "no plot: nothing that was asked about fits" in shown


def test_all_that_does_not_go_together_is_said_at_once(files, capsys):
    more = ["--sharding", "FULL,HYBRID_0", "--nodes", "1,2", "--trace", "t.json", "--models", "a", "--costs", "c"]
    message = cli_runs.failed(capsys, lambda: simulated(files, *more, batch=()))
    for text in (
        "both --costs and --models are given",
        "neither --global-batch nor --batch-per-rank is given",
        "--trace is of one step, this is 4",
        "--sharding 'FULL' is not known: give FULL_SHARD",
        "--sharding 'HYBRID_0' is not known",
    ):
        assert text in message
    more = ["--plan", "p.json", "--nodes", "1", "--add", "4xfast"]
    message = cli_runs.failed(capsys, lambda: simulated(files, *more))
    assert "leave out --nodes, --add, --batch-per-rank, or --plan" in message
    message = cli_runs.failed(capsys, lambda: simulated(files, "--add", "4 fast", "--add", "8xA100", "--remove", "x"))
    for text in ("'4 fast' is no node", "type 'A100' is neither in cluster", "A100-40GB", "has no node 'x'"):
        assert text in message


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        (["--cluster", "nowhere"], "no bundled cluster has this name"),
        (["--precision", "fp8"], "precision is 'fp8': give one of"),
        (["--optimizer", "lion"], "optimizer is 'lion': give one of"),
        (["--nodes", "1,a,-3,0"], "'a', '-3', '0' are no number of nodes: write whole numbers, 1 or more"),
        (
            ["--nodes", "1,262145"],
            "--nodes 262145 makes 1048580 ranks of cluster 'two-kinds': give so few that there are",
        ),
        (["--add", "4xL4@40"], "--add '4xL4@40': '40'"),
        (["--nodes", "1,2", "--remove", "node-0"], "--remove asks about one cluster, --nodes makes 2: give one number"),
        (["--nodes", "1", "--remove", "node-1"], "has no node 'node-1' to be removed"),
        (["--costs", "none.json"], "costs file none.json does not exist"),
        (["--costs", "none.json"], 'make one with "lightning-hetero profile"'),
        (["--models", "vit_2b"], "'vit_2b' is not known"),
        (["--calibration", "none.json"], "calibration file none.json does not exist"),
        (["--sharding", ","], "write names with commas"),
    ],
)
def test_bad_arguments(files, capsys, more, expected):
    assert expected in cli_runs.failed(capsys, lambda: simulated(files, *more))


def test_a_question_is_about_the_one_number_of_nodes(files, capsys):
    more = ["--nodes", "4", "--add", "4xfast", "--remove", "node-0", "--sharding", "FULL_SHARD"]
    assert simulated(files, *more, "--out", str(files / "o.json")) == 0
    data = read(files / "o.json")
    assert [point["ranks"] for point in data["points"]] == [16]
    assert [(change["before"]["ranks"], change["after"]["ranks"]) for change in data["changes"]] == [(16, 20), (16, 12)]
    assert [change["alone_ratio"] for change in data["changes"]] == pytest.approx([32 / 24, 16 / 24])
    assert "FULL_SHARD of width-1000 on two-kinds (simulated" in capsys.readouterr().out


def test_where_nothing_could_be_simulated_the_status_says_so(files, capsys):
    assert simulated(files, "--sharding", "HYBRID_3,HYBRID_5", "--nodes", "2,4") == 1
    shown = capsys.readouterr().out
    assert "HYBRID_3 does not divide 8 ranks" in shown
    assert "ideal" not in shown
    assert simulated(files, "--sharding", "HYBRID_3", "--nodes", "2,3") == 0


def test_what_does_not_fit_is_said_once_for_all_numbers_of_nodes(files, capsys):
    assert simulated(files, "--sharding", "NO_SHARD", "--nodes", "2,4", batch=("--batch-per-rank", "900000")) == 0
    shown = capsys.readouterr().out
    assert shown.count("are missing on rank 0") == 1
    assert "width-1000, NO_SHARD, 2, 4 nodes: does not fit: " in shown
    assert "every rank lacks memory" in shown


def test_a_mixed_cluster_is_held_against_its_devices_alone(files, capsys):
    more = ["--sharding", "FULL_SHARD", "--nodes", "1,2,3,4", "--out", str(files / "o.json")]
    assert simulated(files, *more) == 0
    points = read(files / "o.json")["points"]
    # The smallest has fast devices only, so what its ranks do is no measure of the others.
    assert [point["ideal_samples_per_s"] for point in points] == [None] * 4
    assert points[3]["alone_samples_per_s"] == pytest.approx(2 * points[1]["alone_samples_per_s"])
    assert all(0 < point["share_of_alone"] < 1 for point in points)
    assert simulated(files, "--sharding", "FULL_SHARD", "--nodes", "2,3,4", "--out", str(files / "o.json")) == 0
    others = read(files / "o.json")["points"]
    twice = 2 * others[0]["samples_per_s"]  # 2 and 4 nodes have as many fast devices as slow ones, 3 have not
    assert [point["ideal_samples_per_s"] for point in others] == [twice / 2, None, pytest.approx(twice)]
    shown = capsys.readouterr().out
    assert "of the devices alone, if none waited" in shown
    assert f"{100 * points[2]['share_of_alone']:.1f} %" in shown


def test_figures_are_not_cut_on_a_narrow_terminal(files, capsys, monkeypatch):
    monkeypatch.setattr("lightning_hetero.cli.simulate.console", lambda: Console(width=80, highlight=False))
    assert simulated(files, "--sharding", "FULL_SHARD", "--nodes", "1,2", "--out", str(files / "o.json")) == 0
    shown = capsys.readouterr().out
    assert "…" not in shown
    for point in read(files / "o.json")["points"]:
        assert f"{point['busy_share'] * 100:.1f} %" in shown
        assert f" {point['global_batch_size']} " in shown


def test_a_file_of_another_kind_is_named_with_all_else(files, capsys):
    plan_shard(CLUSTER, COSTS, Training(40)).save(files / "plan.json")
    paths = {name: str(files / f"{name}.json") for name in ("plan", "costs")}
    more = ["--plan", paths["costs"], "--costs", paths["plan"], "--calibration", paths["plan"], "--nodes", "2"]
    message = cli_runs.failed(capsys, lambda: simulated(files, *more, batch=()))
    for text in (
        f"--plan {paths['costs']} is not a plan file (it is a costs file): give the path of a plan file, or make one",
        f"--costs {paths['plan']} is not a costs file (it is a plan file)",
        f"--calibration {paths['plan']} is not a calibration file (it is a plan file)",
        "leave out --nodes, or --plan",
    ):
        assert text in message
    assert "unknown key" not in message


def test_what_a_precision_does_not_change_is_said():
    notes = precision_notes("bf16-true", [CLUSTER], [COSTS])
    assert len(notes) == 1
    assert "bf16-true changes bytes, and not the seconds on fast, slow: their speeds are taken as" in notes[0]
    kinds = {"T4": 30e12, "RTX-4090": 95e12}
    mixed = replace(CLUSTER, devices=tuple(Device(kind, "n", 4096 * MIB, speed) for kind, speed in kinds.items()))
    lacking = precision_notes("bf16-mixed", [mixed], [COSTS])[1:]
    assert len(lacking) == 1
    assert "T4 computes in no bfloat16 of its own (known peaks: fp32, fp16)" in lacking[0]
    assert len(precision_notes("16-true", [mixed], [COSTS])) == 1
    above = " ".join(precision_notes("32-true", [mixed], [COSTS]))
    assert "RTX-4090 has a peak of 82.6 TFLOP/s in float32, and 95 TFLOP/s here" in above
    timed = {kind: UnitTiming(0, 1e-3, 0, 2e-3) for kind in kinds}
    measured = ModelCosts("m", tuple(replace(unit, timings=timed) for unit in COSTS.units))
    assert precision_notes("bf16-true", [mixed], [measured]) == []


def test_a_plan_of_another_cluster_or_model_is_refused(files, capsys):
    plan_shard(CLUSTER, COSTS, Training(40)).save(files / "plan.json")
    costs(300).save(files / "other.json")
    more = ["--plan", str(files / "plan.json"), "--costs", str(files / "other.json")]
    assert "the costs are of width-300" in cli_runs.failed(capsys, lambda: simulated(files, *more, batch=()))
    cluster(nodes=1).to_yaml(files / "cluster.yaml")
    message = cli_runs.failed(capsys, lambda: simulated(files, "--plan", str(files / "plan.json"), batch=()))
    assert "8 ranks, cluster 'two-kinds' has 4: give the cluster that the plan is for (--cluster)" in message
    Cluster("turned", CLUSTER.devices[::-1]).to_yaml(files / "cluster.yaml")
    message = cli_runs.failed(capsys, lambda: simulated(files, "--plan", str(files / "plan.json"), batch=()))
    assert "its rank 0 is a fast, the cluster's a slow; so 8 of 8 ranks differ: give the cluster" in message
    assert message.count("ranks differ") == 1


def test_devices_on_a_command_line():
    assert len(devices_of("3xslow", "n", CLUSTER)) == 3
    assert devices_of("1xfast@2TFLOP/s", "n", CLUSTER) == [replace(CLUSTER.devices[0], node="n")]
    with pytest.raises(HeteroError, match=r"fast of cluster 'two-kinds' has .*FLOP/s, and plans take one speed for"):
        devices_of("1xfast@5TFLOP/s", "n", CLUSTER)
    with pytest.raises(HeteroError, match=r"fast of cluster 'c' has no speed, and plans take"):
        devices_of("1xfast@5TFLOP/s", "n", Cluster("c", (Device("fast", "a", 1 << 30, None),)))
    known = devices_of("2x NVIDIA L4@40 TFLOP/s", "n", CLUSTER)[0]
    assert (known.type, known.memory_bytes, known.node) == ("L4", 24 * 10**9, "n")
    with pytest.raises(HeteroError, match=r"the speed of L4 is not known: write what it reaches, such as 2xL4@100"):
        devices_of("2xL4", "n", CLUSTER)
    timed = {"L4": UnitTiming(0, 1e-3, 0, 2e-3)}
    measured = ModelCosts("m", tuple(replace(unit, timings=timed) for unit in COSTS.units))
    assert devices_of("2xL4", "n", CLUSTER, measured)[0].speed_flops_per_s is None


def test_help_lists_the_bundled_clusters(capsys):
    for command in ("plan", "simulate", "calibrate"):
        with pytest.raises(SystemExit):
            main([command, "--help"])
        assert "lab_3090_4090" in capsys.readouterr().out.replace("\n", " ")


def test_options_of_communication_and_the_engine_are_simulated(files):
    def step_s(*more) -> float:
        arguments = ["--sharding", "FULL_SHARD", "--global-batch", "16", *more, "--out", str(files / "o.json")]
        assert simulated(files, *arguments, batch=()) == 0
        return read(files / "o.json")["points"][0]["step_s"]

    ahead = step_s()
    assert step_s("--backward-prefetch", "NONE") > ahead
    assert step_s("--limit-all-gathers", "1") >= ahead
    assert step_s("--engine", "fsdp1") != ahead


def test_a_limit_that_is_none_is_refused(files, capsys):
    message = cli_runs.failed(capsys, lambda: simulated(files, "--limit-all-gathers", "many"))
    assert "limit_all_gathers is 'many': use True (2 in flight)" in message
