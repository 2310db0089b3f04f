"""The arguments of hetero_pipe, as a user may give them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import BaseFinetuning, LearningRateFinder

from lightning_hetero.schedule import SCHEDULES
from lightning_hetero.strategies.callback_adapter import AVERAGING
from lightning_hetero.strategies.companions import callback_problem


@dataclass(frozen=True)
class PipelineOptions:
    """What a plan is to look like; "auto" leaves it to the planner.

    Args:
        micro_batch_size: samples.
        schedule: one of :data:`~lightning_hetero.schedule.SCHEDULES`.
        pipelines: how many.
        activation_checkpointing: whether stages that do not fit otherwise may recompute.
        given: whether the user gave a plan, which says all of this.
    """

    micro_batch_size: int | str = "auto"
    schedule: str = "auto"
    pipelines: int | str = "auto"
    activation_checkpointing: bool | str = "auto"
    given: bool = False

    def for_planner(self) -> dict[str, Any]:
        """As :func:`~lightning_hetero.planner.plan_pipeline` takes it."""
        wanted: dict[str, Any] = {"activation_checkpointing": self.activation_checkpointing is not False}
        if self.micro_batch_size != "auto":
            wanted["micro_batch_size"] = self.micro_batch_size
        if self.pipelines != "auto":
            wanted["pipelines"] = self.pipelines
        if self.schedule != "auto":
            wanted["schedules"] = (self.schedule,)
        return wanted


def pipeline_problems(options: PipelineOptions, module: Any, global_batch_size: Any) -> list[str]:
    """What is wrong with the arguments, one text each."""
    problems = []
    for name in ("micro_batch_size", "pipelines"):
        value = getattr(options, name)
        if value != "auto" and not _is_whole(value):
            problems.append(f"{name}={value!r}: give a whole number of 1 or more, or 'auto'")
    if options.schedule not in ("auto", *SCHEDULES):
        problems.append(f"schedule={options.schedule!r}: give 'auto' or one of {', '.join(SCHEDULES)}")
    if options.activation_checkpointing not in (True, False, "auto"):
        problems.append(f"activation_checkpointing={options.activation_checkpointing!r}: give True, False or 'auto'")
    if module is not None and not (isinstance(module, str) and module):
        problems.append(f"module={module!r}: give the dotted name of a submodule, such as 'model'")
    if global_batch_size is not None and not _is_whole(global_batch_size):
        problems.append(f"global_batch_size={global_batch_size!r}: give a whole number of samples, 1 or more")
    if options.given:
        names = ("micro_batch_size", "schedule", "pipelines", "activation_checkpointing")
        problems += [
            f"{name}={getattr(options, name)!r} and a plan are given: the plan says it; leave one out"
            for name in names
            if getattr(options, name) != "auto"
        ]
    return problems


def refused_callbacks(callbacks: Iterable[pl.Callback]) -> list[str]:
    """Callbacks that a pipeline cannot run, each with the reason and what to do."""
    problems = []
    for callback in callbacks:
        problem = callback_problem(callback)
        if isinstance(callback, AVERAGING):
            problem = "it averages a copy of the whole model, and each rank has a part: use hetero_fsdp"
        elif isinstance(callback, BaseFinetuning):
            problem = "it changes what is trained by the whole model's parameters: use hetero_fsdp"
        elif isinstance(callback, LearningRateFinder):
            problem = "it trains on and restores the whole model, of which each rank has a part: find the rate before"
        if problem:
            problems.append(f"{type(callback).__name__}: {problem}")
    return problems


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0
