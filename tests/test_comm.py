"""Seconds of collectives: by hand, and in the order that any formula must keep."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_hetero.cluster import Cluster, Device, Link
from lightning_hetero.errors import HeteroError
from lightning_hetero.simulator.comm import Network, spread_of

FAST = Link(1e9, 1e-5)
SLOW = Link(1e8, 1e-4)
NETWORK = Network(FAST, SLOW)

spreads = st.lists(st.integers(1, 8), min_size=1, max_size=5).map(lambda counts: tuple(sorted(counts, reverse=True)))
sizes = st.floats(1, 1e10)


def test_a_ring_within_a_node():
    # 3 steps of a quarter each
    assert NETWORK.all_gather_s(4e6, (4,)) == pytest.approx(3 * (1e-5 + 1e-3))
    assert NETWORK.reduce_scatter_s(4e6, (4,)) == NETWORK.all_gather_s(4e6, (4,))
    assert NETWORK.all_reduce_s(4e6, (4,)) == pytest.approx(6 * (1e-5 + 1e-3))


def test_a_ring_between_nodes():
    assert NETWORK.all_gather_s(4e6, (1, 1, 1, 1)) == pytest.approx(3 * (1e-4 + 1e-2))


def test_a_ring_over_nodes_is_as_slow_as_its_slowest_hop():
    assert NETWORK.all_gather_s(8e6, (4, 4)) == pytest.approx(7 * (1e-4 + 1e-2))
    assert NETWORK.all_gather_s(4e6, (3, 1)) == pytest.approx(3 * (1e-4 + 1e-2))
    # where the node is slower than the network
    assert Network(SLOW, FAST).all_gather_s(4e6, (3, 1)) == pytest.approx(3 * (1e-4 + 1e-2))
    assert Network(SLOW, FAST).all_gather_s(2e6, (1, 1)) == pytest.approx(1e-5 + 1e-3)


def test_network_cards_are_shared_by_what_runs_side_by_side():
    network = Network(FAST, SLOW, sharing=4)
    assert network.all_gather_s(8e6, (4, 4)) == NETWORK.all_gather_s(8e6, (4, 4))
    assert network.all_gather_s(8e6, (1, 1)) == pytest.approx(1e-4 + 4 * 4e-2)
    assert network.all_gather_s(8e6, (2, 2)) == pytest.approx(3 * (1e-4 + 2 * 2e-2))
    assert network.point_to_point_s(1e6, same_node=False) == pytest.approx(1e-4 + 4e-2)


def test_messages():
    assert NETWORK.point_to_point_s(1e6, same_node=True) == pytest.approx(1e-5 + 1e-3)
    assert NETWORK.point_to_point_s(1e6, same_node=False) == pytest.approx(1e-4 + 1e-2)


def test_unknown_links_cost_nothing_and_are_named():
    network = Network()
    assert network.all_reduce_s(1e9, (4, 4)) == 0
    assert network.point_to_point_s(1e9, same_node=False) == 0
    assert network.unknown((4, 4)) == ("within_node", "between_nodes")
    assert network.unknown((4,)) == ("within_node",)
    assert network.unknown((1, 1)) == ("between_nodes",)
    assert network.unknown((1,)) == ()
    assert NETWORK.unknown((4, 4)) == ()


@given(sizes, spreads)
def test_bounds_of_any_all_gather(size, spread):
    ranks = sum(spread)
    seconds = NETWORK.all_gather_s(size, spread)
    assert NETWORK.all_reduce_s(size, spread) == pytest.approx(2 * seconds)
    assert seconds <= (ranks - 1) * SLOW.seconds(size / ranks) * (1 + 1e-12)
    # every rank must receive all but its own part, at best over the fast link
    assert seconds >= (ranks - 1) / ranks * size / FAST.bandwidth_bytes_per_s * (1 - 1e-12)
    assert NETWORK.all_gather_s(size * 2, spread) >= seconds


@given(sizes, spreads, st.floats(1, 10))
def test_faster_links_never_take_longer(size, spread, factor):
    def faster(link):
        return Link(link.bandwidth_bytes_per_s * factor, link.latency_s / factor)

    assert Network(faster(FAST), SLOW).all_gather_s(size, spread) <= NETWORK.all_gather_s(size, spread)
    assert Network(FAST, faster(SLOW)).all_gather_s(size, spread) <= NETWORK.all_gather_s(size, spread)


def test_alone_or_empty_takes_no_time():
    assert NETWORK.all_reduce_s(1e9, (1,)) == 0
    assert NETWORK.all_reduce_s(0, (4, 4)) == 0


def test_spread():
    devices = [Device("t", node, 1, None) for node in ("a", "a", "b", "c", "a")]
    cluster = Cluster("c", tuple(devices), FAST, SLOW)
    assert spread_of(cluster, range(5)) == (3, 1, 1)
    assert spread_of(cluster, (2, 3)) == (1, 1)
    assert Network.of(cluster) == NETWORK
    with pytest.raises(HeteroError) as caught:
        spread_of(cluster, (1, 1, 9))
    assert "rank 9 is not one of the 5" in str(caught.value)
    assert "rank 1 is named 2 times" in str(caught.value)


def test_malformed():
    with pytest.raises(HeteroError) as caught:
        NETWORK.all_gather_s(-1, (0,))
    assert str(caught.value).count("\n  - ") == 2
