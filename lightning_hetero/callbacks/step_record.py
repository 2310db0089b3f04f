"""One optimizer step of one rank, and who adds to what is written of it."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

import lightning.pytorch as pl

from lightning_hetero.profiler.model_flops import StepFlops
from lightning_hetero.profiler.step_timeline import StepParts


@dataclass
class StepRecord:
    """One optimizer step of one rank.

    Attributes:
        step: optimizer steps that are done with it.
        epoch: the epoch that it is in.
        batches: training batches of it; more than one where they accumulate.
        samples: of this rank; of a pipeline's, its part by FLOPs.
        parts: where its time went; None until the device has run it.
        flops: of this rank in it; None where they could not be counted.
        interrupted: whether a validation or an epoch's end was within, which is not counted.
        values: what callbacks have added, for the step's line.
    """

    step: int
    epoch: int
    batches: int = 0
    samples: float = 0.0
    parts: StepParts | None = None
    flops: StepFlops | None = None
    interrupted: bool = False
    hidden_s: float = 0.0
    values: dict[str, Any] = field(default_factory=dict)

    def line(self) -> dict[str, Any]:
        """What is written of it."""
        assert self.parts is not None
        line: dict[str, Any] = {
            "step": self.step,
            "epoch": self.epoch,
            "time": time.time(),
            "batches": self.batches,
            "samples": self.samples,
            "step_s": self.parts.step_s,
            **asdict(self.parts),
            "idle_share": self.parts.idle_share,
        }
        if self.interrupted:
            line["interrupted"] = True
        return {**line, **self.values}


class Participant(Protocol):
    """A callback that takes part."""

    folder: str | None
    flops_per_sample: float | None

    def step_is_complete(self, trainer: pl.Trainer, record: StepRecord) -> None:
        """Hear of a step, oldest first, when its seconds are known; add values to its line."""

    def step_is_over(self, trainer: pl.Trainer, step: int) -> None:
        """Hear that the trainer has done an optimizer step; ranks may come together here."""
