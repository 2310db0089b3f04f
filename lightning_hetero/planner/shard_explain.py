"""Why a shard plan is as it is, what limits it, and which change would help: the last two found by planning."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from lightning_hetero.errors import HeteroError
from lightning_hetero.plan import ShardPlan
from lightning_hetero.planner.shard_candidates import Advice, Binding, ShardSearch
from lightning_hetero.planner.shard_changes import faster_links, with_devices, with_memory, without_links
from lightning_hetero.planner.shard_options import ShardOptions
from lightning_hetero.planner.shard_search import ShardPlanner
from lightning_hetero.simulator.comm import Spread, spread_of
from lightning_hetero.units import format_bytes, format_seconds

_MUCH = 2.0**20
"""more memory than any model asks for, as a multiple of what there is"""

_WORTH = 1.005
"""changes that speed up by less are not worth saying"""


def explained(planner: ShardPlanner, search: ShardSearch) -> ShardSearch:
    """The search with what limits the plan and what would help."""
    return replace(search, binding=_binding(planner, search.plan), advice=tuple(_advice(planner, search.plan)))


def reasons_of(planner: ShardPlanner, search: ShardSearch) -> tuple[str, ...]:
    """Why the plan is as it is, one sentence each."""
    plan, found = search.plan, planner.prediction(search.plan)
    rank = _pace(planner, plan)
    reasons = [
        f"{_groups(plan)}; shares: {_shares_by_type(plan)}",
        (
            f"{_who(planner, rank)} sets the pace: it computes {format_seconds(found.busy_s[rank])} of the step's "
            f"{format_seconds(found.step_s)}"
        ),
        (
            f"no plan can be below {format_seconds(planner.lower_bound_s)}, all devices computing all the time; "
            f"this one is {max(0.0, 100 * (found.step_s / planner.lower_bound_s - 1)):.1f} % above"
        ),
    ]
    even = search.even
    if even.predicted_step_s is not None:
        ratio = even.predicted_step_s / found.step_s
        if even.rejected is not None and "does not fit" in even.rejected:
            reasons.append(f"the even plan {even.rejected}")
        else:
            reasons.append(f"the even plan would take {format_seconds(even.predicted_step_s)}, {ratio:.2f} x as long")
    if found.crossing_s > 0:
        reasons.append(f"reducing gradients across groups takes {format_seconds(found.crossing_s)} of the step")
    if any(plan.activation_checkpointing):
        count = sum(plan.activation_checkpointing)
        reasons.append(f"{count} ranks checkpoint activations: without, they would hold fewer samples at once")
    if max(plan.micro_batches, default=1) > 1:
        reasons.append(f"groups run up to {max(plan.micro_batches)} micro-batches: memory does not hold more at once")
    used: Spread = spread_of(planner.cluster, range(plan.world_size))
    unknown = planner.network.unknown(used)
    if unknown:
        reasons.append(f"the cluster gives no {' and no '.join(unknown)} link: communication over it counts as free")
    return tuple(reasons)


def _binding(planner: ShardPlanner, plan: ShardPlan) -> Binding:
    """What limits the plan: that without whose limit a step would be shortest."""
    found = planner.prediction(plan)
    roomy = _step_s(planner, planner.options, with_memory(planner.cluster, _MUCH))
    wired = _step_s(planner, planner.options, without_links(planner.cluster))
    saved_by_memory_s = max(0.0, found.step_s - roomy)
    saved_by_link_s = max(0.0, found.step_s - wired)
    rank = _pace(planner, plan)
    compute_s = min(found.busy_s[rank], found.step_s - max(saved_by_memory_s, saved_by_link_s))
    if max(saved_by_memory_s, saved_by_link_s) <= max(compute_s, 0.0) / 4:
        share = found.busy_s[rank] / found.step_s
        why = f"{_who(planner, rank)} computes {100 * share:.0f} % of the step"
        return Binding(rank, "compute", why)
    if saved_by_memory_s >= saved_by_link_s:
        capacity = [device.memory_bytes for device in planner.cluster.devices]
        rank = max(range(plan.world_size), key=lambda each: (found.peak_bytes[each] / capacity[each], -each))
        why = (
            f"{_who(planner, rank)} fills {format_bytes(found.peak_bytes[rank])} of {format_bytes(capacity[rank])} "
            f"({found.peaks[rank]}); with memory without end a step would take {format_seconds(roomy)}"
        )
        return Binding(rank, "memory", why)
    why = f"with communication that takes no time a step would take {format_seconds(wired)}"
    return Binding(rank, "link", why)


def _advice(planner: ShardPlanner, plan: ShardPlan) -> list[Advice]:
    """Changes that make a step shorter, the most helpful one first."""
    now_s = plan.predicted_step_s or 0.0
    advice = []
    for change, step_s in _changes(planner):
        if step_s > 0 and now_s / step_s > _WORTH:
            advice.append(Advice(change, step_s, now_s / step_s))
    return sorted(advice, key=lambda each: (each.predicted_step_s, each.change))


def _changes(planner: ShardPlanner) -> Iterator[tuple[str, float]]:
    cluster, options = planner.cluster, planner.options
    for kind in cluster.types:
        yield f"one more device of type {kind}", _step_s(planner, options, with_devices(cluster, kind, 1))
    for kind in cluster.types:
        change = f"half as much memory again on devices of type {kind}"
        yield change, _step_s(planner, options, with_memory(cluster, 1.5, kind))
    for where, faster in faster_links(cluster, 2.0):
        yield f"twice the bandwidth {where}", _step_s(planner, options, faster)
    if not options.checkpointing:
        yield "activation checkpointing", _step_s(planner, replace(options, checkpointing=True), cluster)
    if not options.accumulate:
        yield "more than one micro-batch", _step_s(planner, replace(options, accumulate=True), cluster)


def _step_s(planner: ShardPlanner, options: ShardOptions, cluster: object) -> float:
    """Predicted seconds of a step with a change; infinite if nothing fits."""
    try:
        plan = planner.changed(options=options, cluster=cluster).search().plan  # type: ignore[arg-type]
    except HeteroError:
        return float("inf")
    return plan.predicted_step_s or 0.0


def _pace(planner: ShardPlanner, plan: ShardPlan) -> int:
    """The rank that computes longest in the group that takes longest."""
    found = planner.prediction(plan)
    slowest = max(range(len(plan.groups)), key=lambda index: (found.group_s[index], -index))
    return max(plan.groups[slowest], key=lambda rank: (found.busy_s[rank], -rank))


def _groups(plan: ShardPlan) -> str:
    if len(plan.groups) == 1:
        mode = plan.mode_of(0)
        how = "hold the whole model each" if mode == "NO_SHARD" else f"shard the model as one group ({mode})"
        return f"all {plan.world_size} ranks {how}"
    sizes: dict[tuple[int, str], int] = {}
    for index, group in enumerate(plan.groups):
        key = (len(group), plan.mode_of(index))
        sizes[key] = sizes.get(key, 0) + 1
    parts = [f"{count} of {size} ({mode})" for (size, mode), count in sizes.items()]
    return f"{len(plan.groups)} groups: {', '.join(parts)}"


def _shares_by_type(plan: ShardPlan) -> str:
    texts = []
    for kind in dict.fromkeys(plan.device_types):
        own = [share for share, each in zip(plan.batch_shares, plan.device_types, strict=True) if each == kind]
        span = f"{min(own)}" if min(own) == max(own) else f"{min(own)} to {max(own)}"
        texts.append(f"{len(own)} x {kind} take {span} each")
    return ", ".join(texts)


def _who(planner: ShardPlanner, rank: int) -> str:
    device = planner.cluster.devices[rank]
    return f"rank {rank} ({device.type} on {device.node})"
