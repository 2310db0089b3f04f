"""Constants are found again in runs of a world that has them, and refused where runs cannot tell them."""

import json
from dataclasses import replace
from shutil import copytree

import pytest

from lightning_hetero.cli import main
from lightning_hetero.cluster import Cluster, Fabric, Link
from lightning_hetero.costs import ModelCosts
from lightning_hetero.errors import HeteroError
from lightning_hetero.plan import PipelinePlan, ShardPlan
from lightning_hetero.planner.pipeline import plan_pipeline
from lightning_hetero.planner.training import Training
from lightning_hetero.simulator.calibration import Calibration, DeviceConstants
from lightning_hetero.simulator.simulate import simulate
from tests import cli_runs
from tests.calibration_runs import GUESSED, WITHIN, World, cluster, costs, plan_of, write_run
from tests.report_runs import pipeline_plan
from tests.report_runs import write_run as write_any_run

LARGE, SMALL = costs(1000), costs(100)
RUNS = [(LARGE, "FULL_SHARD"), (LARGE, "HYBRID_4"), (SMALL, "FULL_SHARD"), (SMALL, "HYBRID_2"), (LARGE, "NO_SHARD")]


@pytest.fixture
def files(tmp_path):
    cluster().to_yaml(tmp_path / "cluster.yaml")
    LARGE.save(tmp_path / "large.json")
    SMALL.save(tmp_path / "small.json")
    return tmp_path


def calibrate(files, runs, *more, where="cluster.yaml", models=("large.json", "small.json")) -> int:
    arguments = ["calibrate", *map(str, runs), "--cluster", str(files / where)]
    for model in models:
        arguments += ["--costs", str(files / model)]
    return main([*arguments, "--out", str(files / "calibration.json"), *more])


def found(files) -> Calibration:
    return Calibration.load(files / "calibration.json")


def several(files, world, runs=RUNS, samples=2):
    return [
        write_run(files / f"run-{index}", world, cluster(), model, sharding, samples, seed=index)
        for index, (model, sharding) in enumerate(runs)
    ]


@pytest.mark.parametrize(("noise", "within"), [(0.0, 1e-3), (0.01, 0.05)])
def test_the_constants_of_a_world_are_found_again(files, capsys, noise, within):
    world = World(noise=noise)
    assert calibrate(files, several(files, world)) == 0
    calibration = found(files)
    for kind, scale in zip(("fast", "slow"), world.compute, strict=True):
        own = calibration.devices[kind]
        assert own.compute_scale == pytest.approx(scale, rel=within)
        assert own.fixed_s == pytest.approx(world.fixed_s, rel=within)
        assert own.optimizer_s_per_parameter == pytest.approx(world.optimizer_s_per_parameter, rel=within)
    for name, link in (("within_node", world.within), ("between_nodes", world.between)):
        assert calibration.links[name].bandwidth_bytes_per_s == pytest.approx(link.bandwidth_bytes_per_s, rel=within)
        assert calibration.links[name].latency_s == pytest.approx(link.latency_s, rel=within)
    assert len(calibration.runs) == len(RUNS)
    for run in calibration.runs:
        assert abs(run.error) < max(within, 1e-3)
        assert abs(run.uncalibrated_step_s / run.measured_step_s - 1) > 0.3
    shown = capsys.readouterr().out
    for text in ("compute_scale", "bandwidth, latency", "exposed communication of 5 runs", "mean error", "other runs"):
        assert text in shown


def test_one_stalled_step_changes_nothing(files):
    """A mean over three compared steps would be four times too long."""
    world = World()
    runs = [
        write_run(files / f"run-{index}", world, cluster(), model, sharding, 2, seed=index, stalled=3)
        for index, (model, sharding) in enumerate(RUNS)
    ]
    assert calibrate(files, runs) == 0
    calibration = found(files)
    for kind, scale in zip(("fast", "slow"), world.compute, strict=True):
        own = calibration.devices[kind]
        assert own.compute_scale == pytest.approx(scale, rel=1e-3)
        assert own.fixed_s == pytest.approx(world.fixed_s, rel=1e-3)
        assert own.optimizer_s_per_parameter == pytest.approx(world.optimizer_s_per_parameter, rel=1e-3)
    for name, link in (("within_node", world.within), ("between_nodes", world.between)):
        assert calibration.links[name].bandwidth_bytes_per_s == pytest.approx(link.bandwidth_bytes_per_s, rel=1e-3)
    assert max(abs(run.error) for run in calibration.runs) < 1e-3


def test_they_explain_a_run_that_they_were_not_fitted_to(files):
    """Another model on four nodes, with groups of another size."""
    world = World()
    calibrate(files, several(files, world))
    where, model = cluster(nodes=4), costs(1600, blocks=3)
    plan, training = plan_of(where, model, "HYBRID_8", 3), Training(3 * where.world_size)
    truth = world.constants()
    steps = [
        simulate(plan, *each.applied(where, model), training, constants=each.devices) for each in (truth, found(files))
    ]
    assert steps[1].step_s == pytest.approx(steps[0].step_s, rel=5e-3)


def test_one_message_size_tells_one_constant_of_a_link(files):
    """Latency, with the bandwidth as given; or the bandwidth where no latency explains the runs as well."""
    one_node = cluster(nodes=1)
    run = write_run(files / "run", World(), one_node, SMALL, "FULL_SHARD", 2)
    again = write_run(files / "again", World(), one_node, SMALL, "FULL_SHARD", 1)
    for runs, count in (([run], "1 run"), ([run, again], "2 runs")):
        assert calibrate(files, runs) == 0
        calibration = found(files)
        assert calibration.links["within_node"].bandwidth_bytes_per_s == pytest.approx(GUESSED.bandwidth_bytes_per_s)
        assert calibration.links["within_node"].latency_s > World().within.latency_s  # it stands for both
        assert max(abs(each.error) for each in calibration.runs) < 0.01
        assert min(abs(each.uncalibrated_step_s / each.measured_step_s - 1) for each in calibration.runs) > 0.1
        assert (
            "only its latency, with bandwidth as the cluster file gives it (10 GB/s)"
            in (calibration.sources["links.within_node"])
        )
        refused = " ".join(calibration.refused)
        for text in (
            f"links.within_node.bandwidth: bandwidth and latency cannot be told apart by {count}",
            "a run with shard groups of another size, or of a model whose blocks have another size, would tell",
            "discover measures both",
            "a fixed part of the optimizer's step cannot be told",
        ):
            assert text in refused
    # groups of another size send parts of another size
    halves = write_run(files / "halves", World(), one_node, SMALL, "HYBRID_2", 2)
    assert calibrate(files, [run, halves]) == 0
    assert found(files).links["within_node"].latency_s == pytest.approx(World().within.latency_s, rel=1e-2)


def test_a_bandwidth_is_fitted_where_the_given_one_is_too_slow_for_any_latency(files):
    one_node = cluster(nodes=1, link=Link(1e8, 1e-5))
    one_node.to_yaml(files / "slow.yaml")
    run = write_run(files / "run", World(), one_node, LARGE, "FULL_SHARD", 2)
    assert calibrate(files, [run], where="slow.yaml") == 0
    calibration = found(files)
    assert calibration.links["within_node"].latency_s == pytest.approx(1e-5)
    assert calibration.links["within_node"].bandwidth_bytes_per_s == pytest.approx(4e9, rel=0.2)
    assert abs(calibration.runs[0].error) < 0.01
    assert any(text.startswith("links.within_node.latency: ") for text in calibration.refused)


def test_of_two_links_that_are_always_used_together_the_one_between_nodes_is_fitted(files):
    assert calibrate(files, several(files, World(), [(LARGE, "FULL_SHARD")])) == 0
    calibration = found(files)
    assert list(calibration.links) == ["between_nodes"]
    assert abs(calibration.runs[0].error) < 0.01
    assert any(text.startswith("links.between_nodes.bandwidth: ") for text in calibration.refused)
    assert any(text.startswith("links.within_node: ") for text in calibration.refused)


def test_groups_of_two_sizes_on_two_nodes_tell_something_of_each_link(files):
    """Two message sizes and four constants: a group of all four ranks, and one in each node."""
    where = cluster(nodes=2, per_node=2)
    where.to_yaml(files / "four.yaml")
    world, model = World(within=Link(10e9, 6e-3), between=Link(10e9, 9e-3), noise=0.02), costs(100, blocks=1)
    model.save(files / "model.json")
    runs = [
        write_run(files / f"{sharding}-{samples}", world, where, model, sharding, samples, seed=samples)
        for sharding in ("FULL_SHARD", "HYBRID_2")
        for samples in (4, 8)
    ]
    assert calibrate(files, runs, where="four.yaml", models=["model.json"]) == 0
    calibration = found(files)
    assert set(calibration.links) == {"within_node", "between_nodes"}
    assert calibration.mean_error < 0.05
    assert min(abs(each.uncalibrated_step_s / each.measured_step_s - 1) for each in calibration.runs) > 0.5


def test_hidden_communication_says_nothing_of_links(files):
    fast = World(within=Link(1e12, 1e-8), between=Link(1e12, 1e-8))
    runs = [(LARGE, "FULL_SHARD"), (SMALL, "FULL_SHARD")]
    assert calibrate(files, several(files, fast, runs, samples=4000)) == 0
    calibration = found(files)
    assert calibration.links == {}
    assert sum("links." in text for text in calibration.refused) == 2
    assert calibration.devices["fast"].compute_scale == pytest.approx(1.2, rel=1e-3)


def test_watts_come_apart_where_ranks_wait_differently(files):
    runs = [
        write_run(files / f"run-{samples}", World(), cluster(), LARGE, "FULL_SHARD", samples) for samples in (1, 60)
    ]
    calibrate(files, runs)
    own = found(files).devices["slow"]
    assert own.busy_power_w == pytest.approx(300, rel=1e-3)
    assert own.idle_power_w == pytest.approx(80, rel=1e-3)


def test_pipelines_tell_of_devices_and_not_of_links(files):
    where = cluster(nodes=2, per_node=1)
    where.to_yaml(files / "pair.yaml")
    training = Training(8)
    plan = plan_pipeline(where, LARGE, training)
    assert isinstance(plan, PipelinePlan)
    step = simulate(plan, where, LARGE, training)
    each = {"compute_s": 0.0, "optimizer_s": 1e-3, "input_s": 0.0, "rest_s": 2e-3, "blocked_s": 0.0, "messages_s": 0.0}
    lines = {
        rank: [
            (
                "step",
                {"step": index, "samples": 8.0, **each, "compute_s": 1.5 * own.busy_s, "step_s": 1.5 * step.step_s},
            )
            for index in range(1, 5)
        ]
        for rank, own in enumerate(step.ranks)
    }
    write_any_run(files / "pipe", plan=plan, strategy="hetero_pipe", steps=0, samples=(8.0, 8.0), extra=lines)
    assert calibrate(files, [files / "pipe"], where="pair.yaml") == 0
    calibration = found(files)
    assert [own.compute_scale for own in calibration.devices.values()] == pytest.approx([1.5, 1.5])
    assert calibration.links == {}
    assert "no run says how much communication is exposed" in calibration.refused[-1]
    assert calibration.runs[0].predicted_step_s == pytest.approx(1.5 * step.step_s + 3e-3, rel=0.2)


def test_every_run_that_cannot_be_used_is_named(files, capsys):
    good = write_run(files / "good", World(), cluster(), LARGE, "FULL_SHARD", 2)
    other = write_run(files / "other", World(), cluster(), costs(500), "FULL_SHARD", 2)
    few = write_run(files / "few", World(), cluster(nodes=3), LARGE, "FULL_SHARD", 2)
    write_any_run(files / "ddp", strategy="ddp")
    write_any_run(files / "pipe", plan=pipeline_plan(), strategy="hetero_pipe")
    batches = {index: {"batches": 2} for index in range(1, 5)}
    write_any_run(files / "twice", plan=pipeline_plan(), strategy="hetero_pipe", each=batches)
    assert calibrate(files, [good, few]) == 0  # three nodes of the same pattern
    capsys.readouterr()
    (files / "calibration.json").unlink()
    runs = [good, other, files / "ddp", files / "pipe", files / "twice"]
    message = cli_runs.failed(capsys, lambda: calibrate(files, runs))
    for text in (
        "other: its model has",
        "ddp: ddp made no plan: give a run of hetero_fsdp or hetero_pipe",
        "pipe: it ran on 1 x fast, 1 x slow, and no given cluster has these in this order",
        "twice: its steps are several batches",
    ):
        assert text in message, message
    assert not (files / "calibration.json").exists()


def test_emulated_devices_and_real_ones_are_not_mixed(files, capsys):
    rehearsed = replace(cluster(), emulate=True)
    rehearsed.to_yaml(files / "emulated.yaml")
    run = write_run(files / "run", World(), cluster(), LARGE, "FULL_SHARD", 2)
    message = cli_runs.failed(capsys, lambda: calibrate(files, [run], where="emulated.yaml"))
    assert "its devices are real, those of cluster 'two-kinds' emulated" in message
    calibration = Calibration({"fast": DeviceConstants()})
    with pytest.raises(HeteroError, match="the calibration is of real devices, cluster 'two-kinds' has emulated ones"):
        calibration.applied(rehearsed, LARGE)


def test_a_file_reads_back_and_all_faults_are_listed(files):
    made = World().constants()
    made = replace(made, sources={"links.within_node": "a test"}, refused=("links.between_nodes: a reason",))
    made.save(files / "c.json")
    assert Calibration.load(files / "c.json") == made
    broken = {
        "schema": 2,
        "devices": {"fast": {"compute_scale": 0, "speed": 3}},
        "links": {"wan": {"bandwidth_bytes_per_s": 1.0, "latency_s": 0.0}, "within_node": {"latency_s": -1}},
        "runs": [{"run": "a"}],
    }
    with pytest.raises(HeteroError) as raised:
        Calibration.from_dict(broken)
    for text in ("schema: is 2", "compute_scale: is 0", "unknown key 'speed'", "links.wan: is no link", "latency_s"):
        assert text in str(raised.value)


def test_a_scale_is_of_what_it_was_fitted_to():
    calibration = World().constants()
    faster = replace(cluster(), devices=tuple(replace(d, speed_flops_per_s=9e12) for d in cluster().devices))
    with pytest.raises(HeteroError, match=r"compute_scale of fast was fitted to FLOPs over 2 TFLOP/s.*9 TFLOP/s"):
        calibration.applied(faster, LARGE)
    applied, scaled = calibration.applied(cluster(), LARGE)
    assert applied.between_nodes == World().between
    assert scaled.units[1].timings["fast"].forward_per_sample_s == pytest.approx(1.2 * 2e2 * 12e6 / 2e12)
    assert calibration.missing(Cluster("c", (*cluster().devices, replace(cluster().devices[0], type="new")))) == (
        "new",
    )


def test_plan_and_simulate_take_the_file(files, capsys):
    calibrate(files, several(files, World()))
    common = ["--cluster", str(files / "cluster.yaml"), "--costs", str(files / "large.json")]
    common += ["--calibration", str(files / "calibration.json")]
    assert (
        main(["plan", *common, "--global-batch", "16", "--strategy", "hetero_fsdp", "--out", str(files / "p.json")])
        == 0
    )
    assert main(["simulate", *common, "--global-batch", "16", "--sharding", "FULL_SHARD"]) == 0
    shown = capsys.readouterr().out
    assert "calibrate with measured runs" not in shown  # the optimizer's seconds are known
    assert isinstance(ModelCosts.load(files / "large.json"), ModelCosts)


def test_simulate_and_plan_say_what_they_are_calibrated_with(files, capsys):
    World().constants().save(files / "no-runs.json")
    calibrate(files, several(files, World(), RUNS[:1]))
    capsys.readouterr()
    file = str(files / "calibration.json")
    common = ["--cluster", str(files / "cluster.yaml"), "--costs", str(files / "large.json"), "--global-batch", "16"]
    simulate_it = ["simulate", *common, "--sharding", "FULL_SHARD", "--out", str(files / "s.json")]
    assert main([*simulate_it, "--calibration", file]) == 0
    shown = capsys.readouterr().out
    for text in (
        f"calibrated with {file}: mean error 0.0 % over the 1 run that it was fitted to",
        "not told by them: devices.fast.optimizer_s_per_parameter",
        "seconds are FLOPs over the device's speed, scaled as they were measured: fast 1.2, slow 0.9",
    ):
        assert text in shown
    assert "were not measured" not in shown
    written = json.loads((files / "s.json").read_text())
    assert (written["emulated"], written["calibration"]["file"], written["calibration"]["runs"]) == (False, file, 1)
    assert "links.within_node" in written["calibration"]["refused"]
    assert main([*simulate_it, "--calibration", str(files / "no-runs.json")]) == 0
    assert "no-runs.json: no run's error is known" in capsys.readouterr().out
    assert main(simulate_it) == 0
    assert "were not measured: they are FLOPs over the device's speed" in capsys.readouterr().out
    assert json.loads((files / "s.json").read_text())["calibration"] is None
    plan_it = ["plan", *common, "--strategy", "hetero_fsdp", "--calibration", file, "--out", str(files / "p.json")]
    assert main(plan_it) == 0
    shown = capsys.readouterr().out
    assert f"calibrated with {file}: mean error 0.0 %" in shown
    assert "were not measured" not in shown
    assert any(text.startswith(f"calibrated with {file}") for text in ShardPlan.load(files / "p.json").reasons)


@pytest.mark.parametrize("columns", [80, 180])
def test_tables_are_no_wider_than_the_terminal(files, capsys, monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    assert calibrate(files, several(files, World(), [(SMALL, "FULL_SHARD")])) == 0
    drawn = [line for line in capsys.readouterr().out.splitlines() if line[:1] in "┏┃┡│└"]
    assert drawn
    assert max(map(len, drawn)) <= min(columns, 100)
    for text in ("optimizer_s_per_parameter", "bandwidth, latency", "compute_scale"):
        assert any(text in line for line in drawn)


def test_runs_that_constants_do_not_explain_are_warned_of_first(files, capsys):
    """The steps are those of links a hundred times as slow in one run as in another of the same layout."""
    world, slow = World(), World(between=Link(1e7, 1e-2))
    runs = [
        write_run(files / f"run-{index}", each, cluster(), SMALL, "FULL_SHARD", 2)
        for index, each in enumerate([world, slow])
    ]
    assert calibrate(files, runs) == 0
    shown = capsys.readouterr().out
    calibration = found(files)
    assert calibration.mean_error > 0.2
    assert shown.splitlines()[0].startswith(
        f"mind: mean error {100 * calibration.mean_error:.0f} %: these constants do"
    )
    assert "communication misses most" in shown.splitlines()[0]
    assert f"MIND: {calibration.warning}" in shown
    written = json.loads((files / "calibration.json").read_text())
    assert (written["warning"], written["mean_error"]) == (calibration.warning, calibration.mean_error)
    assert Calibration.load(files / "calibration.json") == calibration


def test_short_runs_and_repeated_ones_are_refused(files, capsys):
    short = write_run(files / "short", World(), cluster(), LARGE, "FULL_SHARD", 2, steps=3)
    good = write_run(files / "good", World(), cluster(), LARGE, "FULL_SHARD", 4)
    copied = copytree(good, files / "copied")
    message = cli_runs.failed(capsys, lambda: calibrate(files, [good, short, good, copied]))
    for text in (
        "short: it has 2 steps that can be compared",
        f"{good}: run 3 of the command is run 1 once more ({good})",
        f"{copied}: run 4 of the command is run 1 once more ({good})",
    ):
        assert text in message, message


def test_an_optimizer_that_takes_no_longer_with_more_parameters_is_no_constant_of_zero(files):
    """Noise turned the line over: a larger part took less time."""
    runs = [
        write_run(files / sharding, World(optimizer_s_per_parameter=each), cluster(), LARGE, sharding, 2)
        for sharding, each in (("FULL_SHARD", 4e-9), ("NO_SHARD", 2e-10))
    ]
    assert calibrate(files, runs) == 0
    calibration = found(files)
    for kind in ("fast", "slow"):
        place = f"devices.{kind}.optimizer_s_per_parameter"
        assert calibration.devices[kind].optimizer_s_per_parameter == 0
        assert place not in calibration.sources
        assert any(text.startswith(f"{place}: could not be told") for text in calibration.refused)
        assert calibration.devices[kind].fixed_s > World().fixed_s


def test_network_cards_and_pairs_stay_what_they_are(files):
    pair, cards = Link(8e9, 20e-6), Fabric(2e9, 100e-6, nics=2, half_bandwidth_nodes=64)
    where = replace(cluster(), within_pair=pair, between_nodes=cards)
    where.to_yaml(files / "cards.yaml")
    real = Fabric(1e9, 150e-6, nics=2, half_bandwidth_nodes=64)
    truth = replace(World().constants(), links={"within_pair": pair, "within_node": WITHIN, "between_nodes": real})
    runs = [(LARGE, "FULL_SHARD"), (LARGE, "HYBRID_4"), (SMALL, "FULL_SHARD"), (SMALL, "HYBRID_4")]
    paths = [
        write_run(files / f"run-{index}", World(), where, model, sharding, 2, truth=truth)
        for index, (model, sharding) in enumerate(runs)
    ]
    assert calibrate(files, paths, where="cards.yaml") == 0
    links = found(files).links
    assert (links["between_nodes"].nics, links["between_nodes"].half_bandwidth_nodes) == (2, 64)
    assert links["between_nodes"].bandwidth_bytes_per_s == pytest.approx(1e9, rel=0.01)
    assert links["within_node"].bandwidth_bytes_per_s == pytest.approx(WITHIN.bandwidth_bytes_per_s, rel=0.01)
    assert "within_pair" not in links  # no group was a pair
