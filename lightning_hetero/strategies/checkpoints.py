"""Checkpoints: one file as one device would write it, or a folder with a part from each rank of hetero_fsdp."""

from __future__ import annotations

import pickle
from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
from lightning.pytorch.plugins import CheckpointIO, TorchCheckpointIO
from torch.optim import Optimizer

from lightning_hetero import checkpoint as state_io
from lightning_hetero import swap
from lightning_hetero.errors import HeteroError
from lightning_hetero.strategies import lightning_adapter

if TYPE_CHECKING:
    from lightning_hetero.strategies.base import HeteroStrategy
    from lightning_hetero.strategies.fsdp import HeteroFSDPStrategy

STATE_KEY = "lightning_hetero"
"""key of the checkpoint under which the global batch size, the shares and how they moved are kept"""


def _if_given(weights_only: bool | None) -> dict[str, bool]:
    # before Lightning 2.6 readers do not know the argument, nor do plugins that were written then
    return {} if weights_only is None else {"weights_only": weights_only}


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
            return super().load_checkpoint(path, map_location=map_location, **_if_given(weights_only))
        if not Path(path).is_file():
            raise FileNotFoundError(f"Checkpoint file not found: {path}")
        return state_io.read_file(Path(path), weights_only)

    def remove_checkpoint(self, path: Any) -> None:
        """Delete a file or folder; under its name it is whole or gone."""
        if "://" in str(path):
            super().remove_checkpoint(path)
        else:
            swap.remove(Path(path))


class Checkpoints(ABC):
    """Saves and loads for a strategy; how a state lies on its ranks is the subclass's.

    Args:
        strategy: whose model and optimizers.
        weights_only: as for ``torch.load``.
    """

    def __init__(self, strategy: HeteroStrategy, weights_only: bool | None) -> None:
        self._strategy = strategy
        self._weights_only = weights_only
        self.default_io: CheckpointIO = AtomicCheckpointIO()

    @property
    def _module(self) -> pl.LightningModule:
        assert self._strategy.lightning_module is not None
        return self._strategy.lightning_module

    def save(self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None) -> None:
        """Write a checkpoint (all ranks call this)."""
        path = self._strategy.broadcast(path)
        lightning_adapter.drop_loader_states(checkpoint)
        checkpoint[STATE_KEY] = self._run_state()
        self._write(checkpoint, path, storage_options)

    def _write(self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None) -> None:
        if self._strategy.is_global_zero:
            self._strategy.checkpoint_io.save_checkpoint(checkpoint, path, storage_options=storage_options)

    def load(self, path: Any, weights_only: bool | None) -> dict[str, Any]:
        """Read a checkpoint of either form: one file, or a folder with a part from each rank."""
        path = self._strategy.broadcast(path)
        if "://" not in str(path):
            path = swap.find(Path(path))
        weights_only = weights_only if weights_only is not None else self._weights_only
        try:
            read = self._read_folder if state_io.is_sharded(Path(path)) else self._read_file
            state = read(path, weights_only)
        except pickle.UnpicklingError as error:
            raise HeteroError(
                f"checkpoint {path} holds more than tensors and plain values. If you trust it, pass "
                f"weights_only=False to the strategy (Lightning does not hand fit's on). torch says: {error}"
            ) from error
        saved = state.get(STATE_KEY)
        if isinstance(saved, Mapping) and saved.get("global_batch_size"):
            self._restore_run(dict(saved))
        return state

    def saved_global_batch(self, path: Any) -> int | None:
        """The global batch that a checkpoint was trained with, before anything of it is loaded (a collective).

        None where it says nothing of it, or cannot be read: :meth:`load` then says why.
        """
        found = None
        if self._strategy.is_global_zero:
            with suppress(Exception):
                found = self._run_of(path).get("global_batch_size")
        found = self._strategy.broadcast(found)
        return None if found is None else int(found)

    def _run_of(self, path: Any) -> Mapping[str, Any]:
        if "://" not in str(path):
            path = swap.find(Path(path))
            if state_io.is_sharded(path):
                return self._kept_in(state_io.read_values(path, self._weights_only))
        return self._kept_in(self._read_file(path, self._weights_only))

    def _kept_in(self, state: Mapping[str, Any]) -> Mapping[str, Any]:
        kept: Mapping[str, Any] = state.get(STATE_KEY, {})
        return kept

    def _read_file(self, path: Any, weights_only: bool | None) -> dict[str, Any]:
        return self._strategy.checkpoint_io.load_checkpoint(path, **_if_given(weights_only))

    @abstractmethod
    def model_state(self) -> dict[str, Any]:
        """Return the whole model on rank 0, nothing elsewhere (a collective)."""

    @abstractmethod
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return an optimizer's whole state on rank 0, nothing elsewhere (a collective)."""

    @abstractmethod
    def load_model(self, checkpoint: Mapping[str, Any], strict: bool) -> None:
        """Give the model the values of a checkpoint that :meth:`load` returned."""

    @abstractmethod
    def load_optimizers(self, checkpoint: Mapping[str, Any]) -> None:
        """Give the optimizers their states."""

    @abstractmethod
    def _read_folder(self, path: Path, weights_only: bool | None) -> dict[str, Any]:
        """Read what hetero_fsdp wrote in parts."""

    @abstractmethod
    def _run_state(self) -> dict[str, Any]:
        """Return what of the run is kept under STATE_KEY."""

    @abstractmethod
    def _restore_run(self, saved: dict[str, Any]) -> None:
        """Go on with what was kept."""


class ShardCheckpoints(Checkpoints):
    """Those of hetero_fsdp: one file as one device would write it, or a folder with a part from each rank.

    Args:
        strategy: whose model and optimizers.
        sharded: write a folder with a part from each rank.
        weights_only: as for ``torch.load``.
    """

    _strategy: HeteroFSDPStrategy

    def __init__(self, strategy: HeteroFSDPStrategy, sharded: bool, weights_only: bool | None) -> None:
        super().__init__(strategy, weights_only)
        self._sharded = sharded
        self._loaded_in_place = False

    def model_state(self) -> dict[str, Any]:
        """Return the whole model on rank 0 (one file), or nothing where shards are written (a collective)."""
        self._strategy.companions.check_again()
        return {} if self._sharded else self._gathered(self._module.state_dict())

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return an optimizer's whole state on rank 0, or nothing where shards are written (a collective)."""
        optimizer = getattr(optimizer, "optimizer", optimizer)  # a LightningOptimizer holds the real one
        return {} if self._sharded else self._gathered(optimizer.state_dict())

    def _gathered(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return the state whole on rank 0, gathered by its shard group alone."""
        if not self._strategy.groups.is_first:
            return {}
        gathered: dict[str, Any] = state_io.gather_state(state, self._strategy.is_global_zero)
        return gathered

    def _run_state(self) -> dict[str, Any]:
        plan = self._strategy.plan
        return {
            "global_batch_size": self._strategy.global_batch_size,
            "batch_shares": list(plan.batch_shares) if plan is not None else None,
            **self._strategy.rebalancer.state(),
        }

    def _write(self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None) -> None:
        strategy = self._strategy
        if not self._sharded:
            checkpoint = state_io.with_whole_tensors(checkpoint, strategy.is_global_zero)  # what callbacks put in
            super()._write(checkpoint, path, storage_options)
            return
        if storage_options is not None:
            raise HeteroError("storage_options do not apply to save_distributed_checkpoint=True: leave them out")
        checkpoint.pop("state_dict", None)
        checkpoint.pop("optimizer_states", None)
        state_io.write_sharded(
            checkpoint,
            self._module,
            strategy.optimizers,
            Path(path),
            group=strategy.groups.shard_group if strategy.groups.crosses else None,
            writes=strategy.groups.is_first or not strategy.groups.crosses,
        )

    def _read_file(self, path: Any, weights_only: bool | None) -> dict[str, Any]:
        self._loaded_in_place = False
        state = super()._read_file(path, weights_only)
        self._strategy.companions.restore(state)
        return state

    def _read_folder(self, path: Path, weights_only: bool | None) -> dict[str, Any]:
        """Read a folder's plain values, and load its tensors in place at once."""
        self._loaded_in_place = True
        groups = self._strategy.groups
        group = groups.shard_group if groups.crosses else None
        state = state_io.read_sharded(self._module, self._strategy.optimizers, path, weights_only, group=group)
        return {"state_dict": {}, "optimizer_states": [], **state}

    def _restore_run(self, saved: dict[str, Any]) -> None:
        self._strategy.restore_global_batch(int(saved["global_batch_size"]))
        self._strategy.rebalancer.restore(saved)

    def load_model(self, checkpoint: Mapping[str, Any], strict: bool) -> None:
        """Give each rank its shards of what :meth:`load` returned."""
        if not self._loaded_in_place:
            state_io.load_model_state(self._module, checkpoint["state_dict"], strict)

    def load_optimizers(self, checkpoint: Mapping[str, Any]) -> None:
        """Give each rank its shards of the optimizers' states."""
        if self._loaded_in_place:
            return
        self._strategy.companions.before_optimizers_load()
        for optimizer, state in zip(self._strategy.optimizers, checkpoint["optimizer_states"], strict=True):
            state_io.load_optimizer_state(optimizer, state)
