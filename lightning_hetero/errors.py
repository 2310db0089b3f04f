"""The package's own errors: all are ``ValueError``, and all list every problem at once."""

from __future__ import annotations

from collections.abc import Sequence


class HeteroError(ValueError):
    """Something that the user gave, or that the machines can do, does not allow what was asked."""


class ClusterError(HeteroError):
    """A cluster description is wrong, or does not describe the ranks that are there."""


class PlanError(HeteroError):
    """A plan is malformed, or was made for another cluster or another model."""


class InfeasibleError(HeteroError):
    """No plan exists that meets the constraints, such as memory or a minimal number of samples."""


class DataError(HeteroError):
    """A loader, a batch or a dataset cannot be used in the way that was asked."""


class UnsupportedError(HeteroError):
    """A setting that this package cannot honour with exact results, and therefore refuses by name."""


class EmulatedOutOfMemoryError(HeteroError, MemoryError):
    """An emulated device ran out of its declared memory."""


def raise_all(kind: type[HeteroError], headline: str, problems: Sequence[str]) -> None:
    """Raise one error that lists every problem; do nothing when there is none.

    Args:
        kind: class of the error.
        headline: what was looked at, without a final colon ("cluster file a.yaml has 2 problems").
        problems: one text each; every one names place, value and next step.

    Raises:
        HeteroError: of class ``kind``, when ``problems`` is not empty.
    """
    if problems:
        raise kind("\n".join([f"{headline}:", *(f"  - {problem}" for problem in problems)]))
