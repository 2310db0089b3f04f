"""A pipeline gives what one device gives: gradients, losses, values after AdamW."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.harness import WarmRanks
from tests.pipe_fits import PipeFit, reference, run_pipeline

ONE = PipeFit()
TWO = PipeFit(cuts=((5, 1, 4), (6, 4)), counts=(3, 2))


def slow(fit: PipeFit) -> Any:
    return pytest.param(fit, marks=pytest.mark.slow)


def check(ranks: WarmRanks, fit: PipeFit, *, bitwise: bool) -> list[dict[str, Any]]:
    (expected,) = ranks.run(1, reference, fit, process_group=False)  # with the threads that ranks have
    found = ranks.run(fit.world, run_pipeline, fit, process_group=False, timeout=90)
    seen = set()
    for rank, own in enumerate(found):
        assert own["losses"] == pytest.approx(expected["losses"], rel=1e-10), f"rank {rank}"
        for name, gradient in own["gradients"].items():
            wanted = expected["gradients"][name]
            if bitwise:
                assert torch.equal(gradient, wanted), f"rank {rank}: {name}"
            else:
                close = (gradient - wanted).norm() <= 1e-12 * wanted.norm() + 1e-15
                assert close, f"rank {rank}: {name}: {(gradient - wanted).norm() / wanted.norm():.3g}"
        for name, value in own["values"].items():
            torch.testing.assert_close(value, expected["values"][name], rtol=0, atol=1e-10)
        seen |= set(own["values"])
    assert seen == set(expected["values"])
    return found


@pytest.mark.parametrize(
    "fit",
    [
        replace(ONE, steps=10),
        replace(ONE, cuts=((3, 7),), schedule="gpipe"),
        replace(ONE, cuts=((2, 3, 4, 1),), extra=1),
        slow(replace(ONE, precision="32-true")),
        replace(ONE, schedule="zero_bubble"),
        replace(ONE, cuts=((3, 2, 3, 2),), ranks_of=(2,), schedule="interleaved_1f1b"),
        # the last stage answers two stages of one rank: the attention mask comes from the first one
        replace(ONE, cuts=((3, 2, 2, 3),), ranks_of=(2,), schedule="interleaved_1f1b"),
        slow(replace(ONE, checkpointing=True)),
        slow(replace(ONE, cuts=((10,),))),
        replace(ONE, samples=27),
    ],
    ids=[
        "5-1-4, 10 steps",
        "gpipe",
        "4 stages, deep warm-up",
        "32-true",
        "zero bubble",
        "interleaved",
        "interleaved, a value skips stages",
        "checkpointing",
        "one stage",
        "short last batch",
    ],
)
def test_one_pipeline_is_bitwise_one_device(ranks, fit):
    if fit.precision == "32-true":
        (expected,) = ranks.run(1, reference, fit, process_group=False)
        found = ranks.run(fit.world, run_pipeline, fit, process_group=False, timeout=90)
        for own in found:
            assert own["gradients"]
            for name, gradient in own["gradients"].items():
                assert torch.equal(gradient, expected["gradients"][name]), name
        return
    found = check(ranks, fit, bitwise=True)
    assert all(own["losses"] == found[0]["losses"] for own in found)


@pytest.mark.parametrize(
    "fit",
    [
        slow(replace(TWO, steps=10)),
        slow(replace(TWO, schedule="gpipe")),
        slow(replace(TWO, schedule="zero_bubble", samples=33)),
        replace(TWO, cuts=((4, 6), (10,)), counts=(1, 3), samples=41),
        replace(ONE, kind="texts", cuts=((2, 4),)),
        slow(replace(TWO, kind="texts", cuts=((2, 2, 2), (6,)))),
        replace(ONE, clip=0.5),
        replace(TWO, clip=0.5, accumulate=2, steps=2),
        slow(replace(TWO, accumulate=2, samples=55)),
    ],
    ids=[
        "two pipelines, 10 steps",
        "gpipe",
        "zero bubble, short last batch",
        "one pipeline gets nothing of the last batch",
        "tied embedding",
        "tied embedding, two pipelines",
        "clip",
        "clip and accumulate",
        "accumulate",
    ],
)
def test_sums_over_owners(ranks, fit):
    check(ranks, fit, bitwise=False)
