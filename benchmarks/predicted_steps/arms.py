"""The runs: each strategy measures, plans and trains by itself in every one of its ranks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from benchmarks.hetero_speedup.gate import Gate, GateCallback
from benchmarks.predicted_steps.models import loader_of, module_of
from benchmarks.predicted_steps.setting import FSDP, Setting
from lightning_hetero.plan import ShardPlan, even_parts
from lightning_hetero.strategies import HeteroFSDPStrategy, HeteroPipelineStrategy

STEPS = 200
"""of the data: more than are run, so that no epoch ends among them"""

PLENTY_MIB = 2**14


def run(setting: Setting, rank: int, gate: Gate) -> dict[str, Any]:
    """Train until the gate says stop; returns what was planned and what every rank measured."""
    strategy = _strategy(setting)
    module = module_of(setting.size)
    if setting.groups:
        _shard_before(setting, module)
    _fit(setting, module, strategy, [GateCallback(gate)])
    plan = strategy.plan
    assert plan is not None
    return {
        "predicted_step_s": plan.predicted_step_s,
        "plan": plan.to_dict(),
        "ranks": [
            {
                "predicted_busy_s": planned.busy_s,
                "busy_s": measured.busy_s,
                "predicted_peak_bytes": planned.peak_memory_bytes,
                "peak_bytes": measured.peak_bytes,
                "step_s": measured.step_s,
                "emulation": None if measured.emulation is None else _kept_up(measured.emulation),
            }
            for planned, measured in zip(plan.predictions, strategy.summaries, strict=True)
        ],
    }


def _kept_up(report: Any) -> dict[str, Any]:
    return {
        "units_run": report.units_run,
        "units_late": report.units_late,
        "late_s": report.late_s,
        "target_s": report.target_s,
        "taken_s": report.taken_s,
    }


def _strategy(setting: Setting) -> HeteroFSDPStrategy | HeteroPipelineStrategy:
    make: Any = HeteroFSDPStrategy if setting.strategy == FSDP else HeteroPipelineStrategy
    made: HeteroFSDPStrategy | HeteroPipelineStrategy = make(setting.cluster(), summary=False, **setting.options)
    return made


def _shard_before(setting: Setting, module: LightningModule) -> None:
    """Shard the module in groups by a fit of one step, whose groups later ones keep."""
    cluster = replace(setting, memory_mib=(PLENTY_MIB,)).cluster()
    parts = even_parts(setting.global_batch, setting.world_size)
    plan = ShardPlan(setting.global_batch, parts, setting.groups, cluster.device_types())
    strategy = HeteroFSDPStrategy(cluster, plan, summary=False)
    _fit(setting, module, strategy, [], max_steps=1)


def _fit(
    setting: Setting, module: LightningModule, strategy: Any, callbacks: list[Callback], max_steps: int = -1
) -> None:
    trainer = Trainer(
        accelerator="cpu",
        devices=setting.world_size,
        strategy=strategy,
        max_epochs=1,
        max_steps=max_steps,
        callbacks=callbacks,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    batch_size = -(-setting.global_batch // setting.world_size)
    trainer.fit(module, loader_of(setting.size, batch_size, setting.global_batch, STEPS))
