"""What the planner makes of published measurements (tests/data/anchors)."""

import pytest

from lightning_hetero.planner import partition_units, slowest_seconds, split_batch
from tests.anchors import layer_fit_ms, opt350_seconds


@pytest.mark.parametrize(
    ("gpus", "counts", "bottleneck_ms", "free_ms"),
    [
        (["GH-96", "GH-96", "A100-40", "A100-40"], (9, 9, 4, 4), 63.188, 63.146),
        (["A100-40", "A100-40", "V100-16", "V100-16"], (11, 10, 3, 2), 158.828, 157.928),
    ],
)
def test_opt350_on_mixed_gpus(gpus, counts, bottleneck_ms, free_ms):
    """Sailor's layer times at micro-batch 2: the embedding is cheap and the head dear, so order matters."""
    seconds = [opt350_seconds(gpu, 2) for gpu in gpus]
    partition = partition_units(seconds)
    assert partition.order == (0, 1, 2, 3)
    assert partition.counts == counts
    assert partition.bottleneck_s == pytest.approx(bottleneck_ms / 1e3, abs=1e-9)
    free = partition_units(seconds, fixed_order=False)
    assert free.bottleneck_s == pytest.approx(free_ms / 1e3, abs=1e-9)
    stages = [seconds[d][a : a + n] for d, a, n in zip(free.order, free.starts, free.counts, strict=True)]
    assert max(map(sum, stages)) == pytest.approx(free.bottleneck_s, rel=1e-12)


def test_layer_times_of_a_27b_gpt_on_four_gpus():
    """Cephalo's own splitters reach 342.3 ms a layer with [13, 13, 33, 5], an even split 958.8 ms."""
    fits = [layer_fit_ms("deepspeedgpt_2.7b", gpu, "float16", forwards=2) for gpu in ("l4", "l4", "a6000", "p40")]
    slopes, fixed = zip(*fits, strict=True)
    shares = split_batch(slopes, fixed, 64)
    assert sum(shares) == 64
    assert slowest_seconds(slopes, fixed, shares) <= 342.35
    assert slowest_seconds(slopes, fixed, [16] * 4) == pytest.approx(958.8, abs=0.05)
    # Cephalo's published plan, for the record.
    assert slowest_seconds(slopes, fixed, shares) <= slowest_seconds(slopes, fixed, [13, 12, 34, 5])
