"""``lightning-hetero discover``: what devices there are."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

import torch

from lightning_hetero.cli.ranks import gathered, process_group
from lightning_hetero.cluster import Cluster
from lightning_hetero.cluster.recognise import changes
from lightning_hetero.profiler.busy import DeviceUse, device_use
from lightning_hetero.profiler.speed import MATMUL_DTYPES
from lightning_hetero.report.cluster_table import cluster_lines, cluster_table
from lightning_hetero.report.console import console

DESCRIPTION = """\
Look at the devices and measure them: type, free memory, speed of matrix products, links. Alone it describes this
machine; under torchrun, or srun, one device per rank, with the links between them.

Plans are made on the memory that is free now: a busy device is named with what is using it. A device is recognised
again by its UUID, or by its node and type; where FILE exists, what changed since is said before it is replaced.
Measured speeds jitter, and do not make a plan invalid: a plan is checked against types."""

EPILOG = """\
examples:
  lightning-hetero discover --out cluster.yaml
  torchrun --nnodes 2 --nproc-per-node 8 ... -m lightning_hetero discover --dtype bfloat16 --out cluster.yaml
  srun --ntasks-per-node 8 lightning-hetero discover --dtype bfloat16 --out cluster.yaml"""


def add_to(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "discover",
        help="what devices there are: type, free memory, speed, links",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--out", required=True, metavar="FILE", help="cluster file to write (YAML)")
    parser.add_argument("--name", metavar="TEXT", help="name of the cluster (default: discovered)")
    parser.add_argument(
        "--dtype",
        default="float32",
        choices=tuple(MATMUL_DTYPES),
        help="of the matrix products whose speed is measured: that of your training (default: float32)",
    )
    parser.add_argument("--no-speed", action="store_true", help="do not measure speeds")
    parser.add_argument("--no-links", action="store_true", help="do not measure links")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Look, write the file, show it."""
    out = Path(options.out)
    before = Cluster.from_yaml(out) if out.exists() else None
    with process_group() as rank:
        # who else is there, before measuring adds to it
        uses = _uses()
        cluster = Cluster.discover(
            dtype=options.dtype, measure_speed=not options.no_speed, measure_links=not options.no_links
        )
        if options.name:
            cluster = replace(cluster, name=options.name)
        if rank == 0:
            _finish(cluster, before, uses, out)
    return 0


def _uses() -> list[DeviceUse]:
    """Of the devices in the order of ranks; alone, of all devices of this machine."""
    if torch.distributed.is_initialized():
        on_cuda = "nccl" in torch.distributed.get_backend_config()
        device = torch.device("cuda", torch.cuda.current_device()) if on_cuda else torch.device("cpu")
        return gathered(device_use(device))
    if torch.cuda.is_available():
        return [device_use(torch.device("cuda", index)) for index in range(torch.cuda.device_count())]
    return [device_use(torch.device("cpu"))]


def _finish(cluster: Cluster, before: Cluster | None, uses: list[DeviceUse], out: Path) -> None:
    cluster.to_yaml(out)
    screen = console()
    screen.print(cluster_table(cluster, uses))
    lines = cluster_lines(cluster, uses)
    if before is not None:
        different = changes(cluster, before)
        lines += [f"since the last {out}: {line}" for line in different or ["the same devices"]]
    for line in [*lines, f"written to {out}"]:
        screen.print(line, markup=False, soft_wrap=True)
