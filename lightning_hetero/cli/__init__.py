"""The command line: ``lightning-hetero doctor | discover | profile | plan | simulate | calibrate | report``."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from importlib import import_module

from lightning_hetero.errors import HeteroError

DESCRIPTION = """\
Plan the training of one model on unequal devices.

  doctor     whether training can start here, and what stands in the way
  discover   what devices there are: type, free memory, speed, links          -> cluster.yaml
  profile    what every unit of a model costs: FLOPs, bytes, seconds          -> costs.json
  plan       who does what: shard groups and batch shares, or pipeline stages -> plan.json
  simulate   what a step would take: of a plan, or over nodes, models, shardings -> tables, plots, traces
  calibrate  constants that explain measured steps, for plan and simulate    -> calibration.json
  report     what every rank of a run did, against what was planned           -> tables, plots, report.html

Every file is meant to be read, and may be edited by hand. The strategy hetero_fsdp does all of this by itself, for any
model, when it is given none of them; profile and plan work on the models that this package builds by name."""

EPILOG = """\
Each command has its own manual: lightning-hetero plan --help. Exit status: 0 done; 1 the doctor found that
training cannot start; 2 wrong arguments, a wrong file, or no plan that fits, with the reasons on standard error; 130
interrupted."""


COMMANDS = ("doctor", "discover", "profile", "plan", "simulate", "calibrate", "report")


def parser(only: str | None = None) -> argparse.ArgumentParser:
    """The parser of all commands.

    Args:
        only: one command, so that nothing is imported for the others: a report needs no torch.
    """
    made = argparse.ArgumentParser(
        "lightning-hetero",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    commands = made.add_subparsers(metavar="command", required=True)
    for command in COMMANDS if only is None else (only,):
        import_module(f"{__name__}.{command}").add_to(commands)
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status.

    Args:
        arguments: without the program's name; by default those of the process.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    options = parser(given[0] if given[:1] and given[0] in COMMANDS else None).parse_args(given)
    try:
        return int(options.run(options))
    except HeteroError as error:
        print(f"lightning-hetero: {error}", file=sys.stderr)
    except BrokenPipeError:
        # whoever read our output has seen enough; the interpreter must not complain at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        print(f"lightning-hetero: {error.filename or 'a file'}: {error.strerror or error}", file=sys.stderr)
    except KeyboardInterrupt:
        print("lightning-hetero: interrupted", file=sys.stderr)
        return 130
    return 2
