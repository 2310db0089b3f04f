"""Quantities as people write them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_hetero import units
from lightning_hetero.errors import ClusterError, HeteroError, raise_all


@pytest.mark.parametrize(
    ("parse", "text", "value"),
    [
        (units.parse_bytes, "2 GiB", 2 * 2**30),
        (units.parse_bytes, "2GiB", 2 * 2**30),
        (units.parse_bytes, "80 GB", 80 * 10**9),
        (units.parse_bytes, "1.5 KiB", 1536),
        (units.parse_bytes, "1_000 B", 1000),
        (units.parse_bytes_per_s, "10 GB/s", 1e10),
        (units.parse_bytes_per_s, "100 Gbit/s", 1.25e10),
        (units.parse_flops_per_s, "6 GFLOP/s", 6e9),
        (units.parse_flops_per_s, "989 TFLOPS", 989e12),
        (units.parse_flops_per_s, "1e3 MFLOP/s", 1e9),
        (units.parse_seconds, "10 us", 1e-5),
        (units.parse_seconds, "10 µs", 1e-5),
        (units.parse_seconds, "0 s", 0.0),
    ],
)
def test_parses_exactly(parse, text, value):
    assert parse(text) == value


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("2", "no unit"),
        (2, "no unit"),
        ("GiB", "no number"),
        ("much", "no number"),
        ("", "no number"),
        ("2 gib", "did you mean 'GiB'"),
        ("2 GiB/s", "unknown unit 'GiB/s'"),
        ("-1 GiB", "negative"),
        ("0 GiB", "zero"),
        ("0.1 B", "less than one byte"),
        ("nan GiB", "not finite"),
        ("inf GiB", "not finite"),
        (None, "not a bytes quantity"),
        (True, "not a bytes quantity"),
        (["2 GiB"], "not a bytes quantity"),
    ],
)
def test_refuses_naming_value_and_accepted_form(text, fault):
    with pytest.raises(HeteroError) as caught:
        units.parse_bytes(text)
    message = str(caught.value)
    assert fault in message
    assert repr(text) in message
    assert "1 B" in message or "'2 GiB'" in message


def test_zero_is_accepted_only_where_told():
    assert units.parse_bytes("0 B", positive=False) == 0
    with pytest.raises(HeteroError, match="zero"):
        units.parse_seconds("0 s", positive=True)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (units.format_bytes(37.4 * 2**30), "37.4 GiB"),
        (units.format_bytes(512), "512 B"),
        (units.format_bytes(0), "0 B"),
        (units.format_bytes_per_s(1e10), "10 GB/s"),
        (units.format_flops_per_s(989.4e12), "989.4 TFLOP/s"),
        (units.format_flops_per_s(2.5e18), "2.5 EFLOP/s"),
        (units.format_seconds(0.1588), "158.8 ms"),
        (units.format_seconds(1e-5), "10 us"),
        (units.format_seconds(2.5), "2.5 s"),
        (units.format_seconds(0), "0 s"),
        (units.format_seconds(3e-9), "3 ns"),
    ],
)
def test_prints_what_people_read(text, expected):
    assert text == expected


@given(st.integers(1, 2**50))
def test_exact_bytes_read_back(count):
    assert units.parse_bytes(units.exact_bytes(count)) == count


@given(st.floats(1e-12, 1e20))
def test_exact_rates_and_seconds_read_back(value):
    assert units.parse_flops_per_s(units.exact_flops_per_s(value)) == value
    assert units.parse_bytes_per_s(units.exact_bytes_per_s(value)) == value
    assert units.parse_seconds(units.exact_seconds(value)) == value


def test_exact_texts_stay_short():
    texts = (
        units.exact_bytes(2**31),
        units.exact_bytes(80 * 10**9),
        units.exact_flops_per_s(6e9),
        units.exact_seconds(1e-5),
    )
    assert texts == ("2 GiB", "80 GB", "6 GFLOP/s", "10 us")


def test_raise_all_lists_every_problem_or_does_nothing():
    raise_all(ClusterError, "file a", [])
    with pytest.raises(ClusterError) as caught:
        raise_all(ClusterError, "file a", ["one", "two"])
    assert str(caught.value) == "file a:\n  - one\n  - two"
    assert isinstance(caught.value, ValueError)
