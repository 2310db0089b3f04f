"""The arms: one training, with the callbacks and without."""

from __future__ import annotations

import time
from typing import Any

from lightning.pytorch import Callback
from lightning.pytorch.loggers import CSVLogger

from benchmarks.hetero_speedup.arms import equal_strategy, fit
from benchmarks.hetero_speedup.case import Case
from benchmarks.hetero_speedup.gate import Gate
from benchmarks.hetero_speedup.model import DigitClassifier
from lightning_hetero import RankEnergy, RankMemory, RankThroughput, StragglerMonitor


def one_device(case: Case, rank: int, gate: Gate) -> None:
    """A plain Trainer on one device."""
    _fit(case, "auto", gate, [])


def one_device_measured(case: Case, rank: int, gate: Gate) -> None:
    """The same with all callbacks."""
    _fit(case, "auto", gate, _callbacks())


def ddp(case: Case, rank: int, gate: Gate) -> None:
    """Lightning's DDP."""
    _fit(case, "ddp", gate, [])


def ddp_measured(case: Case, rank: int, gate: Gate) -> None:
    """The same with all callbacks."""
    _fit(case, "ddp", gate, _callbacks())


def hetero_fsdp(case: Case, rank: int, gate: Gate) -> None:
    """hetero_fsdp with equal shares."""
    _fit(case, equal_strategy(case, check_loss="off", summary=False), gate, [])


def hetero_fsdp_measured(case: Case, rank: int, gate: Gate) -> None:
    """The same with all callbacks."""
    _fit(case, equal_strategy(case, check_loss="off", summary=False), gate, _callbacks())


class Stand:
    """In the place of a device's counter, which this machine may lack: RankEnergy asks it as often."""

    label = "a stand-in of callback_cost"

    def joules(self) -> float:
        """As if it were 100 W."""
        return 100.0 * time.monotonic()

    def close(self) -> None:
        """There is nothing to close."""


def _callbacks() -> list[Callback]:
    return [RankThroughput(), RankMemory(), StragglerMonitor(), RankEnergy(source=lambda trainer: Stand())]


def _fit(case: Case, strategy: Any, gate: Gate, callbacks: list[Callback]) -> None:
    fit(case, DigitClassifier(case.size), strategy, callbacks, gate, logger=CSVLogger("."))
