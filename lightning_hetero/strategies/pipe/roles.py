"""The user's step in two roles: up to the model, to catch what it is called with, and whole, with its output put in.

The step is run as it is. Only what ``self.model(...)`` does is replaced for the time::

    first stage   catch    the model raises what it was called with, and the step ends there
    last stage    answer   the model returns the output that the pipeline made
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as pl
from torch import nn

from lightning_hetero.errors import HeteroError, UnsupportedError


class _Caught(BaseException):
    """Carries the arguments of the model's call out of the user's step; no ``except Exception`` of theirs holds it."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        super().__init__()
        self.arguments = args, kwargs


_COLLECTIVES = ("all_gather", "reduce", "broadcast", "barrier", "reduce_boolean_decision")


@contextmanager
def alone(strategy: Any) -> Iterator[None]:
    """User code that runs meanwhile runs on this rank alone, so that a collective of the strategy is refused."""

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise UnsupportedError(ALONE)

    if strategy.world_size > 1:
        strategy.__dict__.update(dict.fromkeys(_COLLECTIVES, refuse))
    try:
        yield
    finally:
        for name in _COLLECTIVES:
            strategy.__dict__.pop(name, None)


ALONE = (
    "a step calls a collective (self.all_gather, a metric's compute(), ...), which would wait for ranks that do not "
    "run it: a pipeline runs training_step on its last stage alone, and every step up to the model on its first. Log "
    "the value or the torchmetrics object itself, or call it in on_train_epoch_end, or after the model in "
    "validation_step"
)
"""why a collective is refused"""


class Roles:
    """Runs a module's steps without running its model.

    Args:
        module: the user's.
        model: the submodule that is split.
        name: of the model in the module.
    """

    def __init__(self, module: pl.LightningModule, model: nn.Module, name: str) -> None:
        self._module, self._model, self._name = module, model, name

    def catch(self, step: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Run ``step`` up to its call of the model; return with what that was called.

        Raises:
            UnsupportedError: if the step never calls it.
        """

        def raise_arguments(*model_args: Any, **model_kwargs: Any) -> Any:
            raise _Caught(model_args, model_kwargs)

        with self._replaced(raise_arguments):
            try:
                step(*args, **kwargs)
            except _Caught as caught:
                return caught.arguments
            except HeteroError:
                raise
            except Exception as error:
                if "meta" not in str(error):
                    raise  # the user's own
                raise UnsupportedError(
                    f"{_name_of(step)} failed before it called self.{self._name}(...) ({type(error).__name__}: "
                    f"{error}). On this stage the model is there in part: call it as a whole, once, and none of its "
                    "parts or other methods (forward_features, ...)"
                ) from error
        raise UnsupportedError(
            f"{_name_of(step)} never calls self.{self._name}(...), which is what hetero_pipe splits: call it once in "
            'every step, or name the submodule to split, HeteroPipelineStrategy(module="...")'
        )

    def answer(self, give: Callable[[], Any], step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run ``step`` with what ``give`` returns in place of the model's output; return what the step returns.

        Raises:
            UnsupportedError: if it calls the model twice, or never.
        """
        calls = 0

        def give_output(*model_args: Any, **model_kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls > 1:
                raise UnsupportedError(
                    f"{_name_of(step)} calls self.{self._name}(...) twice: a pipeline runs the model once a step. Put "
                    "both inputs into one batch (torch.cat), or use hetero_fsdp"
                )
            return give()

        with self._replaced(give_output):
            result = step(*args, **kwargs)
        if not calls:
            raise UnsupportedError(
                f"{_name_of(step)} did not call self.{self._name}(...) this time: call it every time"
            )
        return result

    @contextmanager
    def _replaced(self, forward: Callable[..., Any]) -> Iterator[None]:
        # an attribute of the instance hides the method; hooks on the model run as ever
        before = self._model.__dict__.get("forward")
        self._model.__dict__["forward"] = forward
        try:
            yield
        finally:
            if before is None:
                self._model.__dict__.pop("forward", None)
            else:
                self._model.__dict__["forward"] = before


def _name_of(step: Callable[..., Any]) -> str:
    return getattr(step, "__name__", "the step")
