"""Plans for 1,024 ranks: 64 nodes of one type, 64 of another, eight devices each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lightning_hetero.plan import Pipeline, PipelinePlan, ShardPlan, Stage
from lightning_hetero.schedule import warmup_depths

NODES, PER_NODE = 128, 8
FAST, SLOW = "H100", "A100"


@dataclass(frozen=True)
class ShardCase:
    """A shard plan and the model that it is set up with.

    Args:
        name: of the case.
        plan: for all ranks.
        preset: of the model.
        depth: its blocks; None is the preset's own.
    """

    name: str
    plan: ShardPlan
    preset: str
    depth: int | None = None


@dataclass(frozen=True)
class PipelineCase:
    """A pipeline plan and the GPT that it is set up with; its chain is an embedding, blocks, a norm and a head.

    Args:
        name: of the case.
        plan: for all ranks.
        width: of the model.
        sequence: tokens of a sample.
        tied: whether head and embedding are one parameter.
    """

    name: str
    plan: PipelinePlan
    width: int = 32
    sequence: int = 8
    tied: bool = True


def device_types(nodes: int = NODES) -> tuple[str, ...]:
    """Return the type of each rank: the first half of the nodes is fast."""
    ranks = nodes * PER_NODE
    return tuple(FAST if rank < ranks // 2 else SLOW for rank in range(ranks))


def shard_cases(preset: str = "vit_huge", depth: int | None = None, nodes: int = NODES) -> tuple[ShardCase, ...]:
    """Return the shard plans.

    Args:
        preset: of the model.
        depth: its blocks; None is the preset's own.
        nodes: an even number, of eight ranks each.
    """
    ranks = nodes * PER_NODE
    half = ranks // 2
    by_node = [range(start, start + PER_NODE) for start in range(0, ranks, PER_NODE)]
    by_pair = [range(start, start + 2 * PER_NODE) for start in range(half, ranks, 2 * PER_NODE)]
    unequal = [*by_node[: nodes // 2], *by_pair]
    modes = ["SHARD_GRAD_OP"] * (nodes // 2) + ["FULL_SHARD"] * len(by_pair)
    micro_batches = [1] * (nodes // 2) + [2] * len(by_pair)
    plans = {
        "one group": _shard_plan([range(ranks)], nodes),
        "a group for each node": _shard_plan(by_node, nodes),
        "groups of 8 and 16": _shard_plan(unequal, nodes, modes, micro_batches),
        "a copy on each rank": _shard_plan([range(ranks)], nodes, ["NO_SHARD"]),
    }
    return tuple(ShardCase(name, plan, preset, depth) for name, plan in plans.items())


def _shard_plan(
    groups: Sequence[Sequence[int]], nodes: int, modes: Sequence[str] = (), micro_batches: Sequence[int] = ()
) -> ShardPlan:
    types = device_types(nodes)
    shares = tuple(8 if kind == FAST else 4 for kind in types)
    plan = ShardPlan(
        sum(shares),
        shares,
        tuple(tuple(group) for group in groups),
        types,
        modes=tuple(modes),
        micro_batches=tuple(micro_batches),
    )
    plan.validate()
    return plan


def pipeline_cases(stages: int = 8, nodes: int = NODES) -> tuple[PipelineCase, ...]:
    """Return the pipeline plans.

    Args:
        stages: of each pipeline, up to eight.
        nodes: an even number, of eight ranks each.
    """
    return (
        PipelineCase("8 stages, two cuts", _pipeline_plan(stages, nodes, "1f1b")),
        PipelineCase("idle ranks, zero bubble", _pipeline_plan(stages, nodes, "zero_bubble", idle=True), tied=False),
        PipelineCase("2 stages a rank", _pipeline_plan(stages, nodes, "interleaved_1f1b")),
    )


def _pipeline_plan(stages: int, nodes: int, schedule: str, *, idle: bool = False) -> PipelinePlan:
    """A pipeline on each node. Slow nodes cut the same units elsewhere and run half as many micro-batches."""
    per_rank = 2 if schedule == "interleaved_1f1b" else 1
    total = stages * per_rank
    units = 3 * total + 3  # an embedding, three blocks a stage, a norm, a head
    even = [3 * index for index in range(1, total)]
    later = [border + 1 + index % 2 for index, border in enumerate(even)]
    pipelines = []
    for node in range(nodes - idle):
        is_fast = node < nodes // 2
        borders = [0, *(even if is_fast else later), units]
        count = 2 * stages if is_fast else stages
        depths = warmup_depths(total, count) if per_rank == 1 else [1] * total
        cut = zip(borders, borders[1:], depths, strict=False)
        ranks = tuple(range(node * PER_NODE, node * PER_NODE + stages))
        pipelines.append(Pipeline(ranks, tuple(Stage((a, b), warmup) for a, b, warmup in cut), count))
    micro_batch = 2
    names = ("embed", *(f"blocks.{index}" for index in range(units - 3)), "norm", "head")
    plan = PipelinePlan(
        micro_batch * sum(each.micro_batches for each in pipelines),
        micro_batch,
        tuple(pipelines),
        device_types(nodes),
        names,
        schedule,
    )
    plan.validate()
    return plan
