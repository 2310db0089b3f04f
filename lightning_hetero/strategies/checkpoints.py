"""Checkpoints of a sharded run: one file as one device would write it, or a folder with a part from each rank."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning.pytorch.plugins import CheckpointIO, TorchCheckpointIO
from torch.optim import Optimizer

from lightning_hetero import checkpoint as state_io
from lightning_hetero import swap
from lightning_hetero.errors import HeteroError
from lightning_hetero.strategies import lightning_adapter

if TYPE_CHECKING:
    from lightning_hetero.strategies.fsdp import HeteroFSDPStrategy

STATE_KEY = "lightning_hetero"
"""key of the checkpoint under which the global batch size, the shares and how they moved are kept"""


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes local files under a temporary name beside their own and renames them when they are whole.

    Lightning's own writes its temporary file in the system's temporary folder, from where a move is not atomic.
    """

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None) -> None:
        """Write ``checkpoint`` to ``path``."""
        if storage_options is None and "://" not in str(path):
            state_io.write_file(checkpoint, Path(path))
        else:
            super().save_checkpoint(checkpoint, path, storage_options=storage_options)

    def load_checkpoint(self, path: Any, map_location: Any = "cpu", weights_only: bool | None = None) -> dict[str, Any]:
        """Read ``path``, by memory map where it is a local file."""
        if "://" in str(path):
            return super().load_checkpoint(path, map_location=map_location, weights_only=weights_only)
        if not Path(path).is_file():
            raise FileNotFoundError(f"Checkpoint file not found: {path}")
        return state_io.read_file(Path(path), weights_only)

    def remove_checkpoint(self, path: Any) -> None:
        """Delete a file or folder; under its name it is whole or gone."""
        if "://" in str(path):
            super().remove_checkpoint(path)
        else:
            swap.remove(Path(path))


class Checkpoints:
    """Saves and loads for a strategy.

    Args:
        strategy: whose model and optimizers.
        sharded: write a folder with a part from each rank.
        weights_only: as for ``torch.load``.
    """

    def __init__(self, strategy: HeteroFSDPStrategy, sharded: bool, weights_only: bool | None) -> None:
        self._strategy = strategy
        self._sharded = sharded
        self._weights_only = weights_only
        self._loaded_in_place = False
        self.default_io: CheckpointIO = AtomicCheckpointIO()

    def model_state(self) -> dict[str, Any]:
        """Return the whole model on rank 0 (one file), or nothing where shards are written (a collective)."""
        self._strategy.companions.check_again()
        module = self._strategy.lightning_module
        assert module is not None
        if self._sharded:
            return {}
        return self._gathered(module.state_dict())

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return an optimizer's whole state on rank 0, or nothing where shards are written (a collective)."""
        optimizer = getattr(optimizer, "optimizer", optimizer)  # a LightningOptimizer holds the real one
        if self._sharded:
            return {}
        return self._gathered(optimizer.state_dict())

    def _gathered(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return the state whole on rank 0, gathered by its shard group alone."""
        if not self._strategy.groups.is_first:
            return {}
        gathered: dict[str, Any] = state_io.gather_state(state, self._strategy.is_global_zero)
        return gathered

    def save(self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None) -> None:
        """Write a checkpoint (all ranks call this)."""
        strategy = self._strategy
        path = strategy.broadcast(path)
        plan = strategy.plan
        lightning_adapter.drop_loader_states(checkpoint)
        checkpoint[STATE_KEY] = {
            "global_batch_size": strategy.global_batch_size,
            "batch_shares": list(plan.batch_shares) if plan is not None else None,
            **strategy.rebalancer.state(),
        }
        if not self._sharded:
            checkpoint = state_io.with_whole_tensors(checkpoint, strategy.is_global_zero)  # what callbacks put in
            if strategy.is_global_zero:
                strategy.checkpoint_io.save_checkpoint(checkpoint, path, storage_options=storage_options)
            return
        if storage_options is not None:
            raise HeteroError("storage_options do not apply to save_distributed_checkpoint=True: leave them out")
        checkpoint.pop("state_dict", None)
        checkpoint.pop("optimizer_states", None)
        assert strategy.lightning_module is not None
        state_io.write_sharded(
            checkpoint,
            strategy.lightning_module,
            strategy.optimizers,
            Path(path),
            group=strategy.groups.shard_group if strategy.groups.crosses else None,
            writes=strategy.groups.is_first or not strategy.groups.crosses,
        )

    def load(self, path: Any, weights_only: bool | None) -> dict[str, Any]:
        """Read a checkpoint of either form; the tensors of a folder are loaded in place at once."""
        strategy = self._strategy
        path = strategy.broadcast(path)
        if "://" not in str(path):
            path = swap.find(Path(path))
        weights_only = weights_only if weights_only is not None else self._weights_only
        self._loaded_in_place = state_io.is_sharded(Path(path))
        try:
            if self._loaded_in_place:
                assert strategy.lightning_module is not None
                state: dict[str, Any] = state_io.read_sharded(
                    strategy.lightning_module,
                    strategy.optimizers,
                    Path(path),
                    weights_only,
                    group=strategy.groups.shard_group if strategy.groups.crosses else None,
                )
                state = {"state_dict": {}, "optimizer_states": [], **state}
            else:
                state = strategy.checkpoint_io.load_checkpoint(path, weights_only=weights_only)
                strategy.companions.restore(state)
        except pickle.UnpicklingError as error:
            raise HeteroError(
                f"checkpoint {path} holds more than tensors and plain values. If you trust it, pass "
                f"weights_only=False to the strategy (Lightning does not hand fit's on). torch says: {error}"
            ) from error
        saved = state.get(STATE_KEY)
        if isinstance(saved, Mapping) and saved.get("global_batch_size"):
            strategy.restore_global_batch(int(saved["global_batch_size"]))
            strategy.rebalancer.restore(dict(saved))
        return state

    def load_model(self, checkpoint: Mapping[str, Any], strict: bool) -> None:
        """Give the model the values of a checkpoint that :meth:`load` returned."""
        if not self._loaded_in_place:
            assert self._strategy.lightning_module is not None
            state_io.load_model_state(self._strategy.lightning_module, checkpoint["state_dict"], strict)

    def load_optimizers(self, checkpoint: Mapping[str, Any]) -> None:
        """Give the optimizers their states."""
        if self._loaded_in_place:
            return
        self._strategy.companions.before_optimizers_load()
        for optimizer, state in zip(self._strategy.optimizers, checkpoint["optimizer_states"], strict=True):
            state_io.load_optimizer_state(optimizer, state)
