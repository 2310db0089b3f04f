"""What runs beside a fit and knows the model: averages of it, searches, checkpoints; kept exact, or refused."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import (
    BaseFinetuning,
    BatchSizeFinder,
    GradientAccumulationScheduler,
    ModelCheckpoint,
    ModelPruning,
    OnExceptionCheckpoint,
)
from lightning.pytorch.trainer.states import TrainerFn
from torch import nn
from torch.distributed.fsdp import FSDPModule

from lightning_hetero.checkpoint import shard_state
from lightning_hetero.errors import UnsupportedError, raise_all
from lightning_hetero.strategies import callback_adapter

if TYPE_CHECKING:
    from lightning_hetero.strategies.fsdp import HeteroFSDPStrategy

_ONE_FILE = "leave save_distributed_checkpoint out: one file has it"


class Companions:
    """The callbacks of the strategy's trainer, as far as they know the model.

    Args:
        strategy: whose trainer.
        sharded: whether checkpoints are folders with a part from each rank.
    """

    def __init__(self, strategy: HeteroFSDPStrategy, sharded: bool) -> None:
        self._strategy = strategy
        self._sharded = sharded
        self.averages = False
        self._refusal: UnsupportedError | None = None

    @property
    def _module(self) -> pl.LightningModule:
        assert self._strategy.lightning_module is not None
        return self._strategy.lightning_module

    def check(self) -> None:
        """Refuse what cannot work, before there is a process group.

        Raises:
            UnsupportedError: naming every such callback, with the reason and what to do.
        """
        trainer: Any = self._module.trainer
        fitting = trainer.state.fn == TrainerFn.FITTING
        problems = []
        for callback in trainer.callbacks:
            problem = callback_problem(callback) or (self._model_problem(callback) if fitting else None)
            if problem:
                problems.append(f"{type(callback).__name__}: {problem}")
        try:
            raise_all(UnsupportedError, "hetero_fsdp cannot work with these callbacks", problems)
        except UnsupportedError as error:
            self._refusal = error
            raise
        if isinstance(self._module, FSDPModule):
            # StochasticWeightAveraging copies the model before an evaluation, too, and never looks at that copy
            self._module.__dict__["__deepcopy__"] = lambda memo: self._module

    def check_again(self) -> None:
        """Refuse once more: a callback that saves on exceptions would fail over a model that is not sharded yet."""
        if self._refusal is not None:
            raise self._refusal

    def _model_problem(self, callback: pl.Callback) -> str | None:
        averages = isinstance(callback, callback_adapter.AVERAGING)
        if averages and isinstance(self._module, FSDPModule):
            return (
                "it copies the model before a fit, and this one is sharded already, by an earlier fit: build the "
                "module anew and load a checkpoint into it"
            )
        if self._sharded and (averages or isinstance(callback, BaseFinetuning)):
            what = "the average" if averages else "parameter groups that it added"
            return f"{what} would not be in a folder of shards; {_ONE_FILE}"
        return None

    def join(self) -> None:
        """Give the averaged copies this rank's shards, now that the model is sharded."""
        self._module.__dict__.pop("__deepcopy__", None)
        copies = list(callback_adapter.averaged_copies(self._module.trainer))
        self.averages = bool(copies)
        for copy in copies:
            if copy is not self._module:
                _shard_copy(copy, self._module)

    def restore(self, checkpoint: dict[str, Any]) -> None:
        """Cut what a checkpoint of one file holds for the copies into this rank's shards, in place."""
        trainer = self._module.trainer
        if not self.averages:
            return
        for state in callback_adapter.states_of_copies(trainer, checkpoint):
            state.update(shard_state(state, self._module))
        callback_adapter.forget_replaced_schedules(trainer, checkpoint)

    def before_optimizers_load(self) -> None:
        """Let callbacks add the parameter groups that they had added before the checkpoint was written."""
        trainer: Any = self._module.trainer
        for callback in trainer.callbacks:
            if isinstance(callback, BaseFinetuning):
                # restored after on_fit_start, where it would do so: does nothing unless it was restored
                callback.on_fit_start(trainer, self._module)

    def begin_in_mid_epoch(self) -> None:
        """Let callbacks set up the epoch that is resumed: Lightning calls their hook at the start of an epoch only."""
        trainer: Any = self._module.trainer
        for callback in trainer.callbacks:
            if isinstance(callback, GradientAccumulationScheduler):
                callback.on_train_epoch_start(trainer, self._module)

    @property
    def searching(self) -> bool:
        """Whether the fit at hand is the learning rate finder's."""
        return callback_adapter.searches_learning_rate(self._module.trainer)

    def begin_search(self) -> None:
        """Let the learning rate finder see the losses of global batches."""
        callback_adapter.give_search_mean_losses(self._module.trainer, self._strategy.mean_of_losses)


def callback_problem(callback: pl.Callback) -> str | None:
    """Why no strategy can work with a callback, and what to do; None where it can."""
    if isinstance(callback, BatchSizeFinder):
        return (
            "it tries batches until one device is out of memory, and Lightning runs it on one device only; here shares "
            "are planned under each device's memory: set global_batch_size and leave it out"
        )
    if isinstance(callback, ModelPruning):
        return "it masks parameters by their whole values, and each rank holds a part: prune on one device afterwards"
    if isinstance(callback, OnExceptionCheckpoint) or getattr(callback, "save_on_exception", False):
        option = "save_on_exception=True" if isinstance(callback, ModelCheckpoint) else "it"
        return (
            f"{option} gathers a checkpoint from all ranks after one of them has failed, so they would wait for each "
            "other until the timeout: save as you go, with ModelCheckpoint(every_n_train_steps=...)"
        )
    return None


def _shard_copy(copy: nn.Module, module: nn.Module) -> None:
    """Replace the parameters and buffers of an unsharded copy by copies of the module's own, ties included."""
    made: dict[Any, nn.Parameter] = {}
    for name, child in copy.named_modules():
        own = module.get_submodule(name)
        for key, parameter in list(child.named_parameters(recurse=False, remove_duplicate=False)):
            like = getattr(own, key)
            if like not in made:
                made[like] = nn.Parameter(like.detach().clone(), requires_grad=parameter.requires_grad)
            setattr(child, key, made[like])
        for key, _ in list(child.named_buffers(recurse=False, remove_duplicate=False)):
            setattr(child, key, getattr(own, key).detach().clone())
