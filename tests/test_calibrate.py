"""Constants are found again in runs of a world that has them, and refused where runs cannot tell them."""

import json
from dataclasses import replace
from shutil import copytree

import pytest

from lightning_hetero.cli import main
from lightning_hetero.cluster import Cluster, Link
from lightning_hetero.costs import ModelCosts
from lightning_hetero.errors import HeteroError
from lightning_hetero.plan import PipelinePlan, ShardPlan
from lightning_hetero.planner.pipeline import plan_pipeline
from lightning_hetero.planner.training import Training
from lightning_hetero.simulator.calibration import Calibration, DeviceConstants
from lightning_hetero.simulator.simulate import simulate
from tests import cli_runs
from tests.calibration_runs import (
    LARGE,
    RUNS,
    SMALL,
    World,
    calibrate,
    cluster,
    costs,
    found,
    plan_of,
    several,
    write_files,
    write_run,
)
from tests.report_runs import pipeline_plan
from tests.report_runs import write_run as write_any_run


@pytest.fixture
def files(tmp_path):
    return write_files(tmp_path)


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
