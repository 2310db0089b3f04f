"""Plan a pipeline for the model at hand: what its units take on every kind of device, and what follows."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from torch.optim import Optimizer

from lightning_hetero.cluster import Cluster
from lightning_hetero.costs import ModelCosts, UnitCost, UnitTiming
from lightning_hetero.data import batch_size_of
from lightning_hetero.errors import HeteroError
from lightning_hetero.models.chains import find_chain, has_chain
from lightning_hetero.models.inputs import class_loss
from lightning_hetero.plan import PipelinePlan
from lightning_hetero.planner.measured import UNKNOWN_OPTIMIZER
from lightning_hetero.planner.pipeline import plan_pipeline
from lightning_hetero.planner.planned_stages import pipelines_seconds
from lightning_hetero.planner.rehearsed import extra_hop_s, longer_s, with_slower_links
from lightning_hetero.planner.training import Training
from lightning_hetero.profiler.meta import meta_copy
from lightning_hetero.profiler.units import profile_units
from lightning_hetero.strategies.pipe.call import Call, find_call
from lightning_hetero.strategies.pipe.message_probe import with_measured_links
from lightning_hetero.strategies.pipe.placement import Placement, unit_with
from lightning_hetero.strategies.planning import SAME_CLASS
from lightning_hetero.units import format_seconds

if TYPE_CHECKING:
    from lightning_hetero.strategies.pipeline import HeteroPipelineStrategy

_REPEATS = 3
_PARTS = (8, 2, 1)  # of a rank's even share: few samples take as long as some more, and say little of many
_DTYPES = {"64-true": "float64", "bf16-true": "bfloat16", "16-true": "float16"}


@dataclass(frozen=True)
class Basis:
    """What a plan is made from.

    Args:
        costs: of the chain's units.
        cluster: with a type of its own for each device that measured otherwise than its type.
        training: global batch, precision, optimizer.
        call: with what the model is called.
    """

    costs: ModelCosts
    cluster: Cluster
    training: Training
    call: Call


def make_plan(strategy: HeteroPipelineStrategy, basis: Basis) -> PipelinePlan:
    """The pipeline plan for what was measured (a collective).

    Raises:
        InfeasibleError: if no plan fits, with what would.
    """
    arguments = strategy.options.for_planner()
    cluster, costs, training = basis.cluster, basis.costs, basis.training
    found = strategy.broadcast(_plan_on_rank_0(strategy, cluster, costs, training, arguments))
    if isinstance(found, Exception):
        raise found
    plan: PipelinePlan = found
    assert strategy.cluster is not None
    return replace(plan, device_types=strategy.cluster.device_types(), model=None)


def find_basis(
    strategy: HeteroPipelineStrategy, trainer: pl.Trainer, placement: Placement, call: Call | None = None
) -> Basis:
    """Measure or look up what units take (a collective).

    Args:
        strategy: whose ranks measure.
        trainer: whose loaders tell with what the model is called.
        placement: of the model.
        call: the same, where it is known already.
    """
    cluster = strategy.cluster
    assert cluster is not None
    call = call or find_call(strategy, trainer, placement.model, placement.prefix)
    batch_size = strategy.global_batch_size or strategy.world_size
    precision = strategy.precision_name()
    dtype = _DTYPES.get(precision, "float32")
    if strategy.costs is not None:
        costs = merge_units(strategy.costs, placement, call)
        planning_cluster = cluster
    else:
        share = max(1, batch_size // strategy.world_size)
        costs, planning_cluster = _measured(strategy, placement, call, dtype, share)
    # links of emulated devices are not emulated, and one that is not given would cost nothing
    planning_cluster = with_measured_links(
        planning_cluster, strategy.global_rank, strategy.root_device, strategy.make_group
    )
    optimizer = _optimizer_name(strategy, trainer)
    training = Training(batch_size, precision=precision, optimizer=optimizer)
    return Basis(costs, planning_cluster, training, call)


def _plan_on_rank_0(
    strategy: HeteroPipelineStrategy, cluster: Cluster, costs: ModelCosts, training: Training, arguments: dict[str, Any]
) -> PipelinePlan | Exception | None:
    if not strategy.is_global_zero:
        return None
    try:
        return plan_pipeline(cluster, costs, training, **arguments)
    except HeteroError as error:
        return error


def with_messages(
    plan: PipelinePlan, basis: Basis, micro_batches: Sequence[int], taken_s: Sequence[float]
) -> tuple[PipelinePlan, Basis]:
    """The plan and its basis with messages as long as a rehearsal of its pipelines has shown them.

    Args:
        plan: that was made from ``basis``.
        basis: with the links that messages of nothing but themselves found.
        micro_batches: of the rehearsal, by pipeline.
        taken_s: seconds that it took, by pipeline.
    """
    if plan.predicted_step_s is None or all(len(pipeline.stages) == 1 for pipeline in plan.pipelines):
        return plan, basis
    seconds = pipelines_seconds(plan, basis.cluster, basis.costs, basis.training)
    extra_s = extra_hop_s(plan, seconds, micro_batches, taken_s)
    hop_s = extra_s + statistics.fmean(hop_s for own in seconds for hop_s in own.hop_s)
    reason = f"from the end of a stage to the begin of the next one it takes {format_seconds(hop_s)}, as measured"
    found = plan.lasting(plan.predicted_step_s + longer_s(plan, seconds, extra_s), reason)
    return found, replace(basis, cluster=with_slower_links(basis.cluster, extra_s))


def with_optimizer(plan: PipelinePlan, seconds: Sequence[float | None]) -> PipelinePlan:
    """The plan with what the slowest rank's optimizer takes at the end of a step; None of a rank was not measured."""
    known = [each for each in seconds if each is not None]
    if len(known) < len(seconds) or plan.predicted_step_s is None:
        return plan.lasting(plan.predicted_step_s or 0.0, UNKNOWN_OPTIMIZER)
    reason = f"beside its stages, a step takes {format_seconds(max(known))} for the optimizer, as measured"
    return plan.lasting(plan.predicted_step_s + max(known), reason)


def describe(plan: PipelinePlan) -> str:
    """One line on who runs what."""
    parts = []
    for pipeline in plan.pipelines:
        stages = ", ".join(
            f"rank {pipeline.rank_of(index)} {_units(plan, stage.units)}" for index, stage in enumerate(pipeline.stages)
        )
        parts.append(f"{stages}; {pipeline.micro_batches} micro-batches of up to {plan.micro_batch_size}")
    idle = f"; idle: rank {', '.join(map(str, plan.idle_ranks))}" if plan.idle_ranks else ""
    return f"{plan.schedule}: {' | '.join(parts)}{idle}"


def _units(plan: PipelinePlan, units: tuple[int, int]) -> str:
    first, last = plan.unit_names[units[0]], plan.unit_names[units[1] - 1]
    return first if first == last else f"{first} to {last}"


# -- what units take ---------------------------------------------------------------------------------------------------


def _measured(
    strategy: HeteroPipelineStrategy, placement: Placement, call: Call, dtype: str, share: int
) -> tuple[ModelCosts, Cluster]:
    """Every rank measures the units on its device; those of a type that come out alike are one (a collective)."""
    cluster = strategy.cluster
    assert cluster is not None
    emulated = cluster.devices[strategy.global_rank] if cluster.emulate else None
    is_mixed = strategy.precision_name().endswith("-mixed")
    costs = profile_units(
        call.taking_tensors(placement.model),
        call.tensors(),
        dtype=dtype,
        device=strategy.root_device,
        micro_batches=sorted({max(1, share // parts) for parts in _PARTS}),
        repeats=_REPEATS,
        loss=_loss,
        emulated=emulated,
        # in the dtype that steps compute in; the others convert the module
        computing=strategy.precision_plugin.forward_context if is_mixed else nullcontext,
    )
    (measured,) = costs.devices
    own = {unit.name: unit.timings[measured] for unit in costs.units}
    everyones: list[dict[str, UnitTiming]] = strategy.gather_objects(own)
    totals = [sum(t.forward_s(share) + t.backward_s(share) for t in each.values()) for each in everyones]
    kinds = _kinds(cluster.device_types(), totals)
    pooled = _pooled(kinds, everyones, totals)
    units = tuple(
        replace(unit, timings={kind: timings[unit.name] for kind, timings in pooled.items()}) for unit in costs.units
    )
    costs = replace(costs, units=units, devices=dict.fromkeys(pooled, "measured"))
    devices = tuple(replace(device, type=kind) for device, kind in zip(cluster.devices, kinds, strict=True))
    return merge_units(costs, placement, call), replace(cluster, devices=devices)


def _kinds(types: Sequence[str], seconds: Sequence[float]) -> list[str]:
    """The type of each rank's device; one that measured otherwise than the median of its type is a kind of its own."""
    kinds = list(types)
    for kind in set(types):
        members = [rank for rank, each in enumerate(types) if each == kind]
        median = statistics.median(seconds[rank] for rank in members)
        for rank in members:
            if abs(seconds[rank] / median - 1) > SAME_CLASS if median else False:
                kinds[rank] = f"{kind} (rank {rank})"
    return kinds


def _pooled(
    kinds: Sequence[str], everyones: Sequence[Mapping[str, UnitTiming]], totals: Sequence[float]
) -> dict[str, dict[str, UnitTiming]]:
    """Per kind and unit, the timing of the member whose total is the least: noise makes a measurement longer."""
    found = {}
    for kind in dict.fromkeys(kinds):
        members = sorted((r for r, each in enumerate(kinds) if each == kind), key=lambda r: totals[r])
        found[kind] = dict(everyones[members[0]])
        if sum(t.forward_per_sample_s + t.backward_per_sample_s for t in found[kind].values()) <= 0:
            found[kind] = {name: _by_the_largest(timing) for name, timing in found[kind].items()}
    return found


def _by_the_largest(timing: UnitTiming) -> UnitTiming:
    """All of the largest size's seconds as per sample: of a model so small that noise hides what a sample takes."""
    if not timing.points:
        return timing
    return UnitTiming.fitted([max(timing.points, key=lambda point: point.samples)])


def merge_units(costs: ModelCosts, placement: Placement, call: Call | None = None) -> ModelCosts:
    """Costs of the chain's units, from those of the finer units that a profile has.

    Raises:
        HeteroError: if a unit of the costs is in none of the chain.
    """
    chain = placement.chain
    parts: list[list[UnitCost]] = [[] for _ in chain.units]
    for unit in costs.units:
        index = 0 if unit.name == "(root)" else unit_with(unit.name.removeprefix("model."), placement)
        index = unit_with(unit.name, placement) if index is None else index
        if index is None:
            raise HeteroError(
                f"costs of model {costs.model!r} have the unit {unit.name!r}, which is in no unit of "
                f"{type(placement.model).__name__}: profile this model"
            )
        parts[index].append(unit)
    outputs = _output_bytes(placement, call) if call is not None and has_chain(placement.model) else {}
    kinds = costs.timed_types
    merged = []
    before = 0
    for link, members in zip(chain.units, parts, strict=True):
        own = members[-1].output_bytes if members else before
        before = outputs.get(link.name, own)
        merged.append(_merged(link.name, members, before, kinds))
    return replace(costs, units=tuple(merged))


def _merged(name: str, members: Sequence[UnitCost], output_bytes: int, kinds: Sequence[str]) -> UnitCost:
    return UnitCost(
        name=name,
        parameters=sum(unit.parameters for unit in members),
        forward_flops=sum(unit.forward_flops for unit in members),
        backward_flops=sum(unit.backward_flops for unit in members),
        kept_activation_bytes=sum(unit.kept_activation_bytes for unit in members),
        output_bytes=output_bytes,
        timings={kind: _sum_of([unit.timings[kind] for unit in members]) for kind in kinds},
        is_block=any(unit.is_block for unit in members),
        shared_parameters=sum(unit.shared_parameters for unit in members),
        inner_gradient_bytes=max((unit.inner_gradient_bytes for unit in members), default=0),
        largest_parameter=max((unit.largest_parameter for unit in members), default=0),
    )


def _sum_of(timings: Sequence[UnitTiming]) -> UnitTiming:
    return UnitTiming(
        sum(each.forward_fixed_s for each in timings),
        sum(each.forward_per_sample_s for each in timings),
        sum(each.backward_fixed_s for each in timings),
        sum(each.backward_per_sample_s for each in timings),
    )


def _output_bytes(placement: Placement, call: Call) -> dict[str, int]:
    """Bytes per sample that each unit of the chain writes, found on the meta device."""
    chain = find_chain(meta_copy(placement.model))
    args, kwargs = call.filled([tensor.to("meta") for tensor in call.tensors()])
    samples = batch_size_of([torch.empty(shape, device="meta") for shape, _ in call.shapes])
    found = {}
    with torch.no_grad():
        values = chain.begin(*args, **kwargs)
        for unit in chain.units:
            written = unit.run({name: values[name] for name in unit.reads})
            values |= written
            total = sum(value.nbytes for value in written.values() if value is not None)
            found[unit.name] = -(-total // samples)
    return found


def _optimizer_name(strategy: HeteroPipelineStrategy, trainer: pl.Trainer) -> str:
    """What the user's optimizer keeps, by making it once on the whole model."""
    module = strategy.lightning_module
    if trainer.state.fn != TrainerFn.FITTING:
        return "sgd"
    assert module is not None
    configured: Any = module.configure_optimizers()
    found = [each for each in _flat(configured) if isinstance(each, Optimizer)]
    if not found:
        return "adamw"
    optimizer = found[0]
    if isinstance(optimizer, torch.optim.SGD):
        return "sgd-momentum" if optimizer.defaults.get("momentum") else "sgd"
    if isinstance(optimizer, torch.optim.RMSprop):
        return "rmsprop"
    return "adagrad" if isinstance(optimizer, torch.optim.Adagrad) else "adamw"


def _flat(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [each for item in value.values() for each in _flat(item)]
    if isinstance(value, list | tuple):
        return [each for item in value for each in _flat(item)]
    return [value]


def _loss(output: Any) -> Tensor:
    """A cross-entropy where the output looks like logits, for the bytes that a loss keeps; the user's is not known."""
    if isinstance(output, Tensor) and output.ndim > 1 and output.is_floating_point():
        return class_loss(output)
    return torch.zeros((), requires_grad=True)
