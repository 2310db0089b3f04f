"""The random state of every part of a step, so that results depend neither on the cut nor on the schedule.

Everything that a step draws comes from one number made of (seed, step, micro-batch, part):

- the user's step, in each of its roles: torch, numpy and Python are seeded before it begins;
- each unit of the model: torch is seeded before its forward, and again where activation checkpointing repeats it;
- what follows the model in the user's step: torch is seeded when the model has returned.

So augmentation draws the same on the first stage, which runs the step up to the model, and on the last, which runs all
of it; and a unit draws its dropout the same on whatever rank it is. One device that follows the same rule draws the
same numbers; one that does not, others of the same distribution.
"""

from __future__ import annotations

import hashlib
import random
from dataclasses import dataclass

import numpy as np
import torch

STEP, AFTER, TRANSFER = "step", "after the model", "transfer"
"""parts of a step besides the units, which count from 0"""


@dataclass(frozen=True)
class Draws:
    """The random states of one micro-batch.

    Args:
        seed: of the run.
        step: batches that came before, in this kind of loop.
        micro_batch: index in the step, over all pipelines.
        kind: of the loop: "training", or an evaluation's name.
    """

    seed: int
    step: int
    micro_batch: int
    kind: str = "training"

    def number(self, part: int | str) -> int:
        """The seed of one part: a unit's index, or :data:`STEP` or :data:`AFTER`."""
        text = f"{self.seed}/{self.kind}/{self.step}/{self.micro_batch}/{part}"
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1

    def begin_step(self) -> None:
        """Seed torch, numpy and Python for the user's step."""
        self._seed_all(STEP)

    def begin_transfer(self) -> None:
        """Seed the same for the hooks that move a batch to its device, which may augment it."""
        self._seed_all(TRANSFER)

    def _seed_all(self, part: str) -> None:
        number = self.number(part)
        np.random.seed(number % 2**32)  # which takes 32 bits
        random.seed(number)
        seed_torch(number)

    def begin_unit(self, unit: int) -> None:
        """Seed torch for a unit's forward."""
        seed_torch(self.number(unit))

    def end_model(self) -> None:
        """Seed torch for what follows the model."""
        seed_torch(self.number(AFTER))


def seed_torch(number: int) -> None:
    """Seed torch on the CPU and on the current CUDA device.

    ``torch.manual_seed`` does so on every device; without any, it keeps each call and its stack for later, which takes
    longer than many a unit's forward.
    """
    torch.default_generator.manual_seed(number)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.manual_seed(number)
