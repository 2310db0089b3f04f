"""The scaling benchmark's figures follow from raw repeats, and its command line says what is wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.hetero_speedup import conductor
from benchmarks.hetero_speedup.case import Effort
from benchmarks.hetero_speedup.conductor import FAILED
from benchmarks.hetero_speedup.ranks import ArmFailedError
from benchmarks.hetero_speedup.speedup import ArmTimes
from benchmarks.vit_scaling import command, figures, groups, measure, settings
from benchmarks.vit_scaling.settings import Here, Settings
from benchmarks.vit_scaling.shapes import Shape, costs, flops_per_sample, local_batch
from lightning_hetero.errors import HeteroError

CPU = Here(cores=2)
H200 = Here(cores=16, gpus=1, gpu_name="NVIDIA H200")
RESULTS = Path(command.__file__).parent / "results"


def row(arm: str, *turns: list[float], images: int = 10, ranks: int = 2, **labels: Any) -> figures.Row:
    times = ArmTimes(images, list(turns))
    labels = {"arm": arm, "model": "m", "emulated": False, **labels}
    return figures.row_of(labels, times, ranks, flops_per_sample=3e12)


def test_a_row_is_of_medians_and_keeps_every_step() -> None:
    times = ArmTimes(12, [[9.0, 2.0, 4.0], [9.0, 1.0, 1.0]], {"peak_bytes": [7, 8]})
    found = figures.row_of({"arm": "a"}, times, 2, flops_per_sample=1e12, skipped_steps=1, peak_flops_per_s=4e12)
    assert found["step_s"] == [[9.0, 2.0, 4.0], [9.0, 1.0, 1.0]]
    assert found["median_step_s"] == 2.0  # of 3 and 1
    assert found["images_per_s"] == 6.0
    assert found["tflops_per_device"] == 3.0
    assert found["mfu"] == 0.75
    assert (found["outcome"], found["peak_bytes"], found["skipped_steps"]) == ("ok", [7, 8], 1)


def test_a_row_that_ran_out_of_memory_has_no_rates() -> None:
    times = ArmTimes(12, [[1.0]], {FAILED: "rank 0 is out of memory"})
    found = figures.row_of({"arm": "a"}, times, 2, flops_per_sample=1e12)
    assert (found["outcome"], found["why"]) == ("out of memory", "rank 0 is out of memory")
    assert not {"images_per_s", "tflops_per_device", "mfu", FAILED} & set(found)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (
            "Traceback\nE: rank 1 (emulated small, 64 MiB) is out of memory: aten.mm wants 1 MiB\nend of its output:\n",
            "rank 1 (emulated small, 64 MiB) is out of memory: aten.mm wants 1 MiB",
        ),
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate", "CUDA out of memory. Tried to allocate"),
        ("lightning_hetero.errors.InfeasibleError: no plan fits\n", "no plan fits"),
        ("rank 1 failed: its process ended without a word (killed, or out of memory?)", None),
        ("ValueError: bad", None),
    ],
)
def test_only_a_lack_of_memory_is_excused(text: str, reason: str | None) -> None:
    assert figures.out_of_memory(ArmFailedError(text)) == reason


def test_limits_add_up_to_the_step_with_image_files() -> None:
    rows = [
        row(figures.SYNTHETIC, [0.75]),
        row(figures.REAL, [1.5]),
        row(figures.SILENT, [0.5]),
        row(figures.READING, [0.1]),
    ]
    parts = figures.limits(rows)
    assert parts == {
        "compute_s": 0.5,
        "communication_s": 0.25,
        "input_s": 0.75,
        "step_s": 1.5,
        "limited_by": "input",
    }
    assert figures.limits(rows[:2]) == {}


def test_scaling_is_against_one_rank_of_the_same_kind() -> None:
    rows = [
        row("one", [1.0], images=10, ranks=1),
        row("two", [1.25], images=20, ranks=2),
        row("emulated", [1.0], images=20, ranks=2, emulated=True),
    ]
    figures.add_scaling(rows)
    assert [each.get("efficiency") for each in rows] == [1.0, 0.8, None]


def test_ratios_leave_out_what_did_not_run() -> None:
    failed = figures.row_of({"arm": "ddp"}, ArmTimes(1, [], {FAILED: "x"}), 2, flops_per_sample=1.0)
    rows = [row("ours", [1.0]), row("theirs", [2.0]), failed]
    assert figures.ratios(rows, "ours") == {"theirs": 2.0}
    assert figures.ratios(rows, "ddp") == {}


class FakeRanks:
    """An arm whose ranks run in no process; ``arm`` says when it fails."""

    def __init__(self, name: str, arm: Any, case: Any, world_size: int) -> None:
        self.name, self.arm, self.steps = name, arm, 0

    def wait_ready(self) -> dict[str, Any]:
        return {"strategy": self.name}

    def step(self) -> float:
        self.steps += 1
        if self.steps == self.arm:
            raise ArmFailedError("rank 0 is out of memory: x")
        return float(self.steps)

    def stop(self) -> dict[str, Any]:
        return {"at_end": True}

    def close(self) -> None:
        pass


class FakeCase:
    world_size, global_batch = 2, 8


@pytest.mark.parametrize(("fails_at", "turns"), [(1, 0), (4, 1)])
def test_an_excused_arm_leaves_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch, fails_at: int, turns: int) -> None:
    monkeypatch.setattr(conductor, "ArmRanks", FakeRanks)
    plan: Any = {"well": (0, FakeCase), "fails": (fails_at, FakeCase)}
    effort = Effort(3, 2)
    times = conductor.alternate("t", plan, effort, lambda what, steps: None, figures.out_of_memory)
    assert times["well"].turns == [[2.0, 3.0], [4.0, 5.0], [6.0, 7.0]]
    assert times["well"].info.pop("start_s") >= 0
    assert times["well"].info == {"strategy": "well", "at_end": True}
    assert times["fails"].info[FAILED] == "rank 0 is out of memory: x"
    assert len(times["fails"].turns) == turns
    with pytest.raises(ArmFailedError):
        conductor.alternate("t", plan, effort, lambda what, steps: None)


# -- models --------------------------------------------------------------------------------------------------------


def test_a_scaled_model_keeps_its_shape_and_says_so() -> None:
    shape = Shape("vit_huge", 8, 4)
    config: Any = shape.config
    assert (config.width, config.depth, config.heads, config.swiglu_width) == (160, 8, 2, 430)
    assert (config.patch_size, config.image_size, config.classes) == (14, 112, 1000)
    assert shape.describe()["scaled_down"]
    assert not Shape("vit_huge").scaled
    assert Shape("vit_huge").config.depth == 32


def test_flops_of_a_scaled_gpt_by_formula() -> None:
    shape = Shape("gpt_1_4b", 8, 4)
    w, depth, s, v = 256, 6, 256, 6288
    forward = depth * (2 * 12 * w * w * s + 4 * s * s * w) + 2 * w * v * s
    assert flops_per_sample(shape) == pytest.approx(3 * forward, rel=5e-3)


def test_batches_are_by_flops_up_to_the_study_s() -> None:
    shape = Shape("vit_base", 8, 4)
    assert local_batch(shape, 4.1 * flops_per_sample(shape)) == 4
    assert local_batch(shape, 0.0) == 1
    assert local_batch(shape, 1e18) == 32


# -- topics --------------------------------------------------------------------------------------------------------


def wanted(here: Here = CPU, **changes: Any) -> Settings:
    return Settings(here, **{"models": ("vit_base",), "sharding": settings.default_sharding(here.devices)} | changes)


def test_every_bad_value_is_named() -> None:
    with pytest.raises(HeteroError) as caught:
        wanted(models=("vit_bse",), sharding=("HYBRID_0",), prefetch=("PRE",), ranks=(0,), strategies=("fsdp",))
    for part in ("--models vit_bse", "--sharding HYBRID_0", "--prefetch PRE", "--ranks 0", "--strategy fsdp", "ddp"):
        assert part in str(caught.value)


def test_a_cluster_of_real_devices_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "real.yaml"
    path.write_text("schema: 1\nname: r\nnodes:\n  - name: n\n    devices:\n      - {type: a, memory: 1 GiB}\n")
    with pytest.raises(HeteroError, match="emulate: true"):
        wanted(cluster_path=path)


def test_modes_that_ranks_cannot_have_are_left_out() -> None:
    asked = ("DDP", "FULL_SHARD", "HYBRID_1", "HYBRID_2", "HYBRID_4")
    assert groups.modes(asked, 2) == ["DDP", "FULL_SHARD", "HYBRID_1"]
    assert groups.modes(asked, 4) == ["DDP", "FULL_SHARD", "HYBRID_1", "HYBRID_2"]
    assert groups.modes(("HYBRID_2",), 2) == ["HYBRID_2"]
    assert settings.default_sharding(4) == (
        *("DDP", "FULL_SHARD", "SHARD_GRAD_OP", "HYBRID_1", "HYBRID_2", "NO_SHARD"),
    )


def test_more_ranks_than_cores_are_emulated(tmp_path: Path) -> None:
    found = groups.weak_scaling(wanted(ranks=(1, 2, 8), quick=True), tmp_path)
    ranks = [{(entry.case.world_size, entry.case.emulated) for entry in group.entries.values()} for group in found]
    assert ranks == [{(1, False), (2, False)}, {(1, True), (8, True)}]
    assert [group.title for group in found] == ["scaling of vit_base", "EMULATED scaling of vit_base"]


def test_options_are_a_grid(tmp_path: Path) -> None:
    (group,) = groups.options(wanted(prefetch=("NONE", "BACKWARD_PRE"), limit_all_gathers=(True, 3, False)), tmp_path)
    assert [entry.arm.options for entry in group.entries.values()] == [  # type: ignore[attr-defined]
        {"backward_prefetch": prefetch, "limit_all_gathers": limit}
        for prefetch in ("NONE", "BACKWARD_PRE")
        for limit in (True, 3, False)
    ]


def test_several_gpus_run_models_of_their_own_size(tmp_path: Path) -> None:
    here = Here(cores=16, gpus=2, gpu_name="NVIDIA H200")
    (group,) = groups.sharding(wanted(here, sharding=("FULL_SHARD",)), tmp_path)
    case = group.entries["FULL_SHARD"].case
    assert (case.accelerator, case.world_size, case.local_batch, case.shape.scaled) == ("cuda", 2, 32, False)


def test_topics_are_those_that_can_run() -> None:
    assert measure.topics_of(H200, None, False) == settings.TOPICS
    assert measure.topics_of(CPU, None, False) == settings.TOPICS[:-1]
    assert set(settings.TOPICS[:-1]) - set(measure.topics_of(CPU, None, True)) == {"options"}
    assert measure.topics_of(CPU, ["gpt", "options"], True) == ("options", "gpt")


def ladder(monkeypatch: pytest.MonkeyPatch, here: Here, largest: str) -> tuple[list[figures.Row], list[list[str]]]:
    """Run the ladder with fake devices on which ``largest`` is the first that does not fit."""
    tried = []

    def alternating(title: str, plan: Any, effort: Any, progress: Any, excuse: Any) -> dict[str, ArmTimes]:
        tried.append(list(plan))
        info = {FAILED: "CUDA out of memory."} if title.startswith(largest) else {"peak_bytes": [2**30]}
        return {name: ArmTimes(case.global_batch, [[0.5, 0.25, 0.25]], info) for name, (_, case) in plan.items()}

    base = Shape("vit_base")  # counting a larger one takes seconds
    monkeypatch.setattr(groups, "costs", lambda shape, dtype: costs(base, dtype))
    monkeypatch.setattr(groups, "flops_per_sample", lambda shape: flops_per_sample(base))
    asked = wanted(here, models=("vit_3b", "vit_base", "vit_huge"), sharding=("DDP",))
    each = groups.one_gpu(asked, Path())
    return measure.measure("one_gpu", each, lambda what, steps: None, here, alternating)["rows"], tried


def test_the_ladder_climbs_until_nothing_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, tried = ladder(monkeypatch, H200, "vit_huge")
    # one after the other: an arm that waits would hold its memory
    assert tried == [["vit_base, eager"], ["vit_base, compiled"], ["vit_huge, eager"], ["vit_huge, compiled"]]
    assert [(each["model"], each["compiled"], each["outcome"]) for each in rows] == [
        ("vit_base", False, "ok"),
        ("vit_base", True, "ok"),
        ("vit_huge", False, "out of memory"),
        ("vit_huge", True, "out of memory"),
    ]
    first = rows[0]
    assert first["images_per_s"] == 128.0
    assert first["tflops_per_device"] == pytest.approx(128 * flops_per_sample(Shape("vit_base")) / 1e12)
    assert first["mfu"] == pytest.approx(first["tflops_per_device"] / 989.4)
    parameters = 87e6
    assert first["predicted_peak_bytes"] > 8 * parameters  # bf16 parameters, gradients and two moments, at least
    assert not first["scaled_down"]


def test_an_unknown_gpu_has_no_mfu_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, _ = ladder(monkeypatch, Here(cores=2, gpus=1, gpu_name="Secret 9000"), "vit_huge")
    assert rows[0]["mfu"] is None
    assert "Secret 9000" in rows[0]["no_mfu"]


def test_what_was_measured_is_kept_topic_by_topic(monkeypatch: pytest.MonkeyPatch) -> None:
    def measured(topic: str, *rest: Any) -> dict[str, Any]:
        if topic == "gpt":
            raise ArmFailedError("a rank died")
        return {"rows": [topic]}

    monkeypatch.setattr(measure, "measure", measured)
    monkeypatch.setattr(groups, "BUILDERS", dict.fromkeys(settings.TOPICS, lambda wanted, folder: []))
    kept: list[dict[str, Any]] = []
    with pytest.raises(ArmFailedError):
        measure.run(
            wanted(), ("mixed", "gpt"), lambda *told: None, lambda total: None, lambda found: kept.append(found)
        )
    assert kept == [{"mixed": {"rows": ["mixed"]}}]


# -- command line --------------------------------------------------------------------------------------------------


def test_values_of_the_limit() -> None:
    given = command.parse_arguments(["--limit-all-gathers", "true", "False", "3", "--quick"])
    assert given.limit_all_gathers == [True, False, 3]
    with pytest.raises(SystemExit):
        command.parse_arguments(["--limit-all-gathers", "0"])


def test_defaults_are_by_devices() -> None:
    found = command.settings_of(command.parse_arguments([]), CPU)
    assert found.models == ("vit_base", "vit_huge", "vit_1b", "vit_3b")
    assert command.settings_of(command.parse_arguments([]), H200).models == (*found.models, "vit_5b", "vit_15b")
    assert found.sharding == ("DDP", "FULL_SHARD", "SHARD_GRAD_OP", "HYBRID_1", "NO_SHARD")
    assert command.settings_of(command.parse_arguments(["--quick"]), CPU).models == ("vit_huge",)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--models", "vit_nine"], "--models vit_nine: give some of vit_base"),
        (["--only", "one_gpu"], "there is no GPU here"),
        (["--image-folder", "/no/such/place"], "/no/such/place is no folder"),
        (["--from", "/no/such/file"], "/no/such/file does not exist"),
    ],
)
def test_bad_arguments_end_with_a_word(
    arguments: list[str], says: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "find_devices", lambda: CPU)
    assert command.main(arguments) == 1
    assert says in capsys.readouterr().err


def test_results_of_another_schema_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "other.json"
    path.write_text('{"schema": 99}')
    assert command.main(["--from", str(path)]) == 1
    assert "schema 1" in capsys.readouterr().err


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*.json")), ids=lambda path: path.stem)
def test_recorded_figures_follow_from_recorded_steps(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results = json.loads(path.read_text())
    counted = 0
    for topic, found in results["topics"].items():
        rows = [again(each, results) for each in found["rows"]]
        assert measure.derived(topic, rows) == {name: value for name, value in found.items() if name != "rows"}
        assert rows == found["rows"]
        counted += len(rows)
    assert counted > 0
    assert command.main(["--from", str(path)]) == 0
    printed = capsys.readouterr().out
    assert "SCALED DOWN" in printed
    emulated = any(row["emulated"] for found in results["topics"].values() for row in found["rows"])
    assert ("EMULATED" in printed) == emulated


def again(found: figures.Row, results: dict[str, Any]) -> figures.Row:
    """The row, computed anew from its raw steps."""
    figure = {"outcome", "median_step_s", "images_per_s", "tflops_per_device", "mfu", "efficiency", "why"}
    labels = {name: value for name, value in found.items() if name not in figure}
    model = found["model"] if found["scaled_down"] else f"{found['model']}, own size"
    flops = 0.0 if found["arm"] == figures.READING else results["models"][model]["flops_per_sample"]
    info = {FAILED: found["why"]} if found["outcome"] != "ok" else {}
    times = ArmTimes(found["images_per_step"], found["step_s"], info)
    return figures.row_of(labels, times, found["ranks"], flops_per_sample=flops, skipped_steps=found["skipped_steps"])
