"""Devices are recognised again by UUID and type, and jitter of measured speeds is no difference."""

from dataclasses import replace

import pytest

from lightning_hetero.cluster import Cluster, Device
from lightning_hetero.cluster.recognise import changes, recognise
from lightning_hetero.errors import PlanError
from lightning_hetero.planner import plan_one_group

GIB = 2**30


def device(kind: str, uuid: str | None = None, node: str = "n", speed: float = 1e12) -> Device:
    return Device(kind, node, 80 * GIB, speed, uuid=uuid)


KNOWN = Cluster("known", (device("H100", "a"), device("H100", "b"), device("A100", "c", "m"), device("A100", "d", "m")))


def test_the_same_devices_in_the_same_order():
    found = recognise(KNOWN, KNOWN)
    assert (found.ranks, found.missing, found.in_order) == ((0, 1, 2, 3), (), True)
    assert changes(KNOWN, KNOWN) == []


def test_devices_are_found_by_uuid_whatever_their_rank():
    swapped = Cluster("now", (*KNOWN.devices[2:], KNOWN.devices[1], KNOWN.devices[0]))
    found = recognise(swapped, KNOWN)
    assert (found.ranks, found.missing, found.in_order) == ((2, 3, 1, 0), (), False)
    assert "rank 2, H100 on n, was rank 1" in changes(swapped, KNOWN)[2]


def test_another_device_of_the_same_type_is_another_device():
    now = Cluster("now", (replace(KNOWN.devices[0], uuid="z"), *KNOWN.devices[1:]))
    assert recognise(now, KNOWN).ranks == (None, 1, 2, 3)
    assert changes(now, KNOWN) == ["rank 0, H100 on n, is not there any more", "rank 0, H100 on n, is new"]


def test_without_uuids_node_and_type_decide():
    known = Cluster("known", tuple(replace(each, uuid=None) for each in KNOWN.devices))
    assert recognise(KNOWN, known).ranks == (0, 1, 2, 3)
    moved = Cluster("now", (replace(known.devices[0], node="elsewhere"), *known.devices[1:]))
    assert recognise(moved, known).ranks == (None, 1, 2, 3)
    fewer = Cluster("now", known.devices[:1] + known.devices[2:])
    assert (recognise(fewer, known).ranks, recognise(fewer, known).missing) == ((0, 2, 3), (1,))
    more = Cluster("now", (known.devices[0], *known.devices))
    assert recognise(more, known).ranks == (0, 1, None, 2, 3)


def test_jitter_is_no_change_and_a_throttled_device_is():
    jitter = Cluster("now", tuple(replace(each, speed_flops_per_s=1.04e12) for each in KNOWN.devices))
    assert changes(jitter, KNOWN) == []
    slow = Cluster("now", (replace(KNOWN.devices[0], speed_flops_per_s=5e11), *KNOWN.devices[1:]))
    assert changes(slow, KNOWN) == ["rank 0, H100 on n, now measures 500 GFLOP/s, before 1 TFLOP/s"]
    taken = Cluster("now", (replace(KNOWN.devices[0], memory_bytes=40 * GIB), *KNOWN.devices[1:]))
    assert changes(taken, KNOWN) == ["rank 0, H100 on n, now has 40 GiB free, before 80 GiB"]


@pytest.mark.parametrize("factor", [0.5, 0.97, 1.03, 2.0])
def test_a_plan_is_checked_against_types_and_not_speeds(factor):
    plan = plan_one_group(KNOWN, global_batch_size=12, seconds_per_sample=[1.0, 1.0, 2.0, 2.0])
    now = tuple(
        replace(each, speed_flops_per_s=factor * 1e12, memory_bytes=int(each.memory_bytes * 0.99), uuid=f"new{rank}")
        for rank, each in enumerate(KNOWN.devices)
    )
    plan.validate(Cluster("now", now))
    with pytest.raises(PlanError, match=r"device_types\[0\] is 'H100', rank 0 .* is 'A100'"):
        plan.validate(Cluster("now", now[::-1]))
