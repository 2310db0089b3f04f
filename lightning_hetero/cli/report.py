"""``lightning-hetero report``: what every rank did, against what was planned, as tables, plots and a page."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

from lightning_hetero.report.console import console, progress_bar
from lightning_hetero.report.page import Picture, Section, write_page
from lightning_hetero.report.run import Run, read_runs
from lightning_hetero.report.run_tables import run_tables
from lightning_hetero.report.scaling import scaling_lines, scaling_table

NO_PLOTS = "no plots: matplotlib is not installed; install it with: pip install 'lightning-hetero[plot]'"

DESCRIPTION = """\
Show what every rank of a run did, from its metrics.jsonl: planned against measured, where the time of a step goes, who
held the others up; with several runs their throughput over ranks. Tables on the terminal, plots and one page with all
of it in a folder. Runs that were killed can be read, too. Callbacks write the file:

  Trainer(callbacks=[RankThroughput(), RankMemory(), StragglerMonitor(), TraceCapture()])"""

EPILOG = """\
examples:
  lightning-hetero report lightning_logs/version_3
  lightning-hetero report runs/1_rank runs/2_ranks runs/4_ranks --out scaling

What the plots mean is in docs/report.md. They need matplotlib (pip install 'lightning-hetero[plot]')."""


def add_to(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "report",
        help="what every rank did, against what was planned",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("runs", nargs="+", metavar="RUN_DIR", help="folder of a run, which holds its metrics.jsonl")
    parser.add_argument(
        "--out",
        metavar="DIR",
        help="folder for plots and page (default: report, within the run's folder where there is one run)",
    )
    parser.add_argument("--no-html", action="store_true", help="write plots only, no page")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Read, show, draw."""
    screen = console()
    with progress_bar("reading") as update:
        runs = read_runs(options.runs, update)
    out = _folder(options.out, runs)
    sections = [Section(f"{each.name}, {each.strategy}", each.emulated, run_tables(each)) for each in runs]
    if len(runs) > 1:
        lines = scaling_lines(runs)
        emulated = any(line.emulated for line in lines)
        sections.insert(0, Section("Runs side by side", emulated, [scaling_table(lines)]))
    for section in sections:
        for table in section.tables:
            table.show(screen)
    notes = []
    if find_spec("matplotlib") is None:
        notes.append(NO_PLOTS)
        screen.print(NO_PLOTS, markup=False, soft_wrap=True)
    else:
        sections = _with_pictures(runs, sections, out)
        screen.print(f"plots are in {out}", markup=False, soft_wrap=True)
    if not options.no_html:
        out.mkdir(parents=True, exist_ok=True)
        write_page(out / "report.html", sections, notes)
        screen.print(f"all of it on one page: {out / 'report.html'}", markup=False, soft_wrap=True)
    return 0


def _with_pictures(runs: Sequence[Run], sections: Sequence[Section], out: Path) -> list[Section]:
    from lightning_hetero.report.figures import RUN_FIGURES, run_pictures, scaling_picture

    several = len(runs) > 1
    total = len(runs) * len(RUN_FIGURES) + several
    with progress_bar("drawing") as update:
        found = []
        done = 0
        rest = list(sections)
        if several:
            update(done, total, "runs side by side")
            first = rest.pop(0)
            found.append(_pictured(first, [scaling_picture(scaling_lines(runs), out)]))
            done += 1
        for each, section in zip(runs, rest, strict=True):
            pictures = []
            drawn = run_pictures(each, _folder_of(each, out) if several else out)
            for name, *_ in RUN_FIGURES:
                update(done, total, f"{each.name}: {name}")
                pictures.append(next(drawn))
                done += 1
            found.append(_pictured(section, pictures))
        update(total, total, "done")
    return found


def _pictured(section: Section, pictures: Sequence[Picture]) -> Section:
    return replace(section, pictures=tuple(pictures))


def _folder(given: str | None, runs: Sequence[Run]) -> Path:
    """Where to write."""
    if given is not None:
        return Path(given)
    if len(runs) > 1:
        return Path("report")
    path = runs[0].path
    return (path if path.is_dir() else path.parent) / "report"


def _folder_of(run: Run, out: Path) -> Path:
    """Of one run among several, a folder within."""
    return out / run.name.replace("/", "_")
