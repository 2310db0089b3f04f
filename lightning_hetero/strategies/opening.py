"""What hetero_fsdp does at the start of a fit: check the loss, measure the ranks, plan."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, fields, replace
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import nn

from lightning_hetero.data import UnevenLoader
from lightning_hetero.errors import UnsupportedError, raise_all
from lightning_hetero.kept import KeptLoader
from lightning_hetero.plan import ShardPlan
from lightning_hetero.profiler.cache import CacheKey, MeasurementCache
from lightning_hetero.profiler.devices import free_bytes
from lightning_hetero.strategies import lightning_adapter, planning
from lightning_hetero.strategies.first_batch import FirstBatch
from lightning_hetero.strategies.loss_check import (
    batch_norm_problem,
    check_mean_loss,
    combine_findings,
    synchronised_norm_problems,
)
from lightning_hetero.strategies.optimizer_probe import optimizer_s
from lightning_hetero.strategies.probe import RankMeasurement, measure_rank

if TYPE_CHECKING:
    from lightning_hetero.strategies.fsdp import HeteroFSDPStrategy

CHECK_SAMPLES = 8
"""samples on which the loss is checked"""


class Opening:
    """Looks at the first samples of a fit with the user's own step.

    Args:
        strategy: whose ranks are measured; what is found is put into its ``plan`` and ``flops_per_sample``.
        check_loss: "warn", "error" or "off".
        count_flops: whether the summary will want the FLOPs of a sample.
    """

    def __init__(self, strategy: HeteroFSDPStrategy, check_loss: str, count_flops: bool) -> None:
        self._strategy = strategy
        self._check_loss = check_loss
        self._count_flops = count_flops

    def run(self, loader: UnevenLoader | KeptLoader | None) -> None:
        """Check, measure and plan, as far as the loader allows (a collective).

        Raises:
            UnsupportedError: where the loss or a layer does not go with the plan.
        """
        trainer, strategy = self._module.trainer, self._strategy
        if isinstance(loader, UnevenLoader):
            strategy.instruments.count(strategy.optimizers)
            loader.skip(trainer.current_epoch, lightning_adapter.batches_to_skip(trainer))
            self._measure(loader)
        elif isinstance(loader, KeptLoader) and self._check_loss != "off":
            batch = loader.first_batch(trainer.current_epoch)
            if min(strategy.gather_numbers(int(batch is not None))) and self._module.automatic_optimization:
                self._check(self._first_batch(None), strategy.batch_to_device(batch))
        if strategy.plan is not None:
            self._check_synchronised_norms(strategy.plan)

    @property
    def _module(self) -> pl.LightningModule:
        assert self._strategy.lightning_module is not None
        return self._strategy.lightning_module

    def _measure(self, loader: UnevenLoader) -> None:
        strategy, global_batch_size = self._strategy, loader.uneven.global_batch_size
        if not self._module.automatic_optimization:
            rank_zero_info("hetero_fsdp: with manual optimization the loss is not checked and ranks are not measured")
            strategy.plan = strategy.plan or strategy.declared_plan(global_batch_size)
            return
        first = self._first_batch(loader)
        if self._check_loss != "off":
            self._check(first, first.batch(CHECK_SAMPLES))
        if self._count_flops:
            strategy.flops_per_sample = first.count_flops()
        if strategy.plan is None:
            strategy.plan = self._measured_plan(first, global_batch_size)

    def _first_batch(self, loader: UnevenLoader | None) -> FirstBatch:
        strategy = self._strategy
        return FirstBatch(
            self._module,
            loader,
            strategy.global_rank,
            to_device=strategy.batch_to_device,
            context=strategy.precision_plugin.train_step_context,
            instruments=strategy.instruments,
            reduction=strategy.gradients,
        )

    def _check(self, first: FirstBatch, batch: Any) -> None:
        findings = [
            check_mean_loss(first.loss_of, batch, halves=True, weight_of=self._weight_of()),
            batch_norm_problem(first.batch_norms(batch)),
        ]
        for finding in (combine_findings(rank) for rank in zip(*self._strategy.gather_objects(findings), strict=True)):
            if finding is None:
                continue
            if self._check_loss == "error":
                raise UnsupportedError(f"{finding}. check_loss='warn' or 'off' trains all the same")
            rank_zero_warn(f"hetero_fsdp: {finding}. check_loss='off' silences this")

    def _check_synchronised_norms(self, plan: ShardPlan) -> None:
        layers = {name: child for name, child in self._module.named_modules() if isinstance(child, nn.SyncBatchNorm)}
        names = [name for name, layer in layers.items() if layer.training]
        shown = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
        if names:
            raise_all(
                UnsupportedError,
                f"SyncBatchNorm in training mode ({shown}) cannot run this plan; change the plan as below, freeze the "
                "layers (eval mode, in on_train_start at the latest), or use GroupNorm",
                synchronised_norm_problems(plan),
            )

    def _weight_of(self) -> Callable[[Any], float] | None:
        weight, step = self._strategy.loss_weight, self._module.trainer.global_step
        return None if weight is None else lambda part: weight.of(part, step)

    def _measured_plan(self, first: FirstBatch, global_batch_size: int) -> ShardPlan:
        strategy = self._strategy
        assert strategy.cluster is not None
        own = self._measurement(first, max_samples=max(1, global_batch_size // strategy.world_size))
        if own.base_bytes is not None:
            own = replace(own, base_bytes=own.base_bytes + planning.state_to_come_bytes(strategy.optimizers))
        costs = planning.pool_measurements(
            strategy.gather_objects(own), strategy.cluster.device_types(), strategy.groups.replicas
        )
        strategy.measured_costs = costs
        plan: ShardPlan = strategy.broadcast(strategy.plan_from(global_batch_size, costs))
        return plan

    def _measurement(self, first: FirstBatch, max_samples: int) -> RankMeasurement:
        """Return what this rank measures, or what it measured in an earlier run (a collective)."""
        strategy = self._strategy
        assert strategy.cluster is not None
        # what else a CPU has to do changes from run to run, and nothing tells
        cache = MeasurementCache("off" if strategy.root_device.type == "cpu" and not strategy.cluster.emulate else None)
        key = None if cache.folder is None else self._cache_key(first, max_samples)
        kept = None if key is None else cache.load(key, RankMeasurement)
        if min(strategy.gather_numbers(int(kept is not None))):  # measuring is collective: all ranks or none
            assert kept is not None
            rank_zero_info(f"hetero_fsdp: the ranks' speeds are those measured in an earlier run ({cache.folder})")
            return kept
        if strategy.options.compile:
            for samples in sorted({1, min(2, max_samples)}):  # the sizes that torch compiles apart
                first.measure_step(samples)
        own = measure_rank(
            first.measure_step,
            max_samples,
            capacity_bytes=strategy.cluster.devices[strategy.global_rank].memory_bytes,
            resident_bytes=planning.local_bytes(self._module.parameters()),
            run_crossing=first.measure_crossing if strategy.gradients.crosses else None,
            share_of=lambda own_s: self._share(own_s, max_samples * strategy.world_size),
            run_accumulating=first.measure_accumulating,
        )
        first.forget_gradients()
        own = replace(own, optimizer_s=self._optimizer_s())
        if key is not None:
            cache.store(key, asdict(own))
        return own

    def _share(self, s_per_sample: float, global_batch_size: int) -> float:
        """Return this rank's samples of a global batch that is split by speed (a collective)."""
        every = [row[0] for row in self._strategy.gather_vector([s_per_sample])]
        if min(every) <= 0:  # computes in no time that a clock tells
            return global_batch_size / len(every)
        return global_batch_size / s_per_sample / math.fsum(1 / each for each in every)

    def _optimizer_s(self) -> float | None:
        """Return what a step of the optimizer takes on this rank (a collective); None where that is not known."""
        strategy = self._strategy
        assert strategy.cluster is not None
        memory_bytes: float = strategy.cluster.devices[strategy.global_rank].memory_bytes
        free_for_copies = memory_bytes - planning.local_bytes(self._module.parameters())
        if strategy.options.cpu_offload and strategy.root_device.type != "cpu":  # copies are on the host, as shards are
            free_for_copies = min(free_for_copies, free_bytes(torch.device("cpu")) / strategy.num_processes)
        return optimizer_s(
            strategy.optimizers,
            free_for_copies,
            strategy.instruments.step,
            strategy.root_device,
            strategy.barrier,
            # an optimizer that looks at whole tensors sends for each: all ranks step the same ones
            agree=lambda count: min(strategy.gather_numbers(count)),
        )

    def _cache_key(self, first: FirstBatch, max_samples: int) -> CacheKey:
        strategy, module = self._strategy, self._module
        assert strategy.cluster is not None
        device = strategy.cluster.devices[strategy.global_rank]
        return CacheKey.of(
            type(module).__name__,
            module,
            first.batch(1),
            dtype=str(strategy.precision_plugin.precision),
            device=device,
            emulate=strategy.cluster.emulate,
            conditions={
                "ranks": strategy.world_size,
                "groups": strategy.layout.groups,
                "measured": [field.name for field in fields(RankMeasurement)],
                "optimizers": [
                    (type(each).__name__, each.defaults.get("fused"), each.defaults.get("foreach"))
                    for each in strategy.optimizers
                ],
                "workers": None if first.loader is None else first.loader.num_workers,
                "max_samples": max_samples,
                "memory_bytes": device.memory_bytes,
                "reshard_after_forward": strategy.reshards,
                "options": strategy.options,
                "step": _code_of(type(module).training_step),
                "costs": strategy.costs,
                "speed_factor": device.speed_factor(module.trainer.global_step) if strategy.cluster.emulate else 1.0,
            },
        )


def _code_of(function: Any) -> str:
    """Return what tells one function's code from another's, the same in every process."""
    code = getattr(function, "__code__", None)
    if code is None:
        return repr(type(function))
    plain = [constant for constant in code.co_consts if isinstance(constant, str | int | float | bool | None)]
    return repr((code.co_code.hex(), code.co_names, plain))
