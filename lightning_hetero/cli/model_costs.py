"""The costs that a command is asked about, from a file or counted for a model by name; and how it is trained."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from lightning_hetero.cluster import Cluster
from lightning_hetero.costs import ModelCosts
from lightning_hetero.errors import HeteroError
from lightning_hetero.simulator.calibration import Calibration

COMPUTE_DTYPES = {"64-true": "float64", "bf16-true": "bfloat16", "16-true": "float16"}
COMPUTE_DTYPES |= {"bf16-mixed": "bfloat16", "16-mixed": "float16", "32-true": "float32"}
"""what each of Lightning's precisions computes in"""


def add_training_arguments(parser: argparse.ArgumentParser) -> None:
    """Add ``--precision``, ``--optimizer`` and ``--calibration``."""
    add_precision_arguments(parser)
    parser.add_argument(
        "--calibration", metavar="FILE", help='constants that were fitted to measured steps (JSON), of "calibrate"'
    )


def add_precision_arguments(parser: argparse.ArgumentParser) -> None:
    """Add ``--precision`` and ``--optimizer``."""
    parser.add_argument(
        "--precision",
        default="32-true",
        metavar="NAME",
        help=f"of the training, in Lightning's words: {', '.join(COMPUTE_DTYPES)} (default: 32-true)",
    )
    parser.add_argument(
        "--optimizer",
        default="adamw",
        metavar="NAME",
        help="whose state takes memory: adamw, adam, sgd-momentum, rmsprop, adagrad or sgd (default: adamw)",
    )


def read_calibration(path: str | None, cluster: Cluster) -> tuple[Calibration | None, list[str]]:
    """The calibration in a file, and what to mind about it; ``None`` without a path."""
    if path is None:
        return None, []
    found = Calibration.load(path)
    missing = found.missing(cluster)
    notes = []
    if missing:
        known = ", ".join(found.devices) or "no device"
        notes.append(f"mind: {path} knows {known}, and not {', '.join(missing)}: seconds there are those of the costs")
    return found, notes


def read_costs(
    path: str | None,
    model: str | None,
    sequence: int | None,
    precision: str,
    begin: Callable[[str], None] = lambda step: None,
) -> tuple[ModelCosts, list[str]]:
    """The costs, and what to mind about them.

    Args:
        path: of a costs file; or ``None`` with a model.
        model: name of a model that is counted; or ``None`` with a path.
        sequence: tokens per sample of a GPT; ``None`` is its whole context.
        precision: of the training.
        begin: is told before a model is counted.

    Raises:
        HeteroError: if both or neither are given, or as counting and reading raise.
    """
    dtype = COMPUTE_DTYPES.get(precision)
    if dtype is None:
        raise HeteroError(f"precision is {precision!r}: give one of {', '.join(COMPUTE_DTYPES)}")
    if (path is None) == (model is None):
        given = "neither --costs nor --model is" if path is None else "both --costs and --model are"
        raise HeteroError(f"{given} given: give a costs file, or the name of a model")
    notes = []
    if path is not None:
        if sequence is not None:
            raise HeteroError(f"--sequence is {sequence}, and the costs file says what a sample is: leave it out")
        costs = ModelCosts.load(path)
        if costs.dtype != dtype:
            notes.append(
                f"mind: the costs were taken in {costs.dtype}, and {precision} computes in {dtype}: "
                f"seconds and activation bytes are those of {costs.dtype}; profile with --dtype {dtype}"
            )
    else:
        from lightning_hetero.cli.profile import counted_costs  # loads torch, which files do without

        assert model is not None
        begin("counting the model")
        costs = counted_costs(model, dtype, sequence)
    if precision.endswith("-mixed") and costs.dtype == dtype:
        notes.append(
            f"mind: {precision} keeps some activations in 32 bits, and the costs count them as {dtype}: "
            "leave some memory free"
        )
    return costs, notes


def unmeasured(costs: ModelCosts, cluster: Cluster) -> list[str]:
    kinds = [kind for kind in cluster.types if kind not in costs.timed_types]
    if not kinds:
        return []
    where = ", ".join(kinds)
    text = (
        f"seconds on {where} were not measured: they are FLOPs over the device's speed, which real models seldom reach"
    )
    return [f'{text}; "lightning-hetero profile" measures them']
