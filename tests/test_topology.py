"""What collectives cost where ranks share links."""

from dataclasses import replace

import pytest

from lightning_hetero.cluster import Cluster, Device, Fabric, Link
from lightning_hetero.errors import ClusterError, HeteroError
from lightning_hetero.simulator.comm import Network
from lightning_hetero.simulator.topology import Placement, Topology

PAIR, NODE = Link(200e9, 1e-6), Link(50e9, 2e-6)
FABRIC = Fabric(25e9, 10e-6, nics=4, half_bandwidth_nodes=4)


def cluster_of(nodes: int, per_node: int = 8, between: Link | None = FABRIC) -> Cluster:
    devices = tuple(Device("x", f"n{node}", 2**30, None) for node in range(nodes) for _ in range(per_node))
    return Cluster("c", devices, NODE, between, within_pair=PAIR)


def test_places():
    topology = Topology(cluster_of(4))
    assert topology.place([0, 1]) == Placement((2,), True, 4)
    assert topology.place([1, 2]) == Placement((2,), False, 4)
    assert topology.place(range(8)) == Placement((8,), False, 1)
    assert topology.place([0, 8, 16]) == Placement((1, 1, 1), False, 8)
    assert topology.place([0, 1, 2, 3, 8]) == Placement((4, 1), False, 8)


def test_links_within_a_node():
    topology = Topology(cluster_of(1))
    assert topology.seconds("all_gather", 8e6, topology.place([4, 5])) == pytest.approx(1e-6 + 4e6 / 200e9)
    assert topology.seconds("all_gather", 8e6, topology.place([5, 6])) == pytest.approx(2e-6 + 4e6 / 50e9)
    ring = 7 * (2e-6 + 1e6 / 50e9)
    assert topology.seconds("reduce_scatter", 8e6, topology.place(range(8))) == pytest.approx(ring)
    assert topology.seconds("all_reduce", 8e6, topology.place(range(8))) == pytest.approx(2 * ring)
    assert topology.seconds("all_reduce", 0, topology.place(range(8))) == 0
    assert topology.seconds("all_reduce", 8, topology.place([3])) == 0


def test_a_nodes_cards_are_shared_and_so_is_the_network():
    topology = Topology(cluster_of(4))
    share = 1 / (1 + 4 / 4)
    whole = topology.seconds("all_gather", 32e6, topology.place(range(32)))
    assert whole == pytest.approx(31 * (10e-6 + 1e6 / min(50e9, 100e9 * share)))
    one_each = topology.seconds("all_gather", 32e6, topology.place([0, 8, 16, 24]))  # 8 such at once
    assert one_each == pytest.approx(3 * (10e-6 + 8e6 / (100e9 * share / 8)))
    more = Topology(cluster_of(12))
    assert more.seconds("all_gather", 32e6, more.place([0, 8, 16, 24])) == pytest.approx(3 * (10e-6 + 8e6 / (25e9 / 8)))


def test_a_plain_link_between_nodes_is_shared_by_nobody():
    topology = Topology(cluster_of(4, between=Link(25e9, 10e-6)))
    assert topology.seconds("all_gather", 32e6, topology.place([0, 8, 16, 24])) == pytest.approx(
        3 * (10e-6 + 8e6 / 25e9)
    )


def test_small_reductions_over_many_nodes_go_up_a_tree():
    topology = Topology(cluster_of(16))
    place = topology.place(range(128))
    bandwidth = 100e9 / (1 + 16 / 4)
    tree = 2 * (4 * 10e-6 + 7 * 2e-6 + 1e6 / bandwidth)
    assert topology.seconds("all_reduce", 1e6, place) == pytest.approx(tree)
    assert topology.seconds("all_reduce", 1e6, place) < 2 * topology.seconds("all_gather", 1e6, place)
    rings = Topology(cluster_of(16), "gloo")
    assert rings.seconds("all_reduce", 1e6, place) == pytest.approx(2 * rings.seconds("all_gather", 1e6, place))


def test_gloo_scatters_what_it_all_reduced():
    topology = Topology(cluster_of(1), "gloo")
    place = topology.place(range(8))
    assert topology.seconds("reduce_scatter", 1e6, place) == topology.seconds("all_reduce", 1e6, place)


@pytest.mark.parametrize("between", [Link(5e9, 50e-6), FABRIC], ids=["link", "cards"])
def test_rings_agree_with_the_closed_form(between):
    cluster = replace(cluster_of(4, between=between), within_pair=None)
    topology = Topology(cluster, "gloo")
    for size in (1e3, 1e6, 1e9):
        for ranks in (range(32), range(8), (0, 8, 16), (0, 1, 8, 9)):
            place = topology.place(ranks)
            for kind, theirs in (("all_gather", "all_gather_s"), ("all_reduce", "all_reduce_s")):
                expected = getattr(Network.of(cluster), theirs)(size, place.per_node)
                assert topology.seconds(kind, size, place) == pytest.approx(expected)


def test_costs_grow_with_bytes_and_ranks():
    topology = Topology(cluster_of(16))
    for kind in ("all_gather", "reduce_scatter", "all_reduce"):
        sizes = [topology.seconds(kind, 10.0**k, topology.place(range(64))) for k in range(3, 10)]
        assert sizes == sorted(sizes)
    ranks = [topology.seconds("all_gather", 1e7, topology.place(range(8 * n))) for n in (1, 2, 4, 8, 16)]
    assert ranks == sorted(ranks)


def test_unknown_links_cost_nothing():
    devices = tuple(Device("x", f"n{rank}", 1, None) for rank in range(4))
    topology = Topology(Cluster("c", devices))
    assert topology.seconds("all_reduce", 1e9, topology.place(range(4))) < 1e-15


def test_bad_values():
    with pytest.raises(HeteroError, match="library is 'mpi': give one of nccl, gloo"):
        Topology(cluster_of(1), "mpi")
    with pytest.raises(HeteroError, match="kind is 'gather'"):
        Topology(cluster_of(1)).seconds("gather", 1, Placement((2,)))
    with pytest.raises(ClusterError, match=r"nics is 0.*\n.*half_bandwidth_nodes is -1"):
        Fabric(1e9, 0.0, nics=0, half_bandwidth_nodes=-1)


def test_links_of_all_levels_are_read_and_written(tmp_path):
    cluster = cluster_of(2)
    cluster.to_yaml(tmp_path / "c.yaml")
    assert Cluster.from_yaml(tmp_path / "c.yaml") == cluster
    plain = cluster_of(2, between=Link(25e9, 10e-6))
    assert Cluster.from_dict(plain.to_dict()) == plain
    links = cluster.to_dict()["links"]
    assert list(links) == ["within_pair", "within_node", "between_nodes"]
    assert links["between_nodes"]["nics"] == 4
    bad = cluster.to_dict()
    bad["links"]["between_nodes"] |= {"nics": 0, "half_bandwidth_nodes": 0}
    bad["links"]["within_node"]["nics"] = 2
    with pytest.raises(ClusterError) as error:
        Cluster.from_dict(bad)
    for text in ("between_nodes.nics", "between_nodes.half_bandwidth_nodes: 0 is not valid", "unknown key 'nics'"):
        assert text in str(error.value)
