"""The chain of the model at hand: one that is known, or one that is found by exporting the model."""

from __future__ import annotations

from typing import TYPE_CHECKING

import lightning.pytorch as pl
import torch
from torch import Tensor, nn

from lightning_hetero.errors import UnsupportedError
from lightning_hetero.models.chain import UnitChain
from lightning_hetero.strategies.pipe.call import Call, find_call
from lightning_hetero.strategies.pipe.placement import Placement, find_model, size_of
from lightning_hetero.strategies.pipe.planning import Basis, find_basis

if TYPE_CHECKING:
    from lightning_hetero.strategies.pipeline import HeteroPipelineStrategy

_SAMPLES = 2  # of an exported model, until a plan says how large micro-batches are


class Splitting:
    """How a module's model is cut into units.

    Args:
        strategy: whose module.
        trainer: whose loaders tell with what an unknown model is called.
        module: the user's, on all ranks alike.
        name: of the submodule to split; None finds it.

    Raises:
        UnsupportedError: if the model is not known and cannot be exported either: with both reasons.
    """

    def __init__(
        self, strategy: HeteroPipelineStrategy, trainer: pl.Trainer, module: pl.LightningModule, name: str | None
    ) -> None:
        self._strategy, self._trainer, self._module = strategy, trainer, module
        self._call: Call | None = None  # of an exported model
        self._basis: Basis | None = None
        try:
            self._name, self._model, chain = find_model(module, name)
        except UnsupportedError as error:
            self._name, self._model = _child(module, name, error)
            self._call = find_call(strategy, trainer, self._model, self._name)
            chain = self._exported(_SAMPLES, error)
        self.placement = Placement(module, self._name, self._model, chain)

    def basis(self) -> Basis:
        """What a plan is made from; measured when it is first asked for (a collective)."""
        if self._basis is None:
            self._basis = find_basis(self._strategy, self._trainer, self.placement, self._call)
        return self._basis

    def for_micro_batches(self, samples: int) -> Placement:
        """The placement for micro-batches of so many samples: an exported model has their number in it."""
        if self._call is not None:
            chain = self._exported(samples, None)
            self.placement = Placement(self._module, self._name, self._model, chain)
        return self.placement

    def _exported(self, samples: int, unknown: UnsupportedError | None) -> UnitChain:
        assert self._call is not None
        from lightning_hetero.models.chains.exported import exported_chain  # torch.export takes a while to load

        args, kwargs = self._call.arguments(samples, _dtype_of(self._model))
        try:
            return exported_chain(self._model, args, kwargs)
        except UnsupportedError as error:
            if unknown is None:
                raise
            raise UnsupportedError(f"{unknown}\nExporting it was tried, too: {error}") from error


def _child(module: nn.Module, name: str | None, error: UnsupportedError) -> tuple[str, nn.Module]:
    if name is not None:
        if name not in dict(module.named_modules()):
            raise error
        return name, module.get_submodule(name)
    children = [(size_of(child), own, child) for own, child in module.named_children()]
    if not any(size for size, _, _ in children):
        raise error
    _, own, child = max(children, key=lambda entry: entry[0])
    return own, child


def _dtype_of(model: nn.Module) -> torch.dtype:
    floats: list[Tensor] = [p for p in model.parameters() if p.is_floating_point()]
    return floats[0].dtype if floats else torch.get_default_dtype()
