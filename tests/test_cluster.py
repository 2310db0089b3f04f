"""Cluster files: what is read, what is written, and what is refused."""

import dataclasses
import os

import pytest
import yaml

from lightning_hetero.cluster import Cluster, Device, Link, discovery
from lightning_hetero.errors import ClusterError

GOOD = """
schema: 1
name: two-fast-two-slow
emulate: true            # CPU ranks behave like these devices
nodes:
  - name: fast
    devices: [{type: fast, count: 2, memory: 2 GiB, speed: 6 GFLOP/s}]
  - name: slow
    devices: [{type: slow, count: 2, memory: 2 GiB, speed: 3 GFLOP/s, true_speed: 2.7 GFLOP/s}]
links:
  within_node: {bandwidth: 10 GB/s, latency: 10 us}
  between_nodes: {bandwidth: 1 GB/s, latency: 50 us}
"""


def write(tmp_path, text):
    path = tmp_path / "cluster.yaml"
    path.write_text(text)
    return path


def refused(data):
    with pytest.raises(ClusterError) as caught:
        Cluster.from_dict(data)
    return str(caught.value)


def good(**changes):
    return yaml.safe_load(GOOD) | changes


def one_device(**keys):
    return good(nodes=[{"name": "a", "devices": [keys]}])


def test_reads_the_file_of_the_documentation(tmp_path):
    cluster = Cluster.from_yaml(write(tmp_path, GOOD))
    assert cluster.name == "two-fast-two-slow"
    assert cluster.emulate
    assert cluster.world_size == 4
    assert cluster.nodes == ("fast", "slow")
    assert cluster.types == ("fast", "slow")
    assert cluster.device_types() == ("fast", "fast", "slow", "slow")
    assert cluster.ranks_of("slow") == (2, 3)
    assert cluster.devices[0] == Device("fast", "fast", 2**31, 6e9)
    assert cluster.devices[0].actual_speed_flops_per_s == 6e9
    assert cluster.devices[3].speed_flops_per_s == 3e9
    assert cluster.devices[3].actual_speed_flops_per_s == 2.7e9
    assert cluster.within_node == Link(1e10, 1e-5)
    assert cluster.between_nodes == Link(1e9, 5e-5)
    assert cluster.describe() == "two-fast-two-slow: 2 x fast, 2 x slow on 2 nodes (emulated)"


@pytest.mark.parametrize("change", ["as it is", "no links", "discovered", "odd numbers"])
def test_writes_what_reads_back_equal(tmp_path, change):
    cluster = Cluster.from_yaml(write(tmp_path, GOOD))
    if change == "no links":
        cluster = dataclasses.replace(cluster, within_node=None, between_nodes=None)
    elif change == "discovered":
        device = Device("H200", "host", 149_000_000_001, 1 / 3 * 1e15, None, "NVIDIA H200", "GPU-1")
        other = dataclasses.replace(device, uuid="GPU-2", speed_flops_per_s=None)
        cluster = Cluster("123", (device, other), Link(1.23456789e9, 1.1e-7), None)
    elif change == "odd numbers":
        devices = tuple(
            dataclasses.replace(device, speed_flops_per_s=1e9 / 7 + rank, memory_bytes=10**9 + rank)
            for rank, device in enumerate(cluster.devices)
        )
        cluster = dataclasses.replace(cluster, devices=devices)
    path = tmp_path / "new" / "written.yaml"
    cluster.to_yaml(path)
    assert Cluster.from_yaml(path) == cluster
    assert Cluster.from_dict(cluster.to_dict()) == cluster
    assert os.listdir(path.parent) == ["written.yaml"]


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    path = write(tmp_path, GOOD)
    cluster = Cluster.from_yaml(path)

    def fail(*_):
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="disk full"):
        dataclasses.replace(cluster, name="other").to_yaml(path)
    assert path.read_text() == GOOD
    assert os.listdir(tmp_path) == ["cluster.yaml"]


def test_presets_fill_in_memory_and_need_no_speed():
    data = one_device(type="A100-80GB") | {"emulate": False}
    assert Cluster.from_dict(data).devices == (Device("A100-80GB", "a", 80 * 10**9, None),)


def test_missing_file(tmp_path):
    path = tmp_path / "nowhere.yaml"
    with pytest.raises(ClusterError, match=r"nowhere\.yaml does not exist .*Cluster\.discover"):
        Cluster.from_yaml(path)


def test_a_folder_is_no_file(tmp_path):
    with pytest.raises(ClusterError, match="cannot be read"):
        Cluster.from_yaml(tmp_path)


@pytest.mark.parametrize("text", ["a: [1, 2", "a: b: c", "\t- x", "schema: 1\nname: a\nname: b"])
def test_not_yaml(tmp_path, text):
    with pytest.raises(ClusterError, match=r"cluster\.yaml is not YAML: .*line \d"):
        Cluster.from_yaml(write(tmp_path, text))


@pytest.mark.parametrize("text", ["", "just words", "- 1\n- 2", "3"])
def test_not_a_mapping(tmp_path, text):
    with pytest.raises(ClusterError, match="not a mapping: write the keys schema, name, nodes"):
        Cluster.from_yaml(write(tmp_path, text))


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (good(nmae="x"), "unknown key 'nmae': did you mean 'name'?"),
        (good(schema=2), "schema: is 2: this version reads schema 1"),
        (good(schema="1"), "schema: is '1'"),
        (good(emulate="yes please"), "emulate: 'yes please' is neither true nor false"),
        (good(name=7), "name: 7 is not a text"),
        (good(nodes=[]), "nodes: is []"),
        (good(nodes={"a": 1}), "nodes: is {'a': 1}"),
        (good(nodes=[{"name": "a", "devices": []}]), "nodes[0].devices: is []"),
        (good(nodes=["a"]), "nodes[0]: is 'a', not a mapping"),
        (good(nodes=[{"name": "a"}]), "nodes[0]: key 'devices' is missing"),
        (good(links=[1]), "links: is [1], not a mapping"),
        (good(links={"in_node": {}}), "links: unknown key 'in_node': did you mean 'within_node'?"),
        (good(links={"within_node": {"bandwidth": "1 GB/s"}}), "links.within_node: key 'latency' is missing"),
        (
            good(links={"within_node": {"bandwidth": "0 GB/s", "latency": "1 us"}}),
            "links.within_node.bandwidth: '0 GB/s' is zero",
        ),
        (
            good(links={"within_node": {"bandwidth": "1 GB/s", "latency": 5}}),
            "links.within_node.latency: 5 has no unit",
        ),
        (one_device(type="f", memory="GiB", speed="1 GFLOP/s"), "memory: 'GiB' has a unit but no number"),
        (one_device(type="f", memory="2", speed="1 GFLOP/s"), "memory: '2' has no unit"),
        (one_device(type="f", memory="0 GiB", speed="1 GFLOP/s"), "memory: '0 GiB' is zero"),
        (one_device(type="f", memory="-2 GiB", speed="1 GFLOP/s"), "memory: '-2 GiB' is negative"),
        (one_device(type="f", memory="1 GiB", speed="0 GFLOP/s"), "speed: '0 GFLOP/s' is zero"),
        (one_device(type="f", memory="1 GiB", speed="-1 GFLOP/s"), "speed: '-1 GFLOP/s' is negative"),
        (one_device(type="f", memory="1 GiB", speed="1 GB/s"), "unknown unit 'GB/s'"),
        (one_device(type="f", memory="1 GiB"), "key 'speed' is missing: with emulate: true"),
        (one_device(type="A100", speed="1 GFLOP/s"), "nearest: A100-40GB, A100-80GB"),
        (one_device(memory="1 GiB", speed="1 GFLOP/s"), "nodes[0].devices[0]: key 'type' is missing"),
        (one_device(type="f", memory="1 GiB", speed="1 GFLOP/s", count=0), "count: 0 is not valid"),
        (one_device(type="f", memory="1 GiB", speed="1 GFLOP/s", count=1.5), "count: 1.5 is not valid"),
        (one_device(type="f", memory="1 GiB", speed="1 GFLOP/s", count=True), "count: True is not valid"),
        (
            one_device(type="f", memory="1 GiB", spead="1 GFLOP/s"),
            "unknown key 'spead': did you mean 'speed'?",
        ),
        (one_device(type="f", memory="1 GiB", speed="1 GFLOP/s", uuid="x", count=2), "one entry per device"),
    ],
)
def test_bad_values_name_their_place(data, expected):
    assert expected in refused(data)


def test_equal_node_names():
    node = {"name": "a", "devices": [{"type": "f", "memory": "1 GiB", "speed": "1 GFLOP/s"}]}
    assert "nodes[1].name: 'a' is also the name of nodes[0]" in refused(good(nodes=[node, node]))


def test_all_problems_at_once():
    message = refused(
        {
            "schema": 3,
            "emulate": True,
            "nodes": [
                {"name": "a", "devices": [{"type": "f", "count": 0, "memory": "2"}]},
                {"name": "a", "devices": [{"type": "g", "memory": "1 GiB", "speed": "0 FLOP/s"}]},
            ],
        }
    )
    assert message.startswith("cluster description has 7 problems:\n")
    for part in (
        "schema",
        "'name' is missing",
        "count: 0",
        "memory: '2'",
        "'speed'",
        "nodes[1].name",
        "zero",
    ):
        assert part in message


def test_the_file_is_named_in_the_error(tmp_path):
    with pytest.raises(ClusterError, match=r"^cluster file .*cluster\.yaml has 1 problem:"):
        Cluster.from_yaml(write(tmp_path, GOOD.replace("6 GFLOP/s", "6")))


def test_objects_are_checked_too():
    with pytest.raises(ClusterError) as caught:
        Device("", "a", 0, -1.0, float("nan"))
    assert str(caught.value).count("\n  - ") == 4
    with pytest.raises(ClusterError, match="bandwidth_bytes_per_s is 0"):
        Link(0, 1e-6)
    with pytest.raises(ClusterError, match="no device"):
        Cluster("none", ())
    with pytest.raises(ClusterError, match=r"rank 1 \(b\) has no speed"):
        Cluster("c", (Device("a", "n", 1, 1.0), Device("b", "n", 1, None)), emulate=True)
    with pytest.raises(ClusterError, match="'GPU-1' is listed 2 times"):
        Cluster("c", (Device("a", "n", 1, None, uuid="GPU-1"),) * 2)


def test_ranks_of_a_node_that_are_apart_cannot_be_written():
    first, second = Device("a", "n0", 1, None), Device("a", "n1", 1, None)
    cluster = Cluster("cyclic", (first, second, first))
    with pytest.raises(ClusterError, match="n0, n1, n0"):
        cluster.to_dict()


def test_link_seconds():
    assert Link(1e9, 1e-3).seconds(10**9) == pytest.approx(1.001)


def test_discover_without_torch_says_what_to_do(monkeypatch):
    monkeypatch.setattr(discovery, "_registered", None)
    with pytest.raises(ClusterError, match="import lightning_hetero"):
        Cluster.discover()


def test_discover_calls_what_is_registered(monkeypatch):
    asked = {}
    found = Cluster("found", (Device("a", "n", 1, None),))

    def look(**options):
        asked.update(options)
        return found

    monkeypatch.setattr(discovery, "_registered", None)
    discovery.register(look)
    assert Cluster.discover(dtype="bfloat16", measure_links=False) is found
    assert asked == {"dtype": "bfloat16", "measure_speed": True, "measure_links": False}
