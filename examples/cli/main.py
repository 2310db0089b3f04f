"""Trains what a YAML file says, with Lightning's own command line; the strategy and its arguments are in the file.

python examples/cli/main.py fit --config examples/cli/config.yaml
python examples/cli/main.py fit --config examples/cli/config.yaml --trainer.strategy.init_args.rebalance off
python examples/cli/main.py fit --config examples/cli/config.yaml --trainer.strategy hetero_fsdp  # on the devices here
"""

from __future__ import annotations

import timm
import torch
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.cli import LightningCLI
from sklearn.datasets import load_digits
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Subset, TensorDataset, random_split

import lightning_hetero  # noqa: F401 - the strategies' names


class Classifier(LightningModule):
    """A timm ViT for images of 8 x 8.

    Args:
        width: of the tokens.
        depth: number of blocks.
        learning_rate: of AdamW.
    """

    def __init__(self, width: int = 128, depth: int = 4, learning_rate: float = 1.5e-3) -> None:
        super().__init__()
        self.learning_rate = learning_rate
        self.model = timm.create_model(
            "vit_tiny_patch16_224",
            pretrained=False,
            img_size=8,
            patch_size=4,
            in_chans=1,
            num_classes=10,
            embed_dim=width,
            depth=depth,
            num_heads=4,
            class_token=False,
            global_pool="avg",
            weight_init="jax",
        )

    def training_step(self, batch: tuple[Tensor, Tensor], batch_index: int) -> Tensor:
        """Return the mean cross-entropy of images ``(b, 1, 8, 8)`` and labels ``(b,)``."""
        images, labels = batch
        loss = cross_entropy(self.model(images), labels)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_index: int) -> None:
        """Log the accuracy."""
        images, labels = batch
        accuracy = (self.model(images).argmax(dim=1) == labels).float().mean()
        self.log("val_accuracy", accuracy, sync_dist=True, prog_bar=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW."""
        return torch.optim.AdamW(self.parameters(), lr=self.learning_rate)


class Digits(LightningDataModule):
    """The scanned digits that scikit-learn ships.

    Args:
        batch_size: samples of a batch on one device; ``global_batch_size`` of the strategy goes before it.
    """

    def __init__(self, batch_size: int = 32) -> None:
        super().__init__()
        self.batch_size = batch_size

    def setup(self, stage: str) -> None:
        """Read the images, and split them the same way on every rank."""
        digits = load_digits()
        images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 8 - 1
        dataset = TensorDataset(images, torch.tensor(digits.target))
        self.train, self.val = random_split(dataset, [0.8, 0.2], torch.Generator().manual_seed(0))

    def train_dataloader(self) -> DataLoader[Subset[tuple[Tensor, ...]]]:
        """Shuffled training images."""
        return DataLoader(self.train, self.batch_size, shuffle=True)

    def val_dataloader(self) -> DataLoader[Subset[tuple[Tensor, ...]]]:
        """Validation images."""
        return DataLoader(self.val, self.batch_size)


def main() -> LightningCLI:
    """Run the command line."""
    return LightningCLI(Classifier, Digits, save_config_kwargs={"overwrite": True})


if __name__ == "__main__":
    main()
