"""A run as tables: planned against measured, where the time of a step goes, who held the others up."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from lightning_hetero.report.measured_rank import MeasuredRank, Pair, measured_ranks
from lightning_hetero.report.run import Run
from lightning_hetero.report.table import ReportTable, cells
from lightning_hetero.units import format_bytes, format_seconds

EMULATED = "EMULATED devices, a rehearsal: no measurement of real ones"

_MOST_LISTED = 8


def run_tables(run: Run) -> list[ReportTable]:
    """All tables of one run."""
    ranks = measured_ranks(run)
    return [planned_table(run, ranks), parts_table(run, ranks), straggler_table(run)]


def labelled(run: Run, title: str) -> str:
    """A title that says which run it is, and whether its devices are emulated."""
    return f"{title}: {run.name}, {run.strategy}, {many(run.world_size, 'rank')}" + (
        f" ({EMULATED})" if run.emulated else ""
    )


def planned_table(run: Run, ranks: Sequence[MeasuredRank]) -> ReportTable:
    """One line a rank: what was planned for it, and what it measured."""
    rows = [
        cells(
            [
                str(each.rank),
                each.device,
                f"{each.samples:.4g}",
                *_pair(each.busy_s, format_seconds),
                *_pair(each.step_s, format_seconds),
                *_pair(each.idle_share, percent),
                *_pair(each.peak_memory_bytes, format_bytes),
                f"{each.samples_per_s:.4g}",
                _known(each.tflops_per_s, "{:.3g}"),
                None if each.mfu is None else percent(each.mfu),
                _known(each.power_w, "{:.4g}"),
                _known(each.joules_per_sample, "{:.3g}"),
            ]
        )
        for each in ranks
    ]
    planned = [f"{what}\n{which}" for what in ("busy", "step", "idle", "peak memory") for which in _PLANNED_MEASURED]
    columns = ("rank", "device", "samples\na step", *planned, "samples/s", "TFLOP/s", "MFU", "power\nW", "J/sample")
    title = labelled(run, "Planned against measured")
    return ReportTable(title, columns, tuple(rows), (*_about(run, ranks), *absent(run, ranks))).without_empty()


_PLANNED_MEASURED = ("planned", "measured")


def parts_table(run: Run, ranks: Sequence[MeasuredRank]) -> ReportTable:
    """One line a rank: seconds of each part of a mean step, and its share of the step."""
    names = list(dict.fromkeys(name for each in ranks for name in each.parts_s))
    rows = []
    for each in ranks:
        step_s = each.step_s.measured or 0.0
        parts = [
            f"{format_seconds(each.parts_s[name])}\n{percent(each.parts_s[name] / step_s)}"
            if name in each.parts_s
            else None
            for name in names
        ]
        rows.append(cells([str(each.rank), each.device, format_seconds(step_s), *parts]))
    headings = ["waiting or\ncommunication" if name == "blocked" else name for name in names]
    notes = []
    if "blocked" in names:
        notes.append(
            "waiting and communication cannot be told apart: that takes the lines of all ranks, and those of "
            f"{listed(run.missing_ranks, 'rank')} are not here"
            if run.missing_ranks
            else "waiting and communication cannot be told apart in steps that not all ranks have finished"
        )
    if "communication" in names:
        notes.append("communication is what nothing hides; in a pipeline waiting includes its messages and its bubble")
    title = labelled(run, "Where the time of a step goes")
    return ReportTable(title, ("rank", "device", "step", *headings), tuple(rows), tuple(notes))


def straggler_table(run: Run) -> ReportTable:
    """One line for each time that a rank was named."""
    rows = [
        (
            str(line["rank"]),
            run.device(line["rank"]),
            str(line["since_step"]),
            str(line["step"]),
            format_seconds(line["compute_s"]),
            format_seconds(line["expected_s"]),
            f"{line['slowdown'] - 1:.0%}",
            "the plan" if line.get("planned") else "the median rank",
        )
        for line in run.stragglers
    ]
    columns = ("rank", "device", "since step", "found at step", "compute", "expected", "slower by", "expected by")
    if rows:
        return ReportTable(labelled(run, "Stragglers"), columns, tuple(rows))
    had = run.had("StragglerMonitor")
    why = {
        True: "StragglerMonitor named none",
        False: "not looked for, StragglerMonitor was not among the callbacks",
        None: "none was named",
    }[had]
    return ReportTable(f"{labelled(run, 'Stragglers')}: {why}", columns, ())


def _about(run: Run, ranks: Sequence[MeasuredRank]) -> list[str]:
    """Over which steps, and the run as a whole."""
    steps = run.compared
    total = sum(each.samples_per_s for each in ranks)
    which = f"{steps[0]} to {steps[-1]}" if len(steps) > 1 else str(steps[0])
    text = f"means over {many(len(steps), 'full step')}, {which} of {run.last_step}"
    if steps == [run.first_step]:
        text += ", the first, which warms up"
    lines = [f"{text}; together {total:.4g} samples/s" if not run.missing_ranks else text]
    whole = run.plan
    if whole is not None and whole.predicted_step_s:
        lines.append(
            f"the plan expects a step of {format_seconds(whole.predicted_step_s)} for {whole.global_batch_size} "
            f"samples: {whole.global_batch_size / whole.predicted_step_s:.4g} samples/s"
        )
    if run.missing_ranks:
        lines.append(
            f"no lines of {listed(run.missing_ranks, 'rank')}: put their metrics.rank_*.jsonl into {run.path} where "
            "they are on another machine"
        )
    if run.ended_badly:
        lines.append(f"{listed(run.ended_badly, 'rank')} did not end well, or still run{_s(run.ended_badly)}")
    if run.earlier:
        lines.append(f"{many(run.earlier, 'earlier run')} in this folder: not shown")
    return lines


def absent(run: Run, ranks: Sequence[MeasuredRank]) -> list[str]:
    """Why columns are not there, a line each."""
    lines = []
    if all(each.step_s.planned is None for each in ranks):
        lines.append(f"nothing planned: {_no_prediction(run)}")
    if all(each.peak_memory_bytes.measured is None for each in ranks):
        lines.append(f"no memory: {no_memory(run)}")
    if all(each.tflops_per_s is None for each in ranks):
        lines.append(f"no TFLOP/s: {no_flops(run)}")
    elif all(each.mfu is None for each in ranks):
        why = run.reason("run", "no_peak") or "no dense peak is known"
        lines.append(f"no MFU: {why}")
    if all(each.power_w is None for each in ranks):
        why = run.reason("energy_source", "reason") or _not_there(run, "RankEnergy", "no step has any")
        lines.append(f"no power: {why}")
    return lines


def no_memory(run: Run) -> str:
    """Why no memory was measured."""
    return _not_there(run, "RankMemory", "on a CPU it is counted in steps that are logged, and there was none")


def no_flops(run: Run) -> str:
    """Why no FLOP/s are known."""
    return run.reason("model", "no_flops") or _not_there(run, "RankThroughput", "no step has any")


def _no_prediction(run: Run) -> str:
    return run.no_plan if run.plan is None else "the plan predicts nothing of its ranks"


def _not_there(run: Run, callback: str, otherwise: str) -> str:
    return f"{callback} was not among the callbacks" if run.had(callback) is False else otherwise


def _pair(pair: Pair, text: Callable[[float], str]) -> list[str | None]:
    return [None if value is None else text(value) for value in (pair.planned, pair.measured)]


def _known(value: float | None, form: str) -> str | None:
    return None if value is None else form.format(value)


def percent(share: float) -> str:
    """A share in percent."""
    return f"{100 * share:.1f} %"


def many(count: int, what: str) -> str:
    """``3 ranks``, ``1 rank``."""
    return f"{count} {what}{'' if count == 1 else 's'}"


def listed(numbers: Sequence[int], what: str) -> str:
    """``ranks 1, 2 and 5 more``."""
    shown = ", ".join(map(str, numbers[:_MOST_LISTED]))
    more = f" and {len(numbers) - _MOST_LISTED} more" if len(numbers) > _MOST_LISTED else ""
    return f"{what}{'' if len(numbers) == 1 else 's'} {shown}{more}"


def _s(numbers: Sequence[int]) -> str:
    return "s" if len(numbers) == 1 else ""
