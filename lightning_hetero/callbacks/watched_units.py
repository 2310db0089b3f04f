"""The units of a model as a callback may watch them, under any strategy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities import rank_zero_info
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

from lightning_hetero.callbacks.run_facts import emulation_of, instruments_of
from lightning_hetero.models.units import Unit, find_units
from lightning_hetero.profiler.marks import UnitMarks
from lightning_hetero.profiler.step_timeline import StepTimeline


class WatchedUnits:
    """Has a timeline told of units, by the marks that are there already or by marks of its own.

    A strategy of ours has marks, and an emulation has, which sleeps within them: what is told from there includes the
    sleep. Elsewhere the units are those of the module before it was wrapped, and the marks stand within the wrappers'
    collectives.
    """

    def __init__(self) -> None:
        self._units: tuple[Unit, ...] = ()
        self._marks: UnitMarks | None = None

    def find(self, module: nn.Module) -> None:
        """Look for units in a module that is not wrapped yet; it may have no parameters yet either."""
        self._units = find_units(module)

    def listen(self, trainer: pl.Trainer, module: nn.Module, timeline: StepTimeline) -> Callable[[], None]:
        """Begin to tell, once the model is wrapped; returns what ends it."""
        instruments = instruments_of(trainer)
        if instruments is not None:
            instruments.listen(timeline)
            return lambda: instruments.unlisten(timeline)
        emulation = emulation_of(trainer)
        if emulation is not None:
            emulation.listen(timeline)
            return lambda: emulation.unlisten(timeline)
        self._marks = marks = UnitMarks(_outside_compiled(self._units or find_units(module), module), [timeline])
        marks.attach()
        return marks.detach

    def close(self) -> None:
        """End what is open in marks of its own; the step has ended."""
        if self._marks is not None:
            self._marks.close()


def is_sharded(trainer: pl.Trainer, module: nn.Module) -> bool:
    """Whether parameters are gathered between units, by FSDP2 or FSDP1."""
    kinds = (FSDPModule, FullyShardedDataParallel)
    model: Any = trainer.strategy.model
    return isinstance(model, kinds) or any(isinstance(each, kinds) for each in module.modules())


def _outside_compiled(units: tuple[Unit, ...], root: nn.Module) -> tuple[Unit, ...]:
    """The units, with a compiled module in place of those inside it: hooks within it would break its graph."""
    compiled = {name: module for name, module in root.named_modules() if "_orig_mod" in module._modules}
    inside = {id(each) for module in compiled.values() for each in module.modules()}
    lost = [
        name or "the module"
        for name, module in root.named_modules()
        if getattr(module, "_compiled_call_impl", None) is not None
    ]
    for name in lost:
        part = root.get_submodule("" if name == "the module" else name)
        inside |= {id(each) for each in part.modules()}
    if lost:
        rank_zero_info(
            f"the units inside {', '.join(lost)} are not timed, since module.compile() compiles hooks too: "
            "torch.compile(module) in its place is timed as one unit"
        )
    kept = [unit for unit in units if id(unit.module) not in inside]
    return (*kept, *(Unit(name, module, is_block=False) for name, module in compiled.items()))
