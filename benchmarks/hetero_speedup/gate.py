"""Holds an arm between two steps, so that arms take turns within one run and pay their start-up once."""

from __future__ import annotations

import time
from multiprocessing.connection import Connection
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer


class Gate:
    """A rank's end of the line to the conductor.

    A step's time runs from the moment the gate opens to the end of its optimizer step, on the machine's
    monotonic clock. Fetching the batch lies inside, waiting for the arm's turn outside.

    Args:
        connection: to the conductor.
    """

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self._opened_s = 0.0

    def ready(self, info: dict[str, Any]) -> None:
        """Say that the next thing is the first step; ``info`` goes into the raw results."""
        self.connection.send(("ready", info))

    def wait(self) -> bool:
        """Wait for the turn; False when the arm is to end."""
        go = self.connection.recv() == "step"
        self._opened_s = time.monotonic()
        return go

    def step_done(self) -> None:
        """Report the step that began when the gate opened."""
        self.connection.send(("step", (self._opened_s, time.monotonic())))


class GateCallback(Callback):
    """The gate under a Trainer; must be the last of its callbacks."""

    def __init__(self, gate: Gate) -> None:
        self.gate = gate

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Report ready and wait for the first turn; by now a strategy has measured and planned."""
        plan = getattr(trainer.strategy, "plan", None)
        planned = {name: getattr(plan, name, None) for name in ("batch_shares", "micro_batches", "predicted_step_s")}
        self.gate.ready({"strategy": type(trainer.strategy).__name__} | planned)
        trainer.should_stop = not self.gate.wait()

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        """Report the step and wait for the next turn."""
        if trainer.strategy.root_device.type == "cuda":
            torch.cuda.synchronize()  # what the host has only launched is not done
        self.gate.step_done()
        trainer.should_stop = not self.gate.wait()
