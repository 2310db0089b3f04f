"""The example runs, and tells bad input in one line."""

from __future__ import annotations

import os
import runpy
from pathlib import Path
from typing import Any

import pytest

from tests.harness import WarmRanks

EXAMPLE = Path(__file__).parents[1] / "examples" / "vit_digits.py"


def _main(*arguments: str) -> int:
    # a rank of its own job: torchrun's variables would make Lightning wait for a launcher's ranks
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "GROUP_RANK", "NODE_RANK", "TORCHELASTIC_RUN_ID"):
        os.environ.pop(name, None)
    example: dict[str, Any] = runpy.run_path(str(EXAMPLE))
    status: int = example["main"](["--strategy", "auto", "--devices", "1", *arguments])
    return status


def _write_images(folder: Path, classes: list[str]) -> None:
    from PIL import Image

    for part in ("train", "val"):
        for index, name in enumerate(classes):
            (folder / part / name).mkdir(parents=True)
            for image in range(4):
                pixels = Image.new("RGB", (24, 20), color=(40 * index, image, 0))
                pixels.save(folder / part / name / f"{image}.png")


def _main_on_images() -> int:
    _write_images(Path("images"), ["cats", "dogs"])
    return _main("--epochs", "1", "--data", "images", "--image-pixels", "32", "--global-batch", "4")


def test_an_epoch_on_digits(ranks: WarmRanks) -> None:
    assert ranks.run(1, _main, "--epochs", "1", "--min-accuracy", "0.1", process_group=False) == [0]


@pytest.mark.slow
def test_too_low_an_accuracy_is_a_failure(ranks: WarmRanks) -> None:
    assert ranks.run(1, _main, "--epochs", "1", "--min-accuracy", "1.01", process_group=False) == [1]


def test_an_epoch_on_a_folder_of_images(ranks: WarmRanks) -> None:
    assert ranks.run(1, _main_on_images, process_group=False) == [0]


def test_a_folder_without_images_is_told(ranks: WarmRanks, tmp_path: Path) -> None:
    ((status, kind, message),) = ranks.run_outcomes(1, _main, "--data", str(tmp_path), process_group=False)
    assert (status, kind) == ("error", "SystemExit")
    assert message.startswith(f"--data {tmp_path}: no folder {tmp_path / 'train'} and no folder {tmp_path / 'val'}")


@pytest.mark.parametrize("name", ["two_fast_two_slow.yaml"])
def test_the_cluster_file_is_valid(name: str) -> None:
    from lightning_hetero.cluster import Cluster

    assert Cluster.from_yaml(EXAMPLE.with_name(name)).device_types() == ("fast", "fast", "slow", "slow")
