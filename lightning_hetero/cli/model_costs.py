"""The costs that a command is asked about, from a file or counted for a model by name; and how it is trained."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

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
    notes = [calibrated_with(path, found)]
    if missing:
        known = ", ".join(found.devices) or "no device"
        notes.append(f"mind: {path} knows {known}, and not {', '.join(missing)}: seconds there are those of the costs")
    return found, notes


def calibrated_with(path: str, calibration: Calibration) -> str:
    """Which calibration it is and how well it explains its own runs, in one line."""
    count = len(calibration.runs)
    what = "no run's error is known"
    if count:
        share = f"{100 * calibration.mean_error:.1f} %"
        what = f"mean error {share} over the {count} run{'s' if count > 1 else ''} that it was fitted to"
    parts = [f"calibrated with {path}{' (emulated devices)' if calibration.emulated else ''}: {what}"]
    if calibration.warning:
        parts.append(f"mind: {calibration.warning}")
    if calibration.refused:
        parts.append(f"not told by them: {', '.join(text.split(':')[0] for text in calibration.refused)}")
    return "; ".join(parts)


def calibration_data(path: str | None, calibration: Calibration | None) -> dict[str, Any] | None:
    """The same as plain data, for files; ``None`` without one."""
    if calibration is None:
        return None
    return {
        "file": path,
        "emulated": calibration.emulated,
        "runs": len(calibration.runs),
        "mean_error": calibration.mean_error if calibration.runs else None,
        "warning": calibration.warning or None,
        "refused": [text.split(":")[0] for text in calibration.refused],
    }


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


def unmeasured(costs: ModelCosts, cluster: Cluster, calibration: Calibration | None = None) -> list[str]:
    """Where seconds are FLOPs over a speed, and what a calibration makes of them."""
    kinds = [kind for kind in cluster.types if kind not in costs.timed_types]
    scaled = [kind for kind in kinds if calibration is not None and kind in calibration.devices]
    notes = []
    if calibration is not None and scaled:
        scales = ", ".join(f"{kind} {calibration.device(kind).compute_scale:.3g}" for kind in scaled)
        notes.append(f"seconds are FLOPs over the device's speed, scaled as they were measured: {scales}")
    others = [kind for kind in kinds if kind not in scaled]
    if others:
        notes.append(
            f"seconds on {', '.join(others)} were not measured: they are FLOPs over the device's speed, which real "
            'models seldom reach; "lightning-hetero profile" measures them'
        )
    return notes
