"""The benchmark's figures follow from its raw repeats."""

from __future__ import annotations

import pytest

from benchmarks.hetero_speedup.case import PINNED_CLUSTER, device_kinds
from benchmarks.hetero_speedup.speedup import ArmTimes, ratio_of_turns, summarise
from lightning_hetero.cluster import Cluster, Device


def _arm(images: int, *turns: list[float]) -> ArmTimes:
    return ArmTimes(images, list(turns))


def test_a_rate_is_by_the_median_over_turns_of_medians_over_steps() -> None:
    arm = _arm(120, [1.0, 2.0, 9.0], [4.0, 4.0, 4.0], [3.0, 3.0, 100.0])
    assert arm.step_s == 3.0
    assert arm.images_per_s == 40.0
    assert arm.to_dict()["step_s"] == [[1.0, 2.0, 9.0], [4.0, 4.0, 4.0], [3.0, 3.0, 100.0]]


def test_figures_of_an_ideal_run() -> None:
    solo = {"fast": _arm(10, [1.0]), "slow": _arm(10, [2.0])}
    hetero, even = _arm(30, [1.0]), _arm(40, [2.0])
    found = summarise(hetero, even, solo, ["fast", "fast", "slow", "slow"])
    assert found == {
        "hetero_images_per_s": 30.0,
        "even_images_per_s": 20.0,
        "solo_sum_images_per_s": 30.0,
        "efficiency": 1.0,
        "speedup": 1.5,
        "theoretical_speedup": 1.5,
    }


def test_equal_devices_leave_nothing_to_win() -> None:
    found = summarise(_arm(8, [1.1]), _arm(8, [1.0]), {"x": _arm(4, [1.0])}, ["x", "x"])
    assert found["theoretical_speedup"] == 1.0
    assert found["speedup"] == pytest.approx(1 / 1.1)
    assert found["efficiency"] == pytest.approx(1 / 1.1)


def test_a_ratio_of_turns_is_not_moved_by_a_slow_one() -> None:
    assert ratio_of_turns(_arm(8, [1.03]), _arm(8, [1.0])) == pytest.approx(1.03)
    # a machine that is twice as slow for one turn of both changes nothing
    assert ratio_of_turns(_arm(8, [1.03], [2.06]), _arm(8, [1.0], [2.0])) == pytest.approx(1.03)


def test_the_pinned_cluster_is_off_by_ten_percent_both_ways() -> None:
    cluster = Cluster.from_yaml(PINNED_CLUSTER)
    assert cluster.emulate
    assert [d.actual_speed_flops_per_s for d in cluster.devices] == [6e9, 6e9, 3e9, 3e9]
    off = [d.speed_flops_per_s / d.actual_speed_flops_per_s for d in cluster.devices]
    assert off == pytest.approx([1.1, 0.9, 1.1, 0.9])
    assert cluster.within_node is None
    assert cluster.between_nodes is None
    assert device_kinds(cluster) == ["fast", "fast", "slow", "slow"]


def test_one_type_at_two_speeds_is_two_kinds() -> None:
    devices = [Device("x", "n", 2**30, 1e9), Device("x", "n", 2**30, 1e9, true_speed_flops_per_s=2e9)]
    assert device_kinds(Cluster("c", tuple(devices))) == ["x at 1 GFLOP/s", "x at 2 GFLOP/s"]
