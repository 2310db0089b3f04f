"""What partition_units refuses, and what it says."""

import random
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_hetero.errors import HeteroError, InfeasibleError
from lightning_hetero.planner import partition_units
from tests.test_partition import check

GIB = 2**30


def test_infeasible_says_what_is_missing_where():
    seconds = [[1.0] * 6] * 3
    with pytest.raises(InfeasibleError) as caught:
        partition_units(seconds, memory_bytes=[GIB] * 6, capacity_bytes=[GIB, 3 * GIB, GIB])
    text = str(caught.value)
    # One byte less anywhere than the least shortage of 1 GiB is impossible: 6 GiB of units, 5 GiB of room.
    assert len(re.findall(r"device \d has", text)) == 1
    assert "1 GiB (1,073,741,824 bytes) missing" in text
    assert "smaller micro-batches" in text
    assert "fixed_order=False" not in text


def test_infeasible_names_every_device_that_lacks_bytes():
    with pytest.raises(InfeasibleError) as caught:
        partition_units([[1, 1], [1, 1]], memory_bytes=[7, 9], capacity_bytes=[3, 8], fixed_order=False)
    assert "device 0 has 3 bytes and unit 0 need" in str(caught.value)
    assert "4 bytes missing" in str(caught.value)
    assert "device 1 has 8 bytes and unit 1 need" in str(caught.value)
    assert "1 bytes missing" in str(caught.value)


def test_infeasible_says_when_another_order_would_fit():
    with pytest.raises(InfeasibleError, match="fixed_order=False, with which they fit"):
        partition_units([[1, 1], [1, 1]], memory_bytes=[7, 2], capacity_bytes=[3, 8])
    assert partition_units([[1, 1], [1, 1]], memory_bytes=[7, 2], capacity_bytes=[3, 8], fixed_order=False).order == (
        1,
        0,
    )


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 10**6))
def test_the_shortage_is_the_least(seed):
    """Given what is missing at most, every device fits; given a byte less, it does not."""
    dice = random.Random(seed)
    devices = dice.randint(1, 4)
    sizes = [dice.randint(1, 30) for _ in range(dice.randint(devices, 8))]
    room = [dice.randint(0, 30) for _ in range(devices)]
    arguments = {"fixed_order": dice.random() < 0.5, "memory_bytes": sizes}
    seconds = [[1.0] * len(sizes)] * devices
    try:
        partition_units(seconds, capacity_bytes=room, **arguments)
    except InfeasibleError as error:
        missing = max(int(text) for text in re.findall(r": (\d+) bytes missing", str(error)))
        partition_units(seconds, capacity_bytes=[r + missing for r in room], **arguments)
        with pytest.raises(InfeasibleError):
            partition_units(seconds, capacity_bytes=[r + missing - 1 for r in room], **arguments)


def test_more_devices_than_units():
    with pytest.raises(InfeasibleError, match="3 devices cannot share 2 units"):
        partition_units([[1, 1]] * 3)


def test_too_many_different_devices_in_free_order_are_refused_by_number():
    dice = random.Random(0)
    seconds = [[dice.random() for _ in range(30)] for _ in range(24)]
    with pytest.raises(HeteroError, match="24 devices of 24 types") as caught:
        partition_units(seconds, fixed_order=False)
    assert "fixed_order=True" in str(caught.value)
    check(partition_units(seconds), seconds)


@pytest.mark.parametrize(
    ("seconds", "limits", "expected"),
    [
        ([], {}, "seconds is empty"),
        ([[]], {}, "seconds[0] is empty"),
        ([[1, 2], [1]], {}, "seconds[1] has 1 values where 2 are wanted"),
        ([[1, -1]], {}, "seconds[0][1] is -1"),
        ([[1, float("inf")]], {}, "seconds[0][1] is inf"),
        ([[1, float("nan")]], {}, "seconds[0][1] is nan"),
        ([[True, 1]], {}, "seconds[0][0] is True"),
        ([[1, 1]], {"memory_bytes": [1, 1]}, "belong together"),
        ([[1, 1]], {"capacity_bytes": [1]}, "belong together"),
        ([[1, 1]], {"memory_bytes": [1], "capacity_bytes": [1]}, "memory_bytes has 1 values where 2"),
        ([[1, 1]], {"memory_bytes": [1, -2], "capacity_bytes": [1]}, "memory_bytes[1] is -2"),
        ([[1, 1]], {"memory_bytes": [[1, 1]] * 2, "capacity_bytes": [1]}, "2 rows for 1 devices"),
        ([[1, 1]], {"memory_bytes": [1, 1], "capacity_bytes": [1, 2]}, "capacity_bytes has 2 values where 1"),
        ([[1, 1]], {"memory_bytes": [1, 1], "capacity_bytes": ["2"]}, "capacity_bytes[0] is '2'"),
    ],
)
def test_malformed_arguments(seconds, limits, expected):
    with pytest.raises(HeteroError) as caught:
        partition_units(seconds, **limits)
    assert expected in str(caught.value)
    assert not isinstance(caught.value, InfeasibleError)


def test_all_problems_are_listed_at_once():
    with pytest.raises(HeteroError) as caught:
        partition_units([[1, -1], [1]], memory_bytes=[1, -3], capacity_bytes=[1])
    assert str(caught.value).count("\n  - ") == 4
