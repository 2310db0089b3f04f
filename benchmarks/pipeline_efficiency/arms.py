"""The arms: hetero_pipe under Lightning, and torch's own Schedule1F1B in a plain loop, on the same emulated devices."""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, schedules
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.hetero_speedup.gate import Gate, GateCallback
from benchmarks.pipeline_efficiency.case import SAMPLES, PipelineCase
from lightning_hetero.emulation import Emulation
from lightning_hetero.models.units import Unit
from lightning_hetero.strategies import HeteroPipelineStrategy
from lightning_hetero.strategies.pipe.mail import WAITED_S

STEPS = 400


class Digits(LightningModule):
    """A classifier by the first ten values of a chain's output."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def training_step(self, batch: tuple[Tensor, Tensor], batch_index: int) -> Tensor:
        """Mean cross-entropy."""
        pixels, labels = batch
        return cross_entropy(self.model(pixels)[:, :10], labels)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW."""
        return torch.optim.AdamW(self.parameters(), lr=1e-3, fused=True)


def digits(samples: int) -> TensorDataset:
    """Scikit-learn's digits, as many times as it takes."""
    from sklearn.datasets import load_digits

    found = load_digits()
    pixels = torch.tensor(found.data, dtype=torch.float32) / 16
    rows = torch.arange(samples) % len(pixels)
    return TensorDataset(pixels[rows], torch.tensor(found.target)[rows])


def hetero_pipe(case: PipelineCase, rank: int, gate: Gate) -> None:
    """Our strategy by the case's plan."""
    strategy = HeteroPipelineStrategy(case.cluster(), plan=case.plan(), costs=case.costs(), summary=False)
    trainer = Trainer(
        accelerator="cpu",
        devices=case.world_size,
        strategy=strategy,
        max_epochs=1,
        callbacks=[GateCallback(gate)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    loader = DataLoader(digits(STEPS * case.global_batch), batch_size=case.global_batch // case.world_size)
    trainer.fit(Digits(case.model()), loader)


def torch_1f1b(case: PipelineCase, rank: int, gate: Gate) -> None:
    """``torch.distributed.pipelining.Schedule1F1B`` in a plain loop without Lightning."""
    dist.init_process_group("gloo")
    start = sum(case.cut[:rank])
    blocks = case.model()[start : start + case.cut[rank]]
    # the stage as one unit: what Python does between blocks takes no time of the device's, as in hetero_pipe
    units = [Unit("stage", blocks, True)]
    # torch looks for shapes by autograd.grad, which marks on several gradients do not bear
    emulation = Emulation(case.cluster().devices[rank], rank, units, case.stage_costs(rank), halves=True)
    emulation.start(blocks)
    _tell_of_waits(emulation)
    stage = PipelineStage(blocks, rank, case.world_size, torch.device("cpu"))
    schedule = Schedule1F1B(stage, case.micro_batches, loss_fn=_loss)
    optimizer = torch.optim.AdamW(blocks.parameters(), lr=1e-3, fused=True)
    gate.ready({"strategy": "plain loop"})
    running = gate.wait()
    last = rank == case.world_size - 1
    for pixels, labels in DataLoader(digits(STEPS * case.global_batch), batch_size=case.global_batch):
        if not running:
            break
        optimizer.zero_grad()
        emulation.resume(None)
        with emulation.step(pixels, samples=SAMPLES, chained=True):
            arguments: tuple[Any, ...] = (pixels,) if rank == 0 else ()
            schedule.step(*arguments, **({"target": labels, "losses": []} if last else {}))
        optimizer.step()
        gate.step_done()
        running = gate.wait()
    dist.destroy_process_group()


def _tell_of_waits(emulation: Emulation) -> None:
    """Tell the emulation when the schedule has waited for a message, as hetero_pipe's runtime does.

    By torch's private function, through which Schedule1F1B waits (2.14); no public hook tells of it.
    """
    wait = schedules._wait_batch_p2p

    def wait_and_tell(works: Any) -> None:
        began_s = time.perf_counter()
        wait(works)
        ended_s = time.perf_counter()
        if ended_s - began_s > WAITED_S:
            emulation.resume(ended_s)

    schedules._wait_batch_p2p = wait_and_tell


def _loss(output: Tensor, labels: Tensor) -> Tensor:
    return cross_entropy(output[:, :10], labels)
