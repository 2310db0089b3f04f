"""The arms of the scaling benchmark, on real ranks: what is removed is removed, and what does not fit says so."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from benchmarks.vit_scaling import arms, data, figures
from benchmarks.vit_scaling.case import ScalingCase
from benchmarks.vit_scaling.data import images, write_digits
from benchmarks.vit_scaling.shapes import Shape
from benchmarks.vit_scaling.watch import OwnGather, OwnReduction
from lightning_hetero.cluster import Cluster, Device
from lightning_hetero.errors import HeteroError
from tests.harness import WarmRanks

SMALL = Shape("vit_base", 24, 6)
STEPS = 3


class Steps:
    """A gate that lets an arm run so many steps."""

    def __init__(self) -> None:
        self.left, self.done = STEPS, 0

    def ready(self, info: dict[str, Any]) -> None:
        pass

    def wait(self) -> bool:
        self.left -= 1
        return self.left >= 0

    def step_done(self) -> None:
        self.done += 1


class Collectives(Steps):
    """Counts bytes that are gathered and reduced between the first step and the last."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0
        self.counting = False
        for name in ("all_gather_single", "all_gather_into_tensor"):
            if hasattr(dist, name):
                setattr(dist, name, self._counted(getattr(dist, name)))

    def _counted(self, collective: Any) -> Any:
        def counted(output: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            self.bytes += output.nbytes if self.counting else 0
            return collective(output, *args, **kwargs)

        return counted

    def ready(self, info: dict[str, Any]) -> None:
        self.counting = True


def case(ranks: int = 2, **changes: Any) -> ScalingCase:
    return ScalingCase(**{"name": "t", "shape": SMALL, "world_size": ranks, "local_batch": 2} | changes)


def run_arm(arm: Any, given: ScalingCase) -> tuple[dict[str, Any], int]:
    gate = Steps()
    told = arm(given, int(os.environ["RANK"]), gate)
    return told, gate.done


def gathered_bytes(communicates: bool) -> int:
    gate = Collectives()
    arms.Sharded(communicates=communicates)(case(), int(os.environ["RANK"]), gate)  # type: ignore[arg-type]
    assert gate.done == STEPS
    return gate.bytes


def test_communication_is_removed(ranks: WarmRanks) -> None:
    assert min(ranks.run(2, gathered_bytes, True, process_group=False)) > 0
    assert ranks.run(2, gathered_bytes, False, process_group=False) == [0, 0]


def test_what_stands_in_for_collectives() -> None:
    gathered = torch.tensor([0.0, 0.0, 5.0, 6.0])
    OwnGather()(gathered, gathered[2:], None)
    assert gathered.tolist() == [5.0, 6.0, 5.0, 6.0]
    reduced = torch.zeros(2)
    OwnReduction()(reduced, torch.tensor([1.0, 2.0, 3.0, 4.0]), None, None)
    assert reduced.tolist() == [1.0, 2.0]


@pytest.mark.slow
def test_memory_is_counted_on_every_rank_and_sharding_saves_some(ranks: WarmRanks) -> None:
    peaks = {}
    for mode in ("FULL_SHARD", "NO_SHARD"):
        told, done = ranks.run(2, run_arm, arms.Sharded(mode), case(count_memory=True), process_group=False)[0]
        assert done == STEPS
        peaks[mode] = told["peak_bytes"]
        assert len(peaks[mode]) == 2
    parameters = sum(p.numel() for p in SMALL.build("meta").parameters())
    assert min(peaks["NO_SHARD"]) > 16 * parameters  # parameters, gradients, two moments, 4 bytes each
    assert max(peaks["FULL_SHARD"]) < min(peaks["NO_SHARD"])


def little(memory_bytes: int, folder: Path) -> Path:
    path = folder / "little.yaml"
    devices = (Device("small", "n", memory_bytes, 50e9), Device("small", "n", memory_bytes, 50e9))
    Cluster("little", devices, emulate=True).to_yaml(path)
    return path


def test_out_of_memory_is_told_by_the_arm(ranks: WarmRanks, tmp_path: Path) -> None:
    given = case(cluster_path=little(100_000, tmp_path))
    outcomes = ranks.run_outcomes(2, run_arm, arms.ddp, given, timeout=60, process_group=False)
    reasons = [figures.out_of_memory(RuntimeError(str(rest[1]))) for status, *rest in outcomes if status == "error"]
    assert any(reason and "emulated small" in reason for reason in reasons), outcomes


def test_the_even_cut_has_as_many_blocks_in_each_stage() -> None:
    given = case(ranks=3, shape=Shape("vit_huge", 16, 4), local_batch=5)
    plan = arms.even_cut(given, Cluster("c", (Device("d", "n", 2**30, 1e9),) * 3, emulate=True))
    names = [[plan.unit_names[i] for i in range(*stage.units)] for stage in plan.pipelines[0].stages]
    assert [sum(name.startswith("blocks.") for name in stage) for stage in names] == [3, 3, 2]
    assert names[0][0] == "patch_embed"
    assert names[-1][-2:] == ["norm", "head"]
    assert plan.global_batch_size == 15
    assert plan.micro_batch_size * plan.pipelines[0].micro_batches >= 15


# -- image files ---------------------------------------------------------------------------------------------------


def test_digits_are_image_files_in_a_folder_per_class(tmp_path: Path) -> None:
    write_digits(tmp_path, most=20)
    found = images(tmp_path, SMALL)
    assert (len(found), len(found.classes)) == (20, 10)
    pixels, target = found[0]
    assert pixels.shape == (3, 112, 112)
    assert 0 <= target < 10
    batch, targets = next(iter(data.loader(case(image_folder=tmp_path, workers=0))))
    assert (batch.shape, targets.shape) == ((2, 3, 112, 112), (2,))


def test_digits_are_written_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = []
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(data, "write_digits", lambda folder, most: written.append(most))
    assert data.digit_folder() == data.digit_folder()
    assert written == [500]
    assert [each.name for each in (tmp_path / "lightning_hetero").iterdir()] == ["digits_png_500_224"]


def test_a_folder_without_images_says_what_to_give(tmp_path: Path) -> None:
    with pytest.raises(HeteroError, match="a folder of image files for each class"):
        images(tmp_path, SMALL)
    with pytest.raises(HeteroError, match="takes no images"):
        images(tmp_path, Shape("gpt_1_4b", 8, 4))
