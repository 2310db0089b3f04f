"""The table that a fit of pipelines ends with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lightning_hetero.plan import PipelinePlan
from lightning_hetero.strategies.rank_table import MeasuredRank, print_ranks, rank_table


@dataclass(frozen=True, kw_only=True)
class PipeSummary(MeasuredRank):
    """What a rank of hetero_pipe measured.

    Attributes:
        pipeline: the one that it belongs to; None for an idle rank.
        units: first unit and the one after the last of each of its stages.
    """

    pipeline: int | None
    units: tuple[tuple[int, int], ...]


def print_pipe_summary(ranks: Sequence[PipeSummary], plan: PipelinePlan) -> None:
    """Print the table that a fit of hetero_pipe ends with."""
    table = rank_table(
        f"hetero_pipe, {plan.schedule}",
        ranks,
        plan,
        parts={
            "pipeline": lambda rank: "-" if rank.pipeline is None else str(rank.pipeline),
            "units": lambda rank: ", ".join(f"{start}-{stop - 1}" for start, stop in rank.units) or "idle",
        },
        rates={},
    )
    steps = [rank.step_s for rank in ranks if rank.step_s]
    lines = [f"together {plan.global_batch_size / max(steps):.2f} samples/s"] if steps else []
    print_ranks(table, lines, ranks)
