"""Checkpoints through a user's CheckpointIO, also one that was written before Lightning 2.6."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.plugins import TorchCheckpointIO

from tests.companion_fits import Double
from tests.fits import Recorder
from tests.harness import WarmRanks
from tests.odd_fits import loaders, trainer_for

SHARES = (3, 1)


class Earlier(TorchCheckpointIO):
    """Knows no ``weights_only``."""

    read = 0

    def load_checkpoint(self, path: Any, map_location: Any = None) -> dict[str, Any]:  # type: ignore[override]
        self.read += 1
        return dict(torch.load(path, map_location=map_location, weights_only=False))


def resumed(path: str) -> tuple[int, int]:
    """Steps of a fit that is resumed by such a reader, and how often that read."""
    for epochs in (1, 2):
        reader = Earlier()
        options: dict[str, Any] = {"max_epochs": epochs, "plugins": [reader]}
        trainer = trainer_for(SHARES, Recorder(), options)
        trainer.fit(Double(), *loaders(SHARES, 4, 8), ckpt_path=path if epochs > 1 else None)
        trainer.save_checkpoint(path)
    return trainer.global_step, reader.read


def test_a_reader_that_knows_no_weights_only(ranks: WarmRanks, tmp_path: Path) -> None:
    for steps, read in ranks.run(2, resumed, str(tmp_path / "a.ckpt")):
        assert steps == 4
        assert read > 0
