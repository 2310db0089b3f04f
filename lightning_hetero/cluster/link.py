"""A link between two ranks."""

from __future__ import annotations

import math
from dataclasses import dataclass

from lightning_hetero.errors import ClusterError, raise_all


@dataclass(frozen=True)
class Link:
    """What it takes to move bytes from one rank to another: ``latency_s + bytes / bandwidth_bytes_per_s``.

    Args:
        bandwidth_bytes_per_s: bytes per second in one direction, above zero.
        latency_s: seconds until the first byte arrives, zero or more.

    Raises:
        ClusterError: for any other value.
    """

    bandwidth_bytes_per_s: float
    latency_s: float

    def __post_init__(self) -> None:
        problems = []
        if not (math.isfinite(self.bandwidth_bytes_per_s) and self.bandwidth_bytes_per_s > 0):
            problems.append(f"bandwidth_bytes_per_s is {self.bandwidth_bytes_per_s!r}: give a positive number")
        if not (math.isfinite(self.latency_s) and self.latency_s >= 0):
            problems.append(f"latency_s is {self.latency_s!r}: give zero or a positive number of seconds")
        raise_all(ClusterError, "link is not valid", problems)

    def seconds(self, size_bytes: float) -> float:
        """Seconds that a message of ``size_bytes`` takes."""
        return self.latency_s + size_bytes / self.bandwidth_bytes_per_s
