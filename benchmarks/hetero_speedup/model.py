"""The model and the images that every arm trains on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch import LightningModule
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy, interpolate
from torch.utils.data import DataLoader, Dataset

IMAGE_PIXELS = 32


@dataclass(frozen=True)
class ViTSize:
    """Size of the vision transformer.

    Args:
        depth: number of blocks.
        width: embedding width.
        heads: attention heads.
        patch_pixels: side of a patch; 4 pixels of 32 make 64 patches, 65 tokens with the class token.
    """

    depth: int = 6
    width: int = 192
    heads: int = 3
    patch_pixels: int = 4

    @property
    def tokens(self) -> int:
        """Tokens in a sequence, the class token included."""
        return (IMAGE_PIXELS // self.patch_pixels) ** 2 + 1

    def build(self) -> VisionTransformer:
        """Return the model with fresh weights."""
        return VisionTransformer(
            img_size=IMAGE_PIXELS,
            patch_size=self.patch_pixels,
            in_chans=1,
            num_classes=10,
            embed_dim=self.width,
            depth=self.depth,
            num_heads=self.heads,
        )


class DigitClassifier(LightningModule):
    """A plain LightningModule, the same for every arm."""

    def __init__(self, size: ViTSize) -> None:
        super().__init__()
        self.model = size.build()

    def training_step(self, batch: tuple[Tensor, Tensor], batch_index: int) -> Tensor:
        """Return the mean cross-entropy of a batch of images ``(b, 1, 32, 32)`` and labels ``(b,)``."""
        images, labels = batch
        loss = cross_entropy(self.model(images), labels)
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW over all parameters."""
        return torch.optim.AdamW(self.parameters(), lr=1e-3, fused=True)


class FullyShardedDigitClassifier(DigitClassifier):
    """What a user writes for Lightning's own ModelParallelStrategy: FSDP2 on each block and on the root."""

    def configure_model(self) -> None:
        """Shard the blocks and the root over the strategy's data-parallel mesh."""
        assert self.device_mesh is not None
        shard(self.model, self.device_mesh["data_parallel"])


def shard(model: nn.Module, mesh: torch.distributed.device_mesh.DeviceMesh, **options: Any) -> None:
    """Apply FSDP2 to each block and to the root, with its defaults or other options of ``fully_shard``."""
    for block in model.blocks:  # type: ignore[union-attr]
        fully_shard(block, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)


class DigitImages(Dataset[tuple[Tensor, Tensor]]):
    """scikit-learn's 1,797 scanned digits, 8 x 8, scaled up to 32 x 32, over and over.

    Args:
        length: samples to offer; more than the digits there are, so that no epoch ends, with a short batch,
            among the measured steps.
    """

    def __init__(self, length: int) -> None:
        from sklearn.datasets import load_digits

        digits = load_digits()
        small = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
        self.images = interpolate(small, size=IMAGE_PIXELS, mode="bilinear", align_corners=False)
        self.labels = torch.tensor(digits.target)
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.images[index % len(self.images)], self.labels[index % len(self.images)]


def digit_loader(batch_size: int, global_batch: int, steps: int) -> DataLoader[tuple[Tensor, Tensor]]:
    """Return a shuffled loader with enough samples for ``steps`` global batches."""
    return DataLoader(DigitImages(global_batch * steps), batch_size=batch_size, shuffle=True)
