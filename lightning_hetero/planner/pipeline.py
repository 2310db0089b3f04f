"""Plan pipelines: which devices form them, cut, micro-batches and schedule; the fastest predicted that fits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from lightning_hetero.cluster import Cluster
from lightning_hetero.costs import ModelCosts
from lightning_hetero.errors import HeteroError, raise_all
from lightning_hetero.plan import ModelKey, PipelinePlan
from lightning_hetero.planner.design_search import Space, even_designs, search_designs
from lightning_hetero.planner.exact_search import prove_best
from lightning_hetero.planner.pipeline_bound import lower_bound_s
from lightning_hetero.planner.pipeline_design import Policy, Problem
from lightning_hetero.planner.pipeline_explain import Binding, Candidate, binding_of, candidates_of, reasons_of
from lightning_hetero.planner.pipeline_infeasible import refuse
from lightning_hetero.planner.pipeline_plan import plan_of
from lightning_hetero.planner.seconds import unit_timings
from lightning_hetero.planner.training import Training
from lightning_hetero.schedule import SCHEDULES

# Warm-up depths of 1F1B that are tried: further micro-batches per following stage.
_EXTRAS = (0, 1, 2)
# Micro-batch sizes that are looked at; above, only some that are spread evenly on a logarithmic scale.
_MOST_SIZES = 12
# Up to here search_pipeline plans anew with each change that might help.
_MOST_DEVICES_FOR_CHANGES = 8


@dataclass(frozen=True)
class PipelineSearch:
    """A plan and what led to it.

    Args:
        plan: the fastest predicted that fits.
        candidates: what was tried, the fastest first, with predicted seconds or the reason of rejection.
        binding: what limits the plan now, and what a change of it would bring.
        even_step_s: predicted seconds of the even plan (one pipeline over all devices in order, equally many units
            each, with its best micro-batch size and schedule); ``None`` where it does not fit, or there are more
            devices than units.
    """

    plan: PipelinePlan
    candidates: tuple[Candidate, ...]
    binding: Binding
    even_step_s: float | None

    @property
    def advice(self) -> str:
        """Which one change would help most."""
        return self.binding.advice


def plan_pipeline(
    cluster: Cluster,
    costs: ModelCosts,
    training: Training,
    *,
    micro_batch_size: int | None = None,
    schedules: Sequence[str] = ("1f1b", "gpipe"),
    stages_per_rank: int = 2,
    pipelines: int | None = None,
    activation_checkpointing: bool = True,
    capacity_bytes: Sequence[int] | None = None,
    model: ModelKey | None = None,
) -> PipelinePlan:
    """The pipeline plan with the least predicted step time that fits the memory of every rank.

    Args:
        cluster: devices and links. A link that is not given costs nothing.
        costs: of the model; seconds are measured ones, or FLOPs over device speed.
        training: global batch, precision, optimizer.
        micro_batch_size: samples of a micro-batch; by default the best one.
        schedules: that the plan may have. "zero_bubble" is tried only when it is named, since halves of a backward
            are not measured but taken as equal; so is "interleaved_1f1b".
        stages_per_rank: for interleaved_1f1b.
        pipelines: number of pipelines; by default the best one.
        activation_checkpointing: whether stages that do not fit otherwise may run their forward again in backward.
        capacity_bytes: per rank, bytes that it may use; by default the memory of its device.
        model: what the plan is for; by default name and parameters of the costs.

    Returns:
        The plan, with predictions per rank, a lower bound and its reasons.

    Raises:
        InfeasibleError: if nothing fits: how many bytes are missing on which ranks, and the nearest changes that do
            fit, found by planning them.
        HeteroError: if an argument is malformed, or seconds are not known, listing every problem.
    """
    request = _Request(
        micro_batch_size, schedules, stages_per_rank, pipelines, activation_checkpointing, capacity_bytes, model
    )
    return _search(cluster, costs, training, request, plan_changes=False).plan


def search_pipeline(
    cluster: Cluster,
    costs: ModelCosts,
    training: Training,
    *,
    micro_batch_size: int | None = None,
    schedules: Sequence[str] = ("1f1b", "gpipe"),
    stages_per_rank: int = 2,
    pipelines: int | None = None,
    activation_checkpointing: bool = True,
    capacity_bytes: Sequence[int] | None = None,
    model: ModelKey | None = None,
) -> PipelineSearch:
    """:func:`plan_pipeline` with what was tried and rejected and why, what binds, and what would help most.

    Notes:
        For up to 5 devices every set of pipelines and every order is looked at; for more, devices are dealt out by
        type. A closed form (the way of one micro-batch, and the slowest stage for each further one) ranks designs,
        with cuts that are exact for it under the memory of each stage; the best are simulated, and the search goes
        on from the best few to better neighbours. Where all designs are few (about 4 devices and 8 units), every one
        that a bound does not rule out is simulated too, and the plan is the fastest of all of them. What would help is
        found by planning with each change for up to 8 devices, else by simulating this plan with it.
    """
    request = _Request(
        micro_batch_size, schedules, stages_per_rank, pipelines, activation_checkpointing, capacity_bytes, model
    )
    return _search(cluster, costs, training, request, plan_changes=cluster.world_size <= _MOST_DEVICES_FOR_CHANGES)


@dataclass(frozen=True)
class _Request:
    """The keyword arguments of :func:`plan_pipeline`."""

    micro_batch_size: int | None
    schedules: Sequence[str]
    stages_per_rank: int
    pipelines: int | None
    activation_checkpointing: bool
    capacity_bytes: Sequence[int] | None
    model: ModelKey | None


def _search(
    cluster: Cluster, costs: ModelCosts, training: Training, request: _Request, *, plan_changes: bool
) -> PipelineSearch:
    _check(cluster, training, request)
    problem = Problem(cluster, costs, training, unit_timings(costs, cluster), request.capacity_bytes)
    size = request.micro_batch_size
    sizes = micro_batch_sizes(training.global_batch_size) if size is None else (size,)
    policies = policies_of(request.schedules, request.stages_per_rank, request.activation_checkpointing)
    space = Space(sizes, policies, request.pipelines)
    found = search_designs(problem, space)
    proven = prove_best(problem, space, found)
    if found.best is None:
        refuse(problem, space, found)
    bound_s = lower_bound_s(problem, sizes)
    even = [problem.evaluate(design).step_s for design in even_designs(problem, space)]
    even_s = min((seconds for seconds in even if math.isfinite(seconds)), default=None)
    binding = binding_of(problem, found, space if plan_changes else None)
    reasons = reasons_of(problem, found, binding, bound_s, even_s, proven)
    plan = plan_of(problem, found.best, found.tried[found.best])
    plan = replace(
        plan,
        model=plan.model if request.model is None else request.model,
        lower_bound_s=min(bound_s, found.tried[found.best].step_s),
        reasons=reasons,
    )
    plan.validate(cluster)
    return PipelineSearch(plan, candidates_of(problem, found), binding, even_s)


def micro_batch_sizes(global_batch_size: int) -> tuple[int, ...]:
    """Micro-batch sizes worth a look: for each number of micro-batches the smallest size that makes so many.

    Where that leaves more than a dozen, some that are spread evenly on a logarithmic scale, divisors of the batch
    before others.
    """
    sizes = sorted({-(-global_batch_size // count) for count in range(1, global_batch_size + 1)})
    if len(sizes) <= _MOST_SIZES:
        return tuple(sizes)
    chosen = set()
    for step in range(_MOST_SIZES):
        wanted = step * math.log(global_batch_size) / (_MOST_SIZES - 1)
        near = [size for size in sizes if abs(math.log(size) - wanted) <= math.log(global_batch_size) / 20]
        divisors = [size for size in near if global_batch_size % size == 0]
        chosen.add(min(divisors or near or sizes, key=lambda size: (abs(math.log(size) - wanted), size)))
    return tuple(sorted(chosen))


def policies_of(schedules: Sequence[str], stages_per_rank: int, recompute: bool) -> tuple[Policy, ...]:
    """The policies of named schedules; those that need less memory first."""
    policies = []
    for name in schedules:
        if name == "1f1b":
            policies += [Policy(name, extra, recompute=recompute) for extra in _EXTRAS]
        elif name == "interleaved_1f1b":
            policies.append(Policy(name, stages_per_rank=stages_per_rank, recompute=recompute))
        else:
            policies.append(Policy(name, recompute=recompute))
    return tuple(policies)


def _check(cluster: Cluster, training: Training, request: _Request) -> None:
    problems = []
    batch, size, pipelines = training.global_batch_size, request.micro_batch_size, request.pipelines
    if size is not None and not 1 <= size <= batch:
        problems.append(f"micro_batch_size is {size}: give 1 to {batch} samples (the global batch)")
    if not request.schedules:
        problems.append(f"schedules is empty: give some of {', '.join(SCHEDULES)}")
    problems += [
        f"schedules holds {name!r}: give some of {', '.join(SCHEDULES)}"
        for name in request.schedules
        if name not in SCHEDULES
    ]
    if request.stages_per_rank < 1:
        problems.append(f"stages_per_rank is {request.stages_per_rank}: give 1 or more")
    if pipelines is not None and not 1 <= pipelines <= cluster.world_size:
        problems.append(f"pipelines is {pipelines}: give 1 to {cluster.world_size} (the number of ranks)")
    if request.capacity_bytes is not None and len(request.capacity_bytes) != cluster.world_size:
        problems.append(
            f"capacity_bytes has {len(request.capacity_bytes)} entries, cluster {cluster.name!r} has "
            f"{cluster.world_size} ranks: give one per rank"
        )
    raise_all(HeteroError, "the pipelines cannot be planned", problems)
