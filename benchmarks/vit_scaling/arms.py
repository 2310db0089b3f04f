"""The arms: each runs in every one of its ranks and trains until the gate says stop."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy

from benchmarks.hetero_speedup.gate import Gate, GateCallback
from benchmarks.vit_scaling.case import ScalingCase
from benchmarks.vit_scaling.data import loader
from benchmarks.vit_scaling.module import Classifier, FullyShardedClassifier
from benchmarks.vit_scaling.watch import PeakMemory, WithoutCommunication
from lightning_hetero.callbacks.emulated_devices import EmulatedDevices
from lightning_hetero.cluster import Cluster, Device
from lightning_hetero.models.chains import find_chain
from lightning_hetero.plan import Pipeline, PipelinePlan, ShardPlan, Stage, even_parts
from lightning_hetero.schedule import warmup_depths
from lightning_hetero.strategies import HeteroFSDPStrategy, HeteroPipelineStrategy
from lightning_hetero.strategies.options import ShardingOptions

MICRO_BATCHES = 8
"""of the even pipeline"""

ENOUGH_BYTES = 2**36


def ddp(case: ScalingCase, rank: int, gate: Gate) -> dict[str, Any]:
    """Lightning's own DDP."""
    return fit(case, Classifier(case.shape, case.compile), DDPStrategy(), gate, *_emulation(case))


def fsdp2(case: ScalingCase, rank: int, gate: Gate) -> dict[str, Any]:
    """Lightning's own FSDP2 strategy."""
    strategy = ModelParallelStrategy(data_parallel_size=case.world_size, tensor_parallel_size=1)
    return fit(case, FullyShardedClassifier(case.shape, case.compile), strategy, gate, *_emulation(case))


def one_device(case: ScalingCase, rank: int, gate: Gate) -> dict[str, Any]:
    """One device, without any parallel strategy."""
    return fit(case, Classifier(case.shape, case.compile), "auto", gate, *_emulation(case))


def hetero_fsdp(case: ScalingCase, rank: int, gate: Gate) -> dict[str, Any]:
    """Our strategy, which measures the ranks and splits the batch by itself."""
    strategy = HeteroFSDPStrategy(cluster=case.cluster_path, summary=False)
    found = fit(case, Classifier(case.shape, case.compile), strategy, gate)
    # shares may have moved since they were planned
    return found | ({} if strategy.plan is None else {"batch_shares_at_end": strategy.plan.batch_shares})


@dataclass(frozen=True)
class Sharded:
    """hetero_fsdp with equal shares.

    Args:
        sharding: as ``sharding_strategy`` takes it.
        options: further ones of the strategy.
        communicates: False takes the communication out of the steps.
    """

    sharding: str = "FULL_SHARD"
    options: Mapping[str, Any] = field(default_factory=dict)
    communicates: bool = True

    def __call__(self, case: ScalingCase, rank: int, gate: Gate) -> dict[str, Any]:
        """Run it in one rank."""
        quiet = [] if self.communicates else [WithoutCommunication()]
        return fit(case, Classifier(case.shape, case.compile), self._strategy(case), gate, *quiet)

    def _strategy(self, case: ScalingCase) -> HeteroFSDPStrategy:
        if case.accelerator != "cpu":  # what the devices are is discovered, and equal devices get equal shares
            return HeteroFSDPStrategy(sharding_strategy=self.sharding, rebalance=False, **self._quiet())
        cluster = _equal_cores(case) if case.cluster_path is None else Cluster.from_yaml(case.cluster_path)
        return HeteroFSDPStrategy(cluster, equal_plan(case, cluster, self.sharding), **self._quiet())

    def _quiet(self) -> dict[str, Any]:
        """The options, without what is done once and printed: it is not timed."""
        return {"summary": False, "check_loss": "off", **self.options}


def equal_plan(case: ScalingCase, cluster: Cluster, sharding: str) -> ShardPlan:
    """Equal shares, sharded as ``sharding`` says."""
    layout = ShardingOptions(sharding_strategy=sharding).layout(case.world_size)
    assert layout is not None
    return ShardPlan(
        global_batch_size=case.global_batch,
        batch_shares=(case.local_batch,) * case.world_size,
        groups=layout.groups,
        device_types=cluster.device_types(),
        reshard_after_forward=layout.modes[0] == "FULL_SHARD",
        modes=layout.modes,
    )


def hetero_pipe(case: ScalingCase, rank: int, gate: Gate) -> dict[str, Any]:
    """Our pipeline, which measures the units and cuts by itself; one pipeline over all ranks."""
    strategy = HeteroPipelineStrategy(cluster=case.cluster_path, pipelines=1, summary=False)
    return fit(case, Classifier(case.shape, case.compile), strategy, gate)


def even_pipeline(case: ScalingCase, rank: int, gate: Gate) -> dict[str, Any]:
    """A pipeline with as many blocks in each stage, 1F1B, as one would cut it without a planner."""
    cluster = _equal_cores(case) if case.cluster_path is None else Cluster.from_yaml(case.cluster_path)
    plan = even_cut(case, cluster)
    return fit(case, Classifier(case.shape), HeteroPipelineStrategy(cluster, plan=plan, summary=False), gate)


def even_cut(case: ScalingCase, cluster: Cluster) -> PipelinePlan:
    """The plan of :func:`even_pipeline`: what comes before the blocks is in the first stage, what after in the last."""
    names = tuple(unit.name for unit in find_chain(case.shape.build("meta")).units)
    blocks = [index for index, name in enumerate(names) if name.startswith("blocks.")]
    micro_batches = min(MICRO_BATCHES, case.global_batch)
    size = -(-case.global_batch // micro_batches)
    micro_batches = -(-case.global_batch // size)
    ends = [blocks[0]]
    for part in even_parts(len(blocks), case.world_size):
        ends.append(ends[-1] + part)
    ends[0], ends[-1] = 0, len(names)
    depths = warmup_depths(case.world_size, micro_batches)
    stages = tuple(Stage((ends[s], ends[s + 1]), depths[s]) for s in range(case.world_size))
    pipeline = Pipeline(tuple(range(case.world_size)), stages, micro_batches)
    return PipelinePlan(case.global_batch, size, (pipeline,), cluster.device_types(), names)


def input_alone(case: ScalingCase, rank: int, gate: Gate) -> dict[str, Any]:
    """Batches are read and dropped: nothing is trained."""
    batches = iter(loader(case))
    gate.ready({"strategy": "none, input alone"})
    while gate.wait():
        next(batches)
        gate.step_done()
    return {}


def fit(case: ScalingCase, module: LightningModule, strategy: Any, gate: Gate, *callbacks: Callback) -> dict[str, Any]:
    """Train until the gate says stop; returns every rank's peak memory."""
    memory = PeakMemory(case.count_memory)
    trainer = Trainer(
        accelerator=case.accelerator,
        devices=case.world_size,
        strategy=strategy,
        precision=case.precision,  # type: ignore[arg-type]
        max_epochs=1,
        callbacks=[*callbacks, memory, GateCallback(gate)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, loader(case))
    return {"peak_bytes": memory.peak_bytes}


def _emulation(case: ScalingCase) -> list[Callback]:
    """What makes stock strategies' ranks behave like their devices; ours do so by themselves."""
    return [] if case.cluster_path is None else [EmulatedDevices(case.cluster_path)]


def _equal_cores(case: ScalingCase) -> Cluster:
    core = Device(type="core", node="here", memory_bytes=ENOUGH_BYTES, speed_flops_per_s=None)
    return Cluster("equal cores", (core,) * case.world_size)
