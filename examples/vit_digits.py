"""Trains a small vision transformer on unequal devices.

By default: scikit-learn's scanned digits on the emulated cluster beside this file, with hetero_fsdp, to at
least 95 % validation accuracy.

    python examples/vit_digits.py
    python examples/vit_digits.py --strategy hetero_pipe          # or hetero_auto
    python examples/vit_digits.py --strategy auto                 # one plain process
    python examples/vit_digits.py --metrics runs/fsdp             # then: lightning-hetero report runs/fsdp
    python examples/vit_digits.py --data path/to/images           # with train/CLASS/*.png, val/CLASS/*.png
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer, seed_everything
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset, TensorDataset

from lightning_hetero.callbacks import RankEnergy, RankMemory, RankThroughput, StragglerMonitor, TraceCapture
from lightning_hetero.strategies import HeteroAutoStrategy, HeteroFSDPStrategy, HeteroPipelineStrategy

STRATEGIES: tuple[type[Any], ...] = (HeteroFSDPStrategy, HeteroPipelineStrategy, HeteroAutoStrategy)
CLUSTER = Path(__file__).with_name("two_fast_two_slow.yaml")


class ViTClassifier(LightningModule):
    """A timm ViT and nothing that knows of devices.

    Args:
        classes: number of classes.
        channels: image channels.
        image_pixels: side of an image.
        patch_pixels: side of a patch.
        learning_rate: peak of the one-cycle schedule.
    """

    def __init__(self, classes: int, channels: int, image_pixels: int, patch_pixels: int, learning_rate: float) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.model = VisionTransformer(
            img_size=image_pixels,
            patch_size=patch_pixels,
            in_chans=channels,
            num_classes=classes,
            embed_dim=256,
            depth=4,
            num_heads=4,
            # the mean over patches learns from 1,437 images what a class token does not
            class_token=False,
            global_pool="avg",
            weight_init="jax",
        )

    def training_step(self, batch: tuple[Tensor, Tensor], batch_index: int) -> Tensor:
        """Return the mean cross-entropy of images ``(b, channels, side, side)`` and labels ``(b,)``."""
        images, labels = batch
        loss = cross_entropy(self.model(images), labels)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_index: int) -> None:
        """Log loss and accuracy over the whole validation set."""
        images, labels = batch
        logits = self.model(images)
        self.log("val_loss", cross_entropy(logits, labels), sync_dist=True)
        accuracy = (logits.argmax(dim=1) == labels).float().mean()
        self.log("val_accuracy", accuracy, sync_dist=True, prog_bar=True)

    def configure_optimizers(self) -> dict[str, object]:
        """AdamW under a one-cycle schedule."""
        rate = self.hparams["learning_rate"]
        optimizer = torch.optim.AdamW(self.parameters(), lr=rate, weight_decay=0.05, fused=True)
        steps = int(self.trainer.estimated_stepping_batches)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=steps, pct_start=0.2)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Images(LightningDataModule):
    """Digits that scikit-learn ships, or a folder of images.

    Args:
        source: "digits", or a folder that holds ``train/CLASS/*`` and ``val/CLASS/*``.
        batch_size: samples of a batch on one device; the global batch is this times the ranks.
        workers: loader processes of each rank.
        image_pixels: side to which the images of a folder are scaled.
    """

    def __init__(self, source: str, batch_size: int, workers: int, image_pixels: int) -> None:
        super().__init__()
        self.batch_size, self.workers = batch_size, workers
        if source == "digits":
            self.train, self.val = _digits()
            self.classes, self.channels, self.image_pixels, self.patch_pixels = 10, 1, 8, 4
        else:
            self.train, self.val, self.classes = _folder(Path(source), image_pixels)
            self.channels, self.image_pixels, self.patch_pixels = 3, image_pixels, image_pixels // 8

    def train_dataloader(self) -> DataLoader[tuple[Tensor, Tensor]]:
        """Shuffled training images."""
        return DataLoader(self.train, self.batch_size, shuffle=True, num_workers=self.workers)

    def val_dataloader(self) -> DataLoader[tuple[Tensor, Tensor]]:
        """Validation images."""
        return DataLoader(self.val, self.batch_size, num_workers=self.workers)


def _digits() -> tuple[Dataset[tuple[Tensor, ...]], Dataset[tuple[Tensor, ...]]]:
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    images = (images - images.mean()) / images.std()
    labels = torch.tensor(digits.target)
    train, val = train_test_split(range(len(labels)), test_size=0.2, random_state=0, stratify=digits.target)
    return TensorDataset(images[train], labels[train]), TensorDataset(images[val], labels[val])


def _folder(path: Path, pixels: int) -> tuple[Dataset[tuple[Tensor, int]], Dataset[tuple[Tensor, int]], int]:
    from torchvision.datasets import ImageFolder
    from torchvision.transforms import v2

    missing = [str(path / part) for part in ("train", "val") if not (path / part).is_dir()]
    if missing:
        sys.exit(f"--data {path}: no folder {' and no folder '.join(missing)}; give 'digits' or a folder with both")
    common = [v2.ToImage(), v2.ToDtype(torch.float32, scale=True), v2.Normalize([0.5] * 3, [0.25] * 3)]
    train = ImageFolder(path / "train", v2.Compose([v2.RandomResizedCrop((pixels, pixels)), *common]))
    val = ImageFolder(path / "val", v2.Compose([v2.Resize((pixels, pixels)), *common]))
    if train.classes != val.classes:
        sys.exit(f"--data {path}: train has the classes {train.classes}, val {val.classes}; they must be the same")
    return train, val, len(train.classes)


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strategy", default="hetero_fsdp", help="a strategy name of Lightning's or ours")
    parser.add_argument("--cluster", default=CLUSTER, help="cluster file for the hetero ones; 'none' to discover")
    parser.add_argument("--devices", default="auto", help="processes; an emulated cluster sets them itself")
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--global-batch", type=int, default=128, help="samples of a step over all ranks")
    parser.add_argument("--learning-rate", type=float, default=1.5e-3)
    parser.add_argument("--data", default="digits", help="'digits', or a folder with train/CLASS and val/CLASS")
    parser.add_argument("--image-pixels", type=int, default=64, help="side to which a folder's images are scaled")
    parser.add_argument("--workers", type=int, default=0, help="loader processes of each rank")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--metrics", metavar="FOLDER", help="measure every rank, and trace a step, into this folder")
    parser.add_argument("--min-accuracy", type=float, help="exit with 1 below this; for digits 0.95")
    options = parser.parse_args(arguments)
    if options.min_accuracy is None:
        options.min_accuracy = 0.95 if options.data == "digits" else 0.0
    return options


def measuring(folder: str) -> list[Callback]:
    """What every rank does, into ``metrics.jsonl`` of a folder, and a trace of one step."""
    return [
        RankThroughput(folder=folder),
        RankMemory(folder=folder),
        RankEnergy(folder=folder),
        StragglerMonitor(folder=folder),
        TraceCapture(steps=8, folder=folder),
    ]


def main(arguments: list[str] | None = None) -> int:
    """Train, print the accuracy; returns 1 when it is lower than asked for."""
    options = parse_arguments(arguments)
    seed_everything(options.seed)
    start_s = time.monotonic()
    data = Images(options.data, options.global_batch, options.workers, options.image_pixels)
    model = ViTClassifier(data.classes, data.channels, data.image_pixels, data.patch_pixels, options.learning_rate)
    strategy: Any = options.strategy
    ours = next((each for each in STRATEGIES if each.strategy_name == options.strategy), None)
    if ours is not None and options.cluster != "none":
        strategy = ours(options.cluster, global_batch_size=options.global_batch)
    callbacks = [] if options.metrics is None else measuring(options.metrics)
    trainer = Trainer(
        callbacks=callbacks,
        accelerator="auto" if isinstance(strategy, str) else "cpu",
        devices=options.devices,
        strategy=strategy,
        max_epochs=options.epochs,
        check_val_every_n_epoch=math.gcd(4, options.epochs),  # so that the last epoch is among them
        num_sanity_val_steps=0,
        log_every_n_steps=10,
        logger=False,
        enable_checkpointing=False,
    )
    trainer.fit(model, datamodule=data)
    accuracy = float(trainer.callback_metrics["val_accuracy"])
    if not trainer.is_global_zero:
        return 0
    taken_s = time.monotonic() - start_s
    print(f"validation accuracy {accuracy:.2%} after {options.epochs} epochs, {taken_s:.0f} s")
    if accuracy < options.min_accuracy:
        print(f"that is lower than --min-accuracy {options.min_accuracy:.2%}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
