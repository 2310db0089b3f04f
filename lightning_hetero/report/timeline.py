"""Figure of one step: when each rank is to do what, and below it when it did.

Of a pipeline both are grids of actions, and what is empty between them is a bubble. Of anything else it is where the
time went. A step that ``TraceCapture`` has looked at is drawn as it ran; without one, each rank's parts of a mean step
are, whose order nobody noted.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from lightning_hetero.metrics import Line
from lightning_hetero.report.measured_rank import measured_ranks
from lightning_hetero.report.run import Run
from lightning_hetero.report.run_tables import many, percent
from lightning_hetero.report.style import COLORS, MOST_RANKS, NAMES, head, new_figure, plain, say, seconds_unit
from lightning_hetero.schedule import Action
from lightning_hetero.simulator.planned_step import PlannedStep, Span

_BUBBLE = "#f1f3f5"
_NAMED = 0.012
"""share of the step from which on an action is wide enough for its number"""

_WIDTH = 12.0


def timeline_figure(run: Run) -> Figure:
    """The step as planned, above the step as measured, rank by rank."""
    ranks = run.ranks[:MOST_RANKS]
    planned = run.planned_step
    measured, step_s, note = _measured(run, ranks)
    planned_s = planned.step_s if isinstance(planned, PlannedStep) else 0.0
    factor, unit = seconds_unit([step_s, planned_s])
    rows = len(ranks)
    is_planned = isinstance(planned, PlannedStep)
    panel = 0.5 + max(0.18, 0.42 - 0.006 * rows) * rows
    above = panel if is_planned else 0.6
    figure = new_figure(_WIDTH, 2.2 + above + panel)
    top, bottom = figure.subplots(2, 1, sharex=is_planned, height_ratios=[above, panel])
    if isinstance(planned, PlannedStep):
        _draw(top, ranks, planned.spans, dict.fromkeys(ranks, planned.step_s), factor, max(step_s, planned_s))
        assumed = f" ({planned.assumed})" if planned.assumed else ""
        top.set_title(f"planned{assumed}", fontsize=10, loc="left")
        top.set_ylabel("rank")
    else:
        say(top, f"nothing planned: {planned}")
    # a step that was traced is one for all; means end where they end
    own = {rank: max((span.end_s for span in measured if span.rank == rank), default=0.0) for rank in ranks}
    ends = dict.fromkeys(ranks, step_s) if run.timelines else own
    _draw(bottom, ranks, measured, ends, factor, max(step_s, planned_s))
    bottom.set_title(note, fontsize=10, loc="left")
    bottom.set_ylabel("rank")
    bottom.set_xlabel(f"time in the step ({unit})")
    shown = [*measured, *(planned.spans if isinstance(planned, PlannedStep) else ())]
    kinds = [kind for kind in COLORS if any(span.kind == kind for span in shown)]
    handles = [Patch(color=COLORS[kind], label=NAMES.get(kind, kind)) for kind in kinds]
    if any(span.kind in ("F", "B", "I", "W") for span in shown):
        handles.append(Patch(facecolor=_BUBBLE, edgecolor="#c4cad1", label="bubble"))
    handles = list({handle.get_label(): handle for handle in handles}.values())
    figure.legend(handles=handles, loc="outside lower center", ncols=8, frameon=False, fontsize=9)
    head(figure, run, "A step, rank by rank")
    return figure


def _measured(run: Run, ranks: Sequence[int]) -> tuple[list[Span], float, str]:
    """Spans of a step as it was, its seconds, and what is drawn, in words."""
    lines = {rank: line for rank, line in run.timelines.items() if rank in ranks}
    if not lines:
        found = list(_of_parts(run, ranks))
        end_s = max((span.end_s for span in found), default=0.0)
        steps = many(len(run.compared), "step")
        note = f"measured, mean of {steps}: parts are not in their order, which TraceCapture notes"
        return found, end_s, note
    found = [span for rank, line in lines.items() for span in _of_line(rank, line)]
    end_s = max((span.end_s for span in found), default=0.0)
    step = next(iter(lines.values()))["step"]
    note = f"measured, step {step}, as it was traced (being looked at makes it longer)"
    return found, end_s, note


def _of_parts(run: Run, ranks: Sequence[int]) -> Iterator[Span]:
    for each in measured_ranks(run):
        at_s = 0.0
        for name, seconds in each.parts_s.items() if each.rank in ranks else ():
            if seconds > 0:
                yield Span(each.rank, name, name, at_s, at_s + seconds)
            at_s += seconds


def _of_line(rank: int, line: Line) -> Iterator[Span]:
    """Of a pipeline its actions, and what comes after the last; else the parts."""
    actions = line.get("actions") or []
    for name, start_s, end_s in actions:
        yield Span(rank, Action.parse(name).kind, name, start_s, end_s)
    after_s = max((end_s for _, _, end_s in actions), default=-1.0)
    for name, start_s, end_s in line.get("parts") or []:
        if not actions or (start_s >= after_s and name in ("optimizer", "blocked")):
            yield Span(rank, name, name, start_s, end_s)


def _draw(
    axes: Axes,
    ranks: Sequence[int],
    spans: Sequence[Span],
    ends_s: Mapping[int, float],
    factor: float,
    most_s: float,
) -> None:
    """Rows of spans until each rank's end, and there the share of the step in which it computes nothing."""
    place = {rank: index for index, rank in enumerate(ranks)}
    busy_s = dict.fromkeys(ranks, 0.0)
    widths = [ends_s[rank] * factor for rank in ranks]
    axes.barh(range(len(ranks)), widths, height=0.82, color=_BUBBLE, edgecolor="#c4cad1")
    for kind in dict.fromkeys(span.kind for span in spans):
        own = [span for span in spans if span.kind == kind and span.rank in place]
        # edges part actions that follow one another, and would hide what is narrower than they are
        wide = [span for span in own if span.kind in ("F", "B", "I", "W")]
        axes.barh(
            [place[span.rank] for span in own],
            [(span.end_s - span.start_s) * factor for span in own],
            left=[span.start_s * factor for span in own],
            height=0.82,
            color=COLORS[kind],
            edgecolor="white" if wide else "none",
            linewidth=0.5,
        )
    for span in spans:
        if span.rank not in place:
            continue
        if span.kind in ("F", "B", "I", "W", "compute"):
            busy_s[span.rank] += span.end_s - span.start_s
        if span.kind in ("F", "B", "I", "W") and span.end_s - span.start_s > _NAMED * most_s and len(ranks) <= 24:
            middle = (span.start_s + span.end_s) / 2 * factor
            number = str(Action.parse(span.name).micro_batch)
            axes.text(middle, place[span.rank], number, ha="center", va="center", fontsize=8, color="white")
    for rank in ranks:
        if ends_s[rank] > 0:
            idle = percent(max(0.0, 1 - busy_s[rank] / ends_s[rank]))
            axes.text(ends_s[rank] * factor, place[rank], f" idle {idle}", va="center", fontsize=8)
    if len(ranks) <= 32:
        axes.set_yticks(range(len(ranks)), [str(rank) for rank in ranks])
    axes.set_xlim(0, 1.1 * most_s * factor)
    axes.invert_yaxis()
    axes.tick_params(labelbottom=True)
    plain(axes)
