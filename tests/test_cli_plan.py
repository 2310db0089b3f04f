"""``lightning-hetero plan``: the plan it writes, what it shows, and what it says when it cannot."""

from dataclasses import replace

import pytest

from lightning_hetero.cli import main
from lightning_hetero.cli.plan import plan_with
from lightning_hetero.cluster import Cluster, Device, Link
from lightning_hetero.costs import ModelCosts, TimingPoint, UnitCost, UnitTiming
from lightning_hetero.models.gpt import GPTConfig
from lightning_hetero.models.presets import PRESETS, Preset
from lightning_hetero.plan import PipelinePlan, ShardPlan
from lightning_hetero.planner.even import even_pipeline_plan, even_shard_plan
from lightning_hetero.planner.training import Training
from tests import cli_runs

MIB = 2**20
LINK = Link(1e11, 1e-6)
CLUSTER = Cluster(
    "mixed",
    tuple(Device(kind, "n", 100 * MIB, speed) for kind, speed in (("fast", 2e12), ("fast", 2e12), ("slow", 1e12))),
    LINK,
    LINK,
)
TIMES = {"fast": UnitTiming(0, 1e-3, 0, 2e-3), "slow": UnitTiming(0, 2e-3, 0, 4e-3)}
COSTS = ModelCosts(
    "toy",
    tuple(UnitCost(f"blocks.{i}", 100_000, 2e9, 4e9, 50_000, 10_000, TIMES, is_block=0 < i < 7) for i in range(8)),
    devices={"fast": "Fast One", "slow": "Slow One"},
)
TRAINING = Training(20)


@pytest.fixture
def files(tmp_path):
    """Paths of a cluster file and a costs file, and of a plan file to be written."""
    CLUSTER.to_yaml(tmp_path / "cluster.yaml")
    COSTS.save(tmp_path / "costs.json")
    return tmp_path


def run(files, *more, batch="20"):
    arguments = ["plan", "--cluster", str(files / "cluster.yaml"), "--global-batch", batch]
    if "--model" not in more:
        arguments += ["--costs", str(files / "costs.json")]
    return main([*arguments, "--out", str(files / "plan.json"), *more])


def failed(files, capsys, *more, batch="20") -> str:
    message = cli_runs.failed(capsys, lambda: run(files, *more, batch=batch))
    assert not (files / "plan.json").exists()
    return message


def test_a_shard_plan_against_the_even_one(files, capsys):
    assert run(files, "--strategy", "hetero_fsdp") == 0
    plan = ShardPlan.load(files / "plan.json")
    plan.validate(CLUSTER)
    assert sorted(plan.batch_shares) == [4, 8, 8]
    even = even_shard_plan(CLUSTER, COSTS, TRAINING)
    assert even.batch_shares == (7, 7, 6)
    assert even.predicted_step_s > plan.predicted_step_s
    shown = capsys.readouterr().out
    assert "hetero_fsdp of toy on mixed, global batch 20 samples" in shown
    for text in ("step time", "samples/s", "idle share", "peak memory", "even:", "written to"):
        assert text in shown
    assert f"this plan is {even.predicted_step_s / plan.predicted_step_s:.2f} x as fast" in shown
    assert "not measured" not in shown
    assert "tried" not in shown


def test_a_pipeline_plan_against_the_even_one(files, capsys):
    assert run(files, "--strategy", "hetero_pipe") == 0
    plan = PipelinePlan.load(files / "plan.json")
    plan.validate(CLUSTER)
    even = even_pipeline_plan(CLUSTER, COSTS, TRAINING)
    assert [stage.units for stage in even.pipelines[0].stages] == [(0, 3), (3, 6), (6, 8)]
    assert even.pipelines[0].ranks == (0, 1, 2)
    assert plan.predicted_step_s <= even.predicted_step_s
    shown = capsys.readouterr().out
    assert "hetero_pipe of toy on mixed" in shown


def test_auto_takes_the_faster_and_says_why(files, capsys):
    both = [plan_with(name, CLUSTER, COSTS, TRAINING)[0] for name in ("hetero_fsdp", "hetero_pipe")]
    best = min(both, key=lambda each: each.step_s)
    assert run(files) == 0
    shown = capsys.readouterr().out
    assert f"{best.strategy} is taken: " in shown
    kind = ShardPlan if best.strategy == "hetero_fsdp" else PipelinePlan
    assert kind.load(files / "plan.json").predicted_step_s == pytest.approx(best.step_s)


def test_the_plan_that_is_explained_is_the_one_that_is_written(files, capsys):
    assert run(files, "--strategy", "hetero_pipe", "--explain") == 0
    shown = " ".join(capsys.readouterr().out.split())
    for reason in PipelinePlan.load(files / "plan.json").reasons:
        assert f"why: {reason}" in shown
    assert run(files, "--strategy", "hetero_pipe") == 0
    # what binds is known only where other designs were looked at
    assert not any("what binds" in reason for reason in PipelinePlan.load(files / "plan.json").reasons)


def test_explain_says_what_was_tried_what_binds_and_what_would_help(files, capsys):
    for strategy in ("hetero_fsdp", "hetero_pipe"):
        assert run(files, "--strategy", strategy, "--explain") == 0
        shown = capsys.readouterr().out
        for text in ("tried", "taken: the fastest of all", "why: ", "binds now: ", "would help most: "):
            assert text in shown, (strategy, text)


def test_without_a_file_nothing_is_written(files, capsys):
    arguments = ["plan", "--cluster", str(files / "cluster.yaml"), "--costs", str(files / "costs.json")]
    assert main([*arguments, "--global-batch", "20"]) == 0
    assert {path.name for path in files.iterdir()} == {"cluster.yaml", "costs.json"}
    assert "written to" not in capsys.readouterr().out


def test_a_model_by_name_is_counted_and_said_not_to_be_measured(files, capsys, monkeypatch):
    config = GPTConfig(vocabulary=50, context=16, width=16, depth=3, heads=2)
    monkeypatch.setitem(PRESETS, "tiny", Preset("tiny", config, 10_000, "this test"))
    assert run(files, "--model", "tiny", "--strategy", "hetero_fsdp", "--sequence", "8") == 0
    shown, progress = capsys.readouterr()
    assert "planning: 0 of 2: counting the model" in progress
    assert "planning: 1 of 2: hetero_fsdp" in progress
    assert "seconds on fast, slow were not measured: they are FLOPs over the device's speed" in shown
    plan = ShardPlan.load(files / "plan.json")
    assert plan.model.name == "tiny"


def test_costs_of_another_precision_are_used_with_a_word(files, capsys):
    assert run(files, "--strategy", "hetero_fsdp", "--precision", "bf16-mixed") == 0
    assert "the costs were taken in float32, and bf16-mixed computes in bfloat16" in capsys.readouterr().out


def test_an_even_plan_that_would_not_run_is_said_so(files, capsys):
    small = replace(CLUSTER.devices[2], memory_bytes=12 * MIB)
    Cluster("tight", (*CLUSTER.devices[:2], small), LINK, LINK).to_yaml(files / "cluster.yaml")
    even = even_shard_plan(Cluster("tight", (*CLUSTER.devices[:2], small), LINK, LINK), COSTS, Training(200))
    assert even.predictions[2].peak_memory_bytes > 12 * MIB
    assert run(files, "--strategy", "hetero_fsdp", batch="200") == 0
    shown = capsys.readouterr().out
    assert "the even plan does not fit: " in shown
    assert "are missing on rank 2 (slow)" in shown
    assert "but it does not fit" in shown
    assert "x as fast" not in shown


def test_nothing_fits_says_how_much_is_missing(files, capsys):
    tiny = tuple(replace(device, memory_bytes=MIB) for device in CLUSTER.devices)
    Cluster("tiny", tiny).to_yaml(files / "cluster.yaml")
    for strategy in ("auto", "hetero_fsdp", "hetero_pipe"):
        message = failed(files, capsys, "--strategy", strategy)
        assert "missing" in message
        assert "rank" in message
    assert "hetero_pipe: " in failed(files, capsys)


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        (["--precision", "fp8"], "precision is 'fp8': give one of"),
        (["--optimizer", "lion"], "optimizer is 'lion': give one of"),
        (["--strategy", "ddp"], "invalid choice: 'ddp'"),
        (["--sequence", "8"], "the costs file says what a sample is"),
        (["--model", "vit_2b"], "'vit_2b' is not known"),
        (["--model", "vit_base", "--costs", "x.json"], "both --costs and --model are given"),
        (["--clusters", "x"], "unrecognized arguments"),
    ],
)
def test_bad_arguments(files, capsys, more, expected):
    assert expected in failed(files, capsys, *more)


def test_bad_files_and_numbers(files, capsys):
    assert "write a whole number, 1 or more" in failed(files, capsys, batch="0")
    (files / "costs.json").write_text("{}")
    assert "key 'units' is missing" in failed(files, capsys)
    (files / "costs.json").unlink()
    assert "does not exist" in failed(files, capsys)
    assert main(["plan", "--cluster", str(files / "cluster.yaml"), "--global-batch", "2"]) == 2
    assert "neither --costs nor --model is given" in capsys.readouterr().err


def test_a_device_of_unknown_speed_is_not_guessed(files, capsys):
    Cluster("c", (Device("other", "n", 100 * MIB, None),)).to_yaml(files / "cluster.yaml")
    message = failed(files, capsys)
    assert "device type 'other' has no measured seconds for 8 of 8 units" in message
    assert "profile the model on it" in message


@pytest.mark.parametrize(("measured", "is_said"), [(1, True), (4, False)])
def test_micro_batches_far_beyond_the_measured_ones_are_said(files, capsys, measured, is_said):
    points = tuple(TimingPoint(n, n * 1e-3, n * 2e-3) for n in range(1, measured + 1))
    timings = {kind: replace(timing, points=points) for kind, timing in TIMES.items()}
    replace(COSTS, units=tuple(replace(unit, timings=timings) for unit in COSTS.units)).save(files / "costs.json")
    assert run(files, "--strategy", "hetero_fsdp") == 0
    assert ("samples at once were measured" in capsys.readouterr().out) == is_said
