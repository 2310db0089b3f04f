"""What the models train on: synthetic samples, or image files that are read, decoded and cropped in each step."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from benchmarks.vit_scaling.case import ScalingCase
from benchmarks.vit_scaling.shapes import Shape
from lightning_hetero.errors import HeteroError
from lightning_hetero.models.presets import ViTConfig

POOL = 64
"""different synthetic samples, over and over"""

DIGITS = 500
"""how many are written as files"""

DIGIT_PIXELS = 224
AHEAD = 1
"""batches that a worker reads ahead"""


class Synthetic(Dataset[tuple[Tensor, Tensor]]):
    """Random samples that are in memory already: reading them costs next to nothing.

    Args:
        shape: of the model that takes them.
        length: samples to offer.
    """

    def __init__(self, shape: Shape, length: int) -> None:
        generator = torch.Generator().manual_seed(0)
        config = shape.config
        if isinstance(config, ViTConfig):
            self.inputs = torch.rand(POOL, 3, config.image_size, config.image_size, generator=generator)
            self.targets = torch.randint(config.classes, (POOL,), generator=generator)
        else:
            tokens = torch.randint(config.vocabulary, (POOL, config.context + 1), generator=generator)
            self.inputs, self.targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.inputs[index % POOL], self.targets[index % POOL]


class Repeated(Dataset[Any]):
    """A data set, over and over, so that no epoch ends among the measured steps.

    Args:
        dataset: with at least one sample.
        length: samples to offer.
    """

    def __init__(self, dataset: Any, length: int) -> None:
        self.dataset, self.length = dataset, length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        return self.dataset[index % len(self.dataset)]


def loader(case: ScalingCase) -> DataLoader[Any]:
    """The loader that a user would hand to the Trainer: ``case.local_batch`` samples, shuffled."""
    length = case.global_batch * case.max_steps
    if case.image_folder is None:
        return DataLoader(Synthetic(case.shape, length), batch_size=case.local_batch, shuffle=True)
    # a rank is ended by the conductor, and may have children of its own: they end when they find it gone
    multiprocessing.current_process().daemon = False
    reading: dict[str, Any] = {}
    if case.workers:
        reading = {"multiprocessing_context": "fork", "prefetch_factor": AHEAD}
    return DataLoader(
        Repeated(images(case.image_folder, case.shape), length),
        batch_size=case.local_batch,
        shuffle=True,
        num_workers=case.workers,
        **reading,
    )


def images(folder: Path, shape: Shape) -> Any:
    """The image files of ``folder`` through torchvision's ImageFolder, cropped at random to what the model takes.

    Raises:
        HeteroError: the model takes no images, the folder holds none, or more classes than the model has.
    """
    from torchvision import transforms
    from torchvision.datasets import ImageFolder

    config = shape.config
    if not isinstance(config, ViTConfig):
        raise HeteroError(f"{shape.preset} takes no images: leave --data images to ViTs")
    steps = [transforms.RandomResizedCrop(config.image_size), transforms.RandomHorizontalFlip(), transforms.ToTensor()]
    try:
        found = ImageFolder(str(folder), transforms.Compose(steps))
    except (FileNotFoundError, OSError) as error:
        raise HeteroError(
            f"image folder {folder}: {error}: give a folder with a folder of image files for each class"
        ) from error
    if len(found.classes) > config.classes:
        raise HeteroError(
            f"image folder {folder} has {len(found.classes)} classes, {shape.preset} has {config.classes}: "
            "give a folder with fewer"
        )
    return found


def digit_folder() -> Path:
    """The first 500 of scikit-learn's scanned digits as PNG files of 224 x 224, a folder per digit; written once.

    Returns:
        The folder, under ``$XDG_CACHE_HOME`` (default ``~/.cache``).
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = cache / "lightning_hetero" / f"digits_png_{DIGITS}_{DIGIT_PIXELS}"
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        made = Path(tempfile.mkdtemp(prefix=folder.name, dir=folder.parent))
        try:
            write_digits(made, DIGITS)
            made.rename(folder)  # whole or not at all
        except OSError:
            if not folder.exists():  # else another run was first
                raise
        finally:
            shutil.rmtree(made, ignore_errors=True)
    return folder


def write_digits(folder: Path, most: int | None = None) -> None:
    """Write the digits, or the first ``most`` of them, as PNG files into ``folder``."""
    from PIL import Image
    from sklearn.datasets import load_digits

    digits = load_digits()
    for number, (pixels, target) in enumerate(zip(digits.images[:most], digits.target[:most], strict=True)):
        image = Image.fromarray((pixels * 255 / 16).astype("uint8")).convert("RGB")
        (folder / str(target)).mkdir(exist_ok=True)
        image.resize((DIGIT_PIXELS, DIGIT_PIXELS), Image.Resampling.BICUBIC).save(
            folder / str(target) / f"{number:04d}.png",
            compress_level=1,  # written sooner, no smaller read
        )
