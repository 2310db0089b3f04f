"""A plan as a table: what each rank does, its idle share and peak memory, beside the even plan."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from rich.table import Table

from lightning_hetero.cluster import Cluster
from lightning_hetero.plan import PipelinePlan, ShardPlan
from lightning_hetero.plan.common import RankPrediction
from lightning_hetero.units import format_bytes, format_seconds

Plan = ShardPlan | PipelinePlan

STRATEGIES: dict[type, str] = {ShardPlan: "hetero_fsdp", PipelinePlan: "hetero_pipe"}
"""which strategy runs a kind of plan"""


def plan_table(plan: Plan, cluster: Cluster, even: Plan | None = None) -> Table:
    """One line a rank; neighbouring ranks that do the same share a line.

    Args:
        plan: what to show.
        cluster: that it is for.
        even: the even plan of the same kind, shown beside it where there is one.
    """
    table = Table(title=_title(plan, cluster), title_justify="left")
    own, beside = _columns(plan), _brief(even) if even is not None else []
    for name in ("rank", "node", "device", *(column.name for column in own)):
        left = name in ("node", "device", "units", "mode")
        table.add_column(name, justify="left" if left else "right", no_wrap=True)
    for column in beside:
        table.add_column(f"even:\n{column.name}", justify="right", style="dim", no_wrap=True)
    columns = [*own, *beside]
    rows = [
        _Row(rank, device.node, device.type, tuple(column.cells[rank] for column in columns))
        for rank, device in enumerate(cluster.devices)
    ]
    labels = {place for place, column in enumerate(columns) if column.is_label}
    for first, last in _runs(rows, labels):
        cells = [
            _span(one, other) if place in labels else one
            for place, (one, other) in enumerate(zip(first.cells, last.cells, strict=True))
        ]
        table.add_row(_span(str(first.rank), str(last.rank)), _span(first.node, last.node), first.device, *cells)
    return table


def plan_lines(plan: Plan, even: Plan | None = None, *, misfit: bool = False) -> list[str]:
    """Step time, throughput, idle share and the gap to the lower bound, each against the even plan where known.

    Args:
        plan: what is to be done.
        even: the even plan of the same kind.
        misfit: whether the even plan would run out of memory, so that no ratio means anything.
    """
    lines = []
    step_s = plan.predicted_step_s
    if step_s:
        lines.append(
            f"step time {format_seconds(step_s)}, throughput {plan.global_batch_size / step_s:.4g} samples/s, "
            f"idle share {_percent(mean_idle(plan))}"
        )
    if even is not None and even.predicted_step_s and step_s:
        lines.append(
            f"the even plan: step time {format_seconds(even.predicted_step_s)}, throughput "
            f"{even.global_batch_size / even.predicted_step_s:.4g} samples/s, idle share {_percent(mean_idle(even))}: "
            + ("but it does not fit" if misfit else f"this plan is {even.predicted_step_s / step_s:.2f} x as fast")
        )
    elif even is None and isinstance(plan, PipelinePlan) and plan.world_size > len(plan.unit_names):
        lines.append(f"there is no even plan: {plan.world_size} devices and {len(plan.unit_names)} units")
    elif even is None:
        lines.append("no even plan fits the memory of these devices")
    if plan.gap is not None and plan.lower_bound_s:
        lines.append(
            f"no plan for these devices, costs and batch can be below {format_seconds(plan.lower_bound_s)}: "
            f"this one is {max(0.0, 100 * plan.gap):.1f} % above that bound"
        )
    return lines


def mean_idle(plan: Plan) -> float | None:
    """Mean idle share over all ranks; ``None`` where nothing was predicted."""
    if not plan.predictions:
        return None
    return sum(prediction.idle_share for prediction in plan.predictions) / len(plan.predictions)


@dataclass(frozen=True)
class _Column:
    name: str
    cells: tuple[str, ...]
    is_label: bool = False
    """whether it only numbers things: ranks that differ in nothing else share a line"""


@dataclass(frozen=True)
class _Row:
    rank: int
    node: str
    device: str
    cells: tuple[str, ...]


def _runs(rows: Sequence[_Row], labels: set[int]) -> Iterator[tuple[_Row, _Row]]:
    """First and last of each run of neighbouring ranks that do the same on devices of one type."""

    def work(row: _Row) -> tuple[str, ...]:
        return (row.device, *(cell for place, cell in enumerate(row.cells) if place not in labels))

    for _, same in groupby(rows, key=work):
        run = list(same)
        yield run[0], run[-1]


def _span(first: str, last: str) -> str:
    return first if first == last else f"{first} to {last}"


def _title(plan: Plan, cluster: Cluster) -> str:
    model = f" of {plan.model.name}" if plan.model is not None else ""
    title = f"{STRATEGIES[type(plan)]}{model} on {cluster.name}, global batch {plan.global_batch_size} samples"
    if isinstance(plan, PipelinePlan):
        count = len(plan.pipelines)
        title += (
            f", {count} pipeline{'s' if count > 1 else ''}, {plan.schedule}, micro-batches of {plan.micro_batch_size}"
        )
    return title + (", emulated devices" if cluster.emulate else "")


def _columns(plan: Plan) -> list[_Column]:
    columns = _shard_columns(plan) if isinstance(plan, ShardPlan) else _pipeline_columns(plan)
    columns = [column for column in columns if set(column.cells) != {"-"}]
    if plan.predictions:
        columns += [
            _Column("busy", tuple(format_seconds(each.busy_s) for each in plan.predictions)),
            _Column("idle", tuple(_percent(each.idle_share) for each in plan.predictions)),
            _Column("peak memory", tuple(map(_peak, plan.predictions))),
        ]
    return columns


def _brief(plan: Plan) -> list[_Column]:
    """Of the even plan what is worth comparing: how much each rank does, and what it costs."""
    if isinstance(plan, ShardPlan):
        work = _Column("samples", tuple(map(str, plan.batch_shares)))
    else:
        counts = [0] * plan.world_size
        for pipeline in plan.pipelines:
            for index, stage in enumerate(pipeline.stages):
                counts[pipeline.rank_of(index)] += stage.units[1] - stage.units[0]
        work = _Column("units", tuple(map(str, counts)))
    return [work, *(column for column in _columns(plan) if column.name in ("idle", "peak memory"))]


def _shard_columns(plan: ShardPlan) -> list[_Column]:
    ranks = range(plan.world_size)
    groups = [plan.group_of(rank) for rank in ranks]
    return [
        _Column("group", tuple(map(str, groups)), is_label=True),
        _Column("ranks in it", tuple(str(len(plan.groups[group])) for group in groups)),
        _Column("mode", tuple(plan.mode_of(group) for group in groups)),
        _Column("samples", tuple(map(str, plan.batch_shares))),
        _Column("micro-batches", tuple(_count(plan.micro_batches_of(group)) for group in groups)),
        _Column("recompute", tuple(_flag(plan.checkpoints(rank)) for rank in ranks)),
    ]


def _pipeline_columns(plan: PipelinePlan) -> list[_Column]:
    cells: list[tuple[str, str, str, str, str, str]] = [("idle", "-", "-", "-", "-", "-")] * plan.world_size
    for index, pipeline in enumerate(plan.pipelines):
        for rank in pipeline.ranks:
            own = pipeline.stages_of(rank)
            stages = [pipeline.stages[stage] for stage in own]
            cells[rank] = (
                str(index),
                ", ".join(map(str, own)),
                "; ".join(_units(plan, stage.units) for stage in stages),
                str(pipeline.micro_batches),
                ", ".join(str(stage.warmup) for stage in stages) if plan.schedule == "1f1b" else "-",
                _flag(any(stage.activation_checkpointing for stage in stages)),
            )
    names = ("pipeline", "stage", "units", "micro-batches", "warm-up", "recompute")
    return [_Column(name, tuple(row[place] for row in cells)) for place, name in enumerate(names)]


def _units(plan: PipelinePlan, units: tuple[int, int]) -> str:
    first, last = plan.unit_names[units[0]], plan.unit_names[units[1] - 1]
    count = units[1] - units[0]
    return first if count == 1 else f"{first} to {last} ({count})"


def _count(micro_batches: int) -> str:
    return "-" if micro_batches == 1 else str(micro_batches)


def _flag(value: bool) -> str:
    return "yes" if value else "-"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f} %"


def _peak(prediction: RankPrediction) -> str:
    return "-" if prediction.peak_memory_bytes is None else format_bytes(prediction.peak_memory_bytes)
