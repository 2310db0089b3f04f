"""``lightning-hetero doctor``: whether training can start here, before anyone waits for a hang."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Any

from lightning_hetero.cli.arguments import bytes_count, positive_integer, positive_seconds, whole_number
from lightning_hetero.cli.launch import launched
from lightning_hetero.doctor import CHECKS, Finding, LoaderNeeds, RankFacts, can_start, examine
from lightning_hetero.doctor.dtypes import PRECISIONS
from lightning_hetero.doctor.gather import gather
from lightning_hetero.doctor.meeting import Meeting, RendezvousError, rendezvous_finding
from lightning_hetero.doctor.place import Place
from lightning_hetero.doctor.reach import CHECK as REACH
from lightning_hetero.doctor.reach import Listener, Reach, longest_s, try_peers
from lightning_hetero.report.console import console
from lightning_hetero.report.findings import show_findings

SCHEMA = 1

DESCRIPTION = """\
Look for what would make a training hang, fail or crawl: ranks that do not come or do not reach each other, versions
that differ, wheels that lack a device's architecture, CUDA beside ROCm, dtypes that some devices lack, devices that
are busy, capped or slowed down, too few open files or too little shared memory. Nothing waits without a time limit.

Alone it looks at this machine; under torchrun or srun at all ranks, and at the ways between them. What cannot be
looked at is said, with the reason. Exit status: 0 training can start, 1 it cannot, 2 wrong arguments."""

EPILOG = """\
examples:
  lightning-hetero doctor
  lightning-hetero doctor --precision bf16-mixed --workers 8 --batch-bytes "64 MiB"
  torchrun --nnodes 2 --nproc-per-node 8 ... -m lightning_hetero doctor --wait 120
  srun lightning-hetero doctor --json > findings.json"""


def add_to(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "doctor",
        help="whether training can start here, and what stands in the way",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--precision",
        choices=tuple(PRECISIONS),
        help="of the training: look at its dtype only (default: compare the devices in all dtypes)",
    )
    parser.add_argument(
        "--workers", type=whole_number, metavar="N", help="loader workers of a rank (default: its share of the cores)"
    )
    parser.add_argument(
        "--batch-bytes",
        type=bytes_count,
        metavar="SIZE",
        help='of a rank\'s batch, such as "64 MiB" (default: 32 images of 3 x 224 x 224 in float32)',
    )
    parser.add_argument(
        "--tensors", type=positive_integer, default=2, metavar="N", help="tensors in a batch (default: 2)"
    )
    parser.add_argument(
        "--wait", type=positive_seconds, default=60.0, metavar="SECONDS", help="for ranks to come (default: 60)"
    )
    parser.add_argument(
        "--timeout", type=positive_seconds, default=5.0, metavar="SECONDS", help="to reach a peer (default: 5)"
    )
    parser.add_argument("--json", action="store_true", help="write findings and facts as JSON to standard output")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Look, tell, and return the exit status, on every rank the same."""
    place = launched()
    if place is None:
        own = gather()
        return _finish(options, [own], [], _examine(options, [own]))
    with Listener(place.rank) as listener:
        own = gather(place, listener.port)
        try:
            return _together(options, place, own)
        except RendezvousError as error:
            others = [finding for finding in _examine(options, [own]) if finding.check != REACH]
            findings = [rendezvous_finding(error, place), *others]
            return _finish(options, [own], [], findings)


def _together(options: argparse.Namespace, place: Place, own: RankFacts) -> int:
    meeting = Meeting(place, options.wait)
    everyone = range(place.world_size)
    meeting.give("facts", own.to_dict())
    facts = [RankFacts.from_dict(data) for data in meeting.collect("facts", everyone).values()]
    came = [each.rank for each in facts]
    meeting.give("reach", [reach.to_dict() for reach in try_peers(own, facts, options.timeout)])
    # others may have begun so much later, and waited so long
    patience_s = options.wait + longest_s(place.world_size, options.timeout)
    if place.rank != 0:
        return meeting.conclusion(2 * patience_s)
    given = meeting.collect("reach", came, patience_s)
    reaches = [Reach.from_dict(each) for those in given.values() for each in those]
    missing = [rank for rank in everyone if rank not in came]
    findings = _examine(options, facts, reaches, missing)
    try:
        return _finish(options, facts, reaches, findings)
    finally:
        # also where nobody reads what is printed: the others wait for it
        meeting.conclude(0 if can_start(findings) else 1, came)


def _examine(
    options: argparse.Namespace,
    facts: Sequence[RankFacts],
    reaches: Sequence[Reach] = (),
    missing: Sequence[int] = (),
) -> list[Finding]:
    needs = LoaderNeeds(options.workers, options.batch_bytes, options.tensors)
    return examine(facts, reaches, missing=missing, waited_s=options.wait, precision=options.precision, needs=needs)


def _finish(
    options: argparse.Namespace, facts: Sequence[RankFacts], reaches: Sequence[Reach], findings: Sequence[Finding]
) -> int:
    ready = can_start(findings)
    if options.json:
        result: dict[str, Any] = {
            "schema": SCHEMA,
            "can_start": ready,
            "checks": list(CHECKS),
            "findings": [finding.to_dict() for finding in findings],
            "ranks": [each.to_dict() for each in facts],
            "reaches": [each.to_dict() for each in reaches],
        }
        print(json.dumps(result, indent=2))
    else:
        show_findings(console(), findings, facts)
    sys.stdout.flush()
    return 0 if ready else 1
