"""What is said of a rank once: its device, what the plan expects of it, and how fast it could be."""

from __future__ import annotations

import platform
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch

from lightning_hetero.callbacks.emulated_devices import EmulatedDevices
from lightning_hetero.cluster import Cluster
from lightning_hetero.cluster.peaks import peak_flops_per_s
from lightning_hetero.emulation import Emulation
from lightning_hetero.plan import PipelinePlan, ShardPlan
from lightning_hetero.strategies.base import HeteroStrategy
from lightning_hetero.strategies.instruments import Instruments


@dataclass(frozen=True)
class Planned:
    """What a plan expects of this rank in one optimizer step.

    Attributes:
        step_s: seconds of the step.
        busy_s: of these, of computing.
        idle_share: share of the step in which it waits.
        peak_memory_bytes: peak memory.
        samples: its batch share; None in a pipeline, where all samples pass through.
    """

    step_s: float | None
    busy_s: float | None
    idle_share: float | None
    peak_memory_bytes: int | None
    samples: int | None


@dataclass(frozen=True)
class RankFacts:
    """What a rank is.

    Attributes:
        rank: the rank.
        world_size: ranks of the run.
        device: what the device calls itself; of an emulated one, its type.
        emulated: whether a CPU behaves like that device, so that what is measured is a rehearsal.
        strategy: name of the strategy.
        dtype: that compute runs in: fp64, fp32, tf32, bf16 or fp16.
        peak_flops_per_s: dense peak of the device for it; None where none is known.
        no_peak: why there is none.
    """

    rank: int
    world_size: int
    device: str
    emulated: bool
    strategy: str
    dtype: str
    peak_flops_per_s: float | None
    no_peak: str | None

    @classmethod
    def of(cls, trainer: pl.Trainer) -> RankFacts:
        """Look at this rank."""
        strategy, root = trainer.strategy, trainer.strategy.root_device
        emulated = _emulated_type(trainer)
        dtype = compute_dtype(trainer)
        peak = no_peak = None
        if emulated is not None:
            device, no_peak = emulated, f"{emulated} is emulated by a CPU"
        elif root.type == "cuda":
            device = torch.cuda.get_device_name(root)
            peak = peak_flops_per_s(device, dtype)
            if peak is None:
                no_peak = f"no dense peak for {dtype} is known of a {device} (lightning_hetero/cluster/peaks.py)"
        else:
            device = platform.processor() or platform.machine() or root.type
            no_peak = f"no vendor states a dense peak of a {root.type.upper()}"
        name = getattr(strategy, "strategy_name", type(strategy).__name__)
        return cls(trainer.global_rank, trainer.world_size, device, emulated is not None, name, dtype, peak, no_peak)


def instruments_of(trainer: pl.Trainer) -> Instruments | None:
    """The instruments of a strategy of ours, once it is set up."""
    found = getattr(trainer.strategy, "instruments", None)
    return found if isinstance(found, Instruments) else None


def emulation_of(trainer: pl.Trainer) -> Emulation | None:
    """The emulation of this rank's device, by a strategy of ours or by :class:`EmulatedDevices`; None of a real one."""
    instruments = instruments_of(trainer)
    if instruments is not None and instruments.emulation is not None:
        return instruments.emulation
    callback = _emulating_callback(trainer)
    return None if callback is None else callback.emulation


def planned_of(trainer: pl.Trainer) -> Planned | None:
    """What the plan of a strategy of ours expects of this rank now; None without a plan."""
    plan: Any = getattr(trainer.strategy, "plan", None)
    if not isinstance(plan, ShardPlan | PipelinePlan):
        return None
    rank = trainer.global_rank
    there = rank < len(plan.predictions)
    prediction = plan.predictions[rank] if there else None
    samples = plan.batch_shares[rank] if isinstance(plan, ShardPlan) else None
    return Planned(
        plan.predicted_step_s,
        prediction.busy_s if prediction else None,
        prediction.idle_share if prediction else None,
        prediction.peak_memory_bytes if prediction else None,
        samples,
    )


def compute_dtype(trainer: pl.Trainer) -> str:
    """The type that matrix products run in: fp64, fp32, tf32, bf16 or fp16."""
    precision = str(getattr(trainer.precision_plugin, "precision", "32-true"))
    options: Any = getattr(trainer.strategy, "options", None)
    mixed = getattr(options, "mixed_precision", None)
    asked = mixed.get("param_dtype") if isinstance(mixed, dict) else getattr(mixed, "param_dtype", None)
    if asked is not None:
        precision = {"bfloat16": "bf16", "float16": "16", "float64": "64", "float32": "32"}.get(
            str(asked).removeprefix("torch."), precision
        )
    for part, dtype in (("bf16", "bf16"), ("16", "fp16"), ("64", "fp64")):
        if part in precision:
            return dtype
    on_cuda = trainer.strategy.root_device.type == "cuda"
    return "tf32" if on_cuda and torch.get_float32_matmul_precision() != "highest" else "fp32"


def _emulated_type(trainer: pl.Trainer) -> str | None:
    strategy = trainer.strategy
    cluster: Cluster | None = strategy.cluster if isinstance(strategy, HeteroStrategy) else None
    if cluster is None or not cluster.emulate:
        callback = _emulating_callback(trainer)
        cluster = None if callback is None else callback.cluster
        if cluster is None:
            return None
    return cluster.devices[trainer.global_rank].type


def _emulating_callback(trainer: pl.Trainer) -> EmulatedDevices | None:
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    return next((callback for callback in callbacks if isinstance(callback, EmulatedDevices)), None)
