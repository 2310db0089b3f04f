"""``lightning-hetero profile``: what every unit of a model costs."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import reduce
from pathlib import Path

import torch

from lightning_hetero.cli.arguments import positive_integers
from lightning_hetero.cli.ranks import gathered, process_group
from lightning_hetero.costs import ModelCosts
from lightning_hetero.errors import HeteroError
from lightning_hetero.models.inputs import class_loss, preset_inputs
from lightning_hetero.models.presets import PRESETS, build_preset
from lightning_hetero.profiler.analytic import analytic_costs
from lightning_hetero.profiler.devices import describe
from lightning_hetero.profiler.speed import MATMUL_DTYPES
from lightning_hetero.profiler.units import MICRO_BATCHES, REPEATS, profile_units
from lightning_hetero.report.console import console, progress_bar
from lightning_hetero.report.costs_table import costs_lines, costs_table

DESCRIPTION = """\
Measure a model unit by unit (embedding, each block, head) on the device at hand, and write a costs file for
"lightning-hetero plan". One unit at a time is brought to the device, so the model may be larger than it; units that
are alike are measured once. FLOPs and activation bytes are counted on the meta device, which needs no memory.

Under torchrun the first rank of every device type measures, and one file has them all. On machines that cannot run
together, run it on one after another with --add."""

EPILOG = """\
examples:
  lightning-hetero profile --model vit_1b --dtype bfloat16 --out costs.json
  lightning-hetero profile --model gpt_1_4b --sequence 1024 --micro-batches 1,2,4,8 --out costs.json
  lightning-hetero profile --model vit_15b --analytic --out costs.json       no device needed
  torchrun --nproc-per-node 8 -m lightning_hetero profile --model vit_1b --out costs.json"""


def add_to(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "profile",
        help="what every unit of a model costs, measured or counted",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add_model_arguments(parser, required=True)
    parser.add_argument("--out", required=True, metavar="FILE", help="costs file to write (JSON)")
    parser.add_argument(
        "--micro-batches",
        type=positive_integers,
        default=MICRO_BATCHES,
        metavar="N,N,...",
        help="micro-batch sizes in samples; seconds are fitted as fixed + per sample over them (default: 1,2,4)",
    )
    parser.add_argument(
        "--dtype",
        default="float32",
        choices=tuple(MATMUL_DTYPES),
        help="of parameters and compute (default: float32)",
    )
    parser.add_argument(
        "--device", metavar="cuda|cuda:N|cpu", help="where units run (default: CUDA where there is one, else cpu)"
    )
    parser.add_argument(
        "--repeats", type=int, default=REPEATS, metavar="N", help=f"timed runs of each size (default: {REPEATS})"
    )
    parser.add_argument(
        "--analytic", action="store_true", help="count FLOPs and bytes only; a plan then takes FLOPs / device speed"
    )
    parser.add_argument(
        "--add", action="store_true", help="keep the seconds that FILE has for other device types of the same model"
    )
    parser.set_defaults(run=run)


def add_model_arguments(parser: argparse.ArgumentParser, *, required: bool) -> None:
    """Add ``--model`` and ``--sequence``."""
    parser.add_argument("--model", required=required, metavar="NAME", help=f"one of {', '.join(PRESETS)}")
    parser.add_argument(
        "--sequence", type=int, metavar="N", help="tokens per sample of a GPT (default: its whole context)"
    )


def run(options: argparse.Namespace) -> int:
    """Measure or count, write the file, show it."""
    out = Path(options.out)
    before = ModelCosts.load(out) if options.add and out.exists() else None
    if options.analytic:
        costs = counted_costs(options.model, options.dtype, options.sequence)
        _finish(costs, before, out)
        return 0
    with process_group() as rank:
        costs = _measured(options, rank)
        if rank == 0:
            _finish(costs, before, out)
    return 0


def counted_costs(model: str, dtype: str, sequence: int | None) -> ModelCosts:
    """Costs of a preset without seconds."""
    inputs = preset_inputs(model, sequence=sequence)
    return analytic_costs(build_preset(model, device="meta"), inputs, name=model, dtype=dtype, loss=class_loss)


def _measured(options: argparse.Namespace, rank: int) -> ModelCosts:
    """Costs with the seconds of every device type among the ranks."""
    inputs = preset_inputs(options.model, sequence=options.sequence)
    device = _device(options.device)
    kinds = gathered(describe(device)[0])
    mine: ModelCosts | HeteroError | None = None
    if kinds.index(kinds[rank]) == rank:
        out = console(stderr=True)
        remark: Callable[[str], None] = lambda text: out.print(text, markup=False, soft_wrap=True)  # noqa: E731
        with progress_bar(f"profiling {options.model} on {kinds[rank]}") as progress:
            try:
                mine = profile_units(
                    build_preset(options.model, device="meta"),
                    inputs,
                    name=options.model,
                    dtype=options.dtype,
                    device=device,
                    micro_batches=options.micro_batches,
                    repeats=options.repeats,
                    loss=class_loss,
                    progress=progress,
                    remark=remark,
                )
            except HeteroError as error:
                mine = error  # raised by all, so that none waits for it
    every = gathered(mine)
    problems = [each for each in every if isinstance(each, HeteroError)]
    if problems:
        raise problems[0]
    return reduce(ModelCosts.with_timings_of, [each for each in every if isinstance(each, ModelCosts)])


def _device(name: str | None) -> torch.device:
    if name is None:
        return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        device = torch.device("meta")
    index = device.index or 0
    if device.type == "cpu" or (device.type == "cuda" and index < torch.cuda.device_count()):
        return device
    there = ", ".join(["cpu", *(f"cuda:{i}" for i in range(torch.cuda.device_count()))])
    raise HeteroError(f"--device is {name!r}: units are measured on one of {there}; without a device use --analytic")


def _finish(costs: ModelCosts, before: ModelCosts | None, out: Path) -> None:
    if before is not None:
        costs = costs.with_timings_of(before)
    costs.save(out)
    screen = console()
    screen.print(costs_table(costs))
    for line in [*costs_lines(costs), *_flat(costs), f"written to {out}"]:
        screen.print(line, markup=False, soft_wrap=True)


def _flat(costs: ModelCosts) -> list[str]:
    """Say where a fit found no time per sample though samples take work: noise, or too few sizes."""
    lines = []
    for kind in costs.timed_types:
        timings = [(unit.name, unit.timings[kind]) for unit in costs.units if unit.forward_flops > 0]
        flat = [name for name, t in timings if not t.forward_per_sample_s or not t.backward_per_sample_s]
        if flat:
            lines.append(
                f"mind: on {kind} {len(flat)} of {len(timings)} units ({flat[0]}, ...) took no longer with more "
                "samples, so seconds of larger micro-batches will be far too short: measure more and larger sizes "
                "(--micro-batches), with more --repeats, on an idle device"
            )
    return lines
