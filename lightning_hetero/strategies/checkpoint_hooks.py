"""The checkpoint hooks of a Lightning strategy, handed on to Checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning.pytorch.plugins import CheckpointIO
from lightning.pytorch.strategies import ParallelStrategy
from torch.optim import Optimizer

from lightning_hetero.strategies.checkpoints import Checkpoints


class CheckpointHooks(ParallelStrategy):
    """What Lightning asks a strategy about checkpoints; ``_checkpoints`` answers."""

    _checkpoints: Checkpoints

    @property
    def checkpoint_io(self) -> CheckpointIO:
        """The user's plugin, else one that renames whole files into place."""
        return self._checkpoints.default_io if self._checkpoint_io is None else super().checkpoint_io

    @checkpoint_io.setter
    def checkpoint_io(self, io: CheckpointIO) -> None:
        self._checkpoint_io = io

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """Each rank loads its own shards, so the model has to be sharded first."""
        return True

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the whole model on rank 0, {} elsewhere (a collective)."""
        return self._checkpoints.model_state()

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return an optimizer's whole state on rank 0, {} elsewhere (a collective)."""
        return self._checkpoints.optimizer_state(optimizer)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None) -> None:
        """Write a checkpoint; it is whole under its name, or not there."""
        self._checkpoints.save(checkpoint, filepath, storage_options)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Read a checkpoint that any plan, or one device, wrote."""
        return self._checkpoints.load(checkpoint_path, weights_only)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Give each rank its shards."""
        self._checkpoints.load_model(checkpoint, strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Give each rank its shards of the optimizers' states."""
        self._checkpoints.load_optimizers(checkpoint)
