"""Models and steps that do not fit the emulated devices: who lacks how many bytes, on all ranks, at once."""

from __future__ import annotations

import time
from typing import Any

import pytest

from lightning_hetero.cluster import Cluster, Device
from tests.harness import WarmRanks
from tests.test_fsdp_bad_input import SECONDS, a_plan, emulated, says, start


def out_of_memory(ranks: WarmRanks, cluster: Cluster, strategy: dict[str, Any], culprits: set[int]) -> None:
    """Every rank says which rank wanted how much, or the rank that had failed first."""
    began = time.monotonic()
    strategy = {"cluster": cluster, **strategy}
    outcomes = ranks.run_outcomes(2, start, strategy, timeout=2 * SECONDS, process_group=False)
    took_s = time.monotonic() - began
    for rank, (status, *rest) in enumerate(outcomes):
        assert status == "error", outcomes
        kind, message = rest
        assert kind == ("EmulatedOutOfMemoryError" if rank in culprits else "RankFailedError"), outcomes
        named = [r for r in culprits if f"rank {r} (emulated d{r}" in message]
        assert named, message
        says(message, ["bytes)", "wants", "free", "samples"])
    assert took_s < SECONDS


def test_a_model_that_fits_no_device(ranks: WarmRanks) -> None:
    out_of_memory(ranks, emulated(5, 5, memory_bytes=1000), {"plan": a_plan((2, 2))}, {0, 1})


@pytest.mark.parametrize("small", [0, 1])
def test_a_model_that_does_not_fit_one_device(ranks: WarmRanks, small: int) -> None:
    sizes = [2**30, 2**30]
    sizes[small] = 1000
    devices = tuple(Device(f"d{i}", "n", size, 5e9) for i, size in enumerate(sizes))
    out_of_memory(ranks, Cluster("one", devices, emulate=True), {"plan": a_plan((2, 2))}, {small})


def test_a_step_that_does_not_fit(ranks: WarmRanks) -> None:
    """States fit, a step's samples do not: the error comes in the step, on every rank."""
    out_of_memory(ranks, emulated(5, 5, memory_bytes=9000), {"plan": a_plan((12, 12))}, {0, 1})


def test_an_even_share_that_does_not_fit_is_not_tried(ranks: WarmRanks) -> None:
    """Measuring must not run out of memory where an uneven plan exists: that is what uneven shares are for."""
    # some 5 kB of states and 0.4 kB a sample: rank 0 holds a dozen samples, far less than 32
    devices = (Device("d0", "n", 12_000, 5e9), Device("d1", "n", 2**30, 5e9))
    strategy = {"cluster": Cluster("narrow", devices, emulate=True), "global_batch_size": 64}
    assert ranks.run(2, start, strategy, process_group=False) == ["trained"] * 2
