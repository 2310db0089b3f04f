"""All that this package knows of the private parts of Lightning's callbacks (checked with 2.5 to 2.6.6).

Each piece says which private name it touches and why nothing public will do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch import callbacks
from lightning.pytorch.tuner.lr_finder import _LRCallback
from torch import Tensor, nn

WeightAveraging: type[pl.Callback] | None = getattr(callbacks, "WeightAveraging", None)
"""there from Lightning 2.6 on"""

AVERAGING: tuple[type[pl.Callback], ...] = (
    callbacks.StochasticWeightAveraging,
    *((WeightAveraging,) if WeightAveraging else ()),
)
"""callbacks that hold a copy of the model"""


def averaged_copies(trainer: pl.Trainer) -> Iterator[nn.Module]:
    """Yield the copies of the module that callbacks average into.

    Both kinds make theirs in ``setup``, before a strategy shards the module, and keep it in ``_average_model``, one of
    them within torch's ``AveragedModel``. Neither has a setter.
    """
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        copy = getattr(callback, "_average_model", None) if isinstance(callback, AVERAGING) else None
        if copy is not None:
            yield copy if isinstance(callback, callbacks.StochasticWeightAveraging) else copy.module


def states_of_copies(trainer: pl.Trainer, checkpoint: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the parts of a checkpoint that are state dicts of the module, each under the parameters' own names.

    ``WeightAveraging`` puts the average in the place of the model and the model under ``current_model_state``;
    ``StochasticWeightAveraging`` keeps the average in its own state. Neither name is documented.
    """
    for key in ("state_dict", "current_model_state"):
        if isinstance(checkpoint.get(key), dict):
            yield checkpoint[key]
    states: Mapping[str, Any] = checkpoint.get("callbacks") or {}
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, callbacks.StochasticWeightAveraging):
            average = (states.get(callback.state_key) or {}).get("average_model_state")
            if isinstance(average, dict):
                yield average


def forget_replaced_schedules(trainer: pl.Trainer, checkpoint: Mapping[str, Any]) -> None:
    """Leave out the user's schedules where a checkpoint comes from after ``StochasticWeightAveraging`` replaced them.

    The callback does so itself (``_clear_schedulers``) when it is restored before ``on_fit_start``, which is not so
    for strategies that restore after set-up; its state has the schedule that goes on under ``scheduler_state``.
    """
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, callbacks.StochasticWeightAveraging):
            state = (checkpoint.get("callbacks") or {}).get(callback.state_key) or {}
            if state.get("scheduler_state") is not None:
                callback._clear_schedulers(trainer)


def searches_learning_rate(trainer: pl.Trainer) -> bool:
    """Whether the fit at hand is the learning rate finder's, which puts its own ``_LRCallback`` in place of all."""
    return any(isinstance(callback, _LRCallback) for callback in trainer.callbacks)  # type: ignore[attr-defined]


def give_search_mean_losses(trainer: pl.Trainer, mean: Callable[[Tensor], Tensor]) -> None:
    """Have the learning rate finder see the loss of the global batch, not this rank's.

    It takes the loss from what ``on_train_batch_end`` is given.

    Args:
        trainer: whose fit is the finder's.
        mean: this rank's loss -> the global batch's (a collective).
    """

    def with_mean(notes_loss: Callable[..., None]) -> Callable[..., None]:
        def on_train_batch_end(trainer: Any, module: Any, outputs: Any, *args: Any) -> None:
            loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
            notes_loss(trainer, module, {"loss": mean(loss)} if isinstance(loss, Tensor) else outputs, *args)

        return on_train_batch_end

    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, _LRCallback):
            callback.on_train_batch_end = with_mean(callback.on_train_batch_end)  # type: ignore[method-assign]


def logged_step(trainer: pl.Trainer) -> int:
    """Return the step that Lightning logs what a training step logs under: its loggers' own axis.

    ``Trainer.global_step`` is one ahead of it after a step, and counts every optimizer; Lightning's own callbacks use
    the epoch loop's ``_batches_that_stepped`` likewise.
    """
    return trainer.fit_loop.epoch_loop._batches_that_stepped


def around_fetches(
    trainer: pl.Trainer,
    before: Callable[[], None],
    after: Callable[[], None],
    waiting: Callable[[], AbstractContextManager[None]],
) -> Callable[[], None]:
    """Have ``before`` and ``after`` called around each time that the fit asks its loader for a batch.

    ``_on_before_fetch`` and ``_on_after_fetch`` of the epoch loop are what Lightning's profiler hears it by; no
    callback's hook does. From 2.5.2 on the ranks agree on signals before each fetch (``_broadcast_sigterm_tensor``),
    where they wait for rank 0: ``waiting`` is entered around that.

    Returns:
        What undoes it.
    """
    loop: Any = trainer.fit_loop.epoch_loop
    original_agree: Any = getattr(loop, "_broadcast_sigterm_tensor", None)
    active = True

    def fetch_begins() -> None:
        original_before()
        if active:
            before()

    def fetch_ends() -> None:
        if active:
            after()
        original_after()

    def agree() -> None:
        with waiting():
            original_agree()

    original_before, original_after = loop._on_before_fetch, loop._on_after_fetch
    replaced = {"_on_before_fetch": fetch_begins, "_on_after_fetch": fetch_ends}
    if original_agree is not None:
        replaced["_broadcast_sigterm_tensor"] = agree
    loop.__dict__.update(replaced)

    def undo() -> None:
        nonlocal active
        active = False  # the fetcher keeps what it was given until the next epoch
        for name in replaced:
            loop.__dict__.pop(name, None)

    return undo
