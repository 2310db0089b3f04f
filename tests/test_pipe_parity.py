"""A pipeline gives what one device gives: gradients, losses, values after AdamW."""

from __future__ import annotations

import pytest
import torch

from tests.harness import WarmRanks
from tests.pipe_fits import PipeFit, reference, run_pipeline


def check(ranks: WarmRanks, fit: PipeFit, *, bitwise: bool) -> list[dict]:
    expected = reference(fit)
    found = ranks.run(fit.world, run_pipeline, fit, process_group=False, timeout=90)
    seen = set()
    for rank, own in enumerate(found):
        assert own["losses"] == pytest.approx(expected["losses"], rel=1e-10), f"rank {rank}"
        for name, gradient in own["gradients"].items():
            wanted = expected["gradients"][name]
            if bitwise:
                assert torch.equal(gradient, wanted), f"rank {rank}: {name}"
            else:
                torch.testing.assert_close(gradient, wanted, rtol=1e-12, atol=1e-14, msg=lambda m: f"{name}: {m}")
        for name, value in own["values"].items():
            torch.testing.assert_close(value, expected["values"][name], rtol=1e-10, atol=1e-10)
        seen |= set(own["values"])
    assert seen == set(expected["values"])
    return found


def test_one_pipeline(ranks):
    check(ranks, PipeFit(), bitwise=True)
