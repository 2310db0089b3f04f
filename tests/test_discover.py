"""Discovery on this machine's processor: one process alone, and ranks of one process group."""

import os
import socket

import pytest
import torch
import torch.distributed as dist

from lightning_hetero.cluster import Cluster, Device, Link
from lightning_hetero.errors import ClusterError
from lightning_hetero.profiler import devices, links, speed


def test_one_process(monkeypatch):
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    cluster = devices.discover(device=torch.device("cpu"))
    assert cluster.world_size == 1
    device = cluster.devices[0]
    assert device.node == socket.gethostname()
    assert device.type == device.name == devices.processor_name()
    assert device.uuid is None
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert 0 < device.memory_bytes <= total
    # From a slow core to a large server: 100 MFLOP/s to 100 TFLOP/s.
    assert 1e8 < device.speed_flops_per_s < 1e14
    assert (cluster.within_node, cluster.between_nodes) == (None, None)
    assert not cluster.emulate


def test_the_cluster_calls_it_and_the_file_reads_back(tmp_path):
    if torch.cuda.is_available():
        pytest.skip("looks at the processor only")
    cluster = Cluster.discover(measure_speed=False)
    assert cluster.devices[0].speed_flops_per_s is None
    cluster.to_yaml(tmp_path / "found.yaml")
    assert Cluster.from_yaml(tmp_path / "found.yaml") == cluster


def test_ranks_of_a_node_share_its_memory(monkeypatch):
    monkeypatch.setattr(devices, "_machine_memory", lambda: (1000, 4000))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    cluster = devices.discover(measure_speed=False, device=torch.device("cpu"))
    assert cluster.devices[0].memory_bytes == 250


@pytest.mark.parametrize("dtype", ["int32", "float31", "bf16"])
def test_a_dtype_that_is_none_of_the_four(dtype):
    with pytest.raises(ClusterError, match=f"dtype is '{dtype}': give one of float64, float32, bfloat16, float16"):
        Cluster.discover(dtype=dtype)


def test_a_device_that_is_neither():
    with pytest.raises(ClusterError, match="device meta is neither CUDA nor CPU"):
        devices.discover(device=torch.device("meta"))


def test_speed_is_that_of_matrix_products(monkeypatch):
    """A clock under which every product takes 2 us for each of its size gives the speed by hand."""
    sizes = []

    def seconds(size, device, dtype, repeats):
        sizes.append((size, repeats))
        return size * 2e-6

    monkeypatch.setattr(speed, "_matmul_s", seconds)
    measured = speed.matmul_flops_per_s(torch.device("cpu"), torch.float32, 10**9)
    size, repeats = sizes[-1]
    assert measured == pytest.approx(2 * size**3 / (size * 2e-6))
    assert repeats == 5
    assert size % 64 == 0
    # 12 bytes per element of the three matrices within an eighth of the memory
    assert size**2 * 12 <= 10**9 / 8


def test_the_size_leads_to_about_fifty_milliseconds(monkeypatch):
    rate = 3e11
    sizes = []

    def seconds(size, device, dtype, repeats):
        sizes.append(size)
        return 2 * size**3 / rate + 1e-5

    monkeypatch.setattr(speed, "_matmul_s", seconds)
    measured = speed.matmul_flops_per_s(torch.device("cpu"), torch.float32, 10**11)
    assert measured == pytest.approx(rate, rel=0.01)
    assert 0.03 < 2 * sizes[-1] ** 3 / rate < 0.06


def test_measuring_leaves_the_random_state_alone():
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    speed._matmul_s(64, torch.device("cpu"), torch.float32, 1)
    assert torch.equal(torch.rand(3), expected)


def test_memory_of_a_container(tmp_path):
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal:       4000 kB\nMemFree: 1 kB\nMemAvailable:   3000 kB\n")
    assert devices._machine_memory(meminfo, tmp_path) == (3000 * 1024, 4000 * 1024)
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("1024\n")
    assert devices._machine_memory(meminfo, tmp_path) == (3000 * 1024, 4000 * 1024)
    (tmp_path / "memory.max").write_text(str(2048 * 1024))
    assert devices._machine_memory(meminfo, tmp_path) == (2047 * 1024, 2048 * 1024)
    with pytest.raises(ClusterError, match="free memory cannot be read"):
        devices._machine_memory(tmp_path / "nowhere", tmp_path)


def test_known_devices_get_the_name_of_their_preset():
    found = devices.LocalDevice("NVIDIA A100-SXM4-80GB", "n", 80, 70, False, "GPU-1", 1e14)
    other = devices.LocalDevice("NVIDIA Something New", "n", 80, 60, False, "GPU-2", 1e13)
    cluster = devices._cluster([found, other], None, None, cpu_ranks={"n": 2})
    assert cluster.devices == (
        Device("A100-80GB", "n", 70, 1e14, None, "NVIDIA A100-SXM4-80GB", "GPU-1"),
        Device("NVIDIA Something New", "n", 60, 1e13, None, "NVIDIA Something New", "GPU-2"),
    )


def discover_on_two_nodes():
    """Three ranks, the last of which believes to be on another machine."""
    node = "second" if dist.get_rank() == 2 else "first"
    devices.socket.gethostname = lambda: node
    return devices.discover(device=torch.device("cpu"))


def discover_with_a_broken_rank():
    if dist.get_rank() == 1:
        devices._machine_memory = lambda: 1 // 0
    devices.discover(measure_speed=False, device=torch.device("cpu"))


def test_every_rank_of_a_group_gets_the_same_cluster(ranks):
    clusters = ranks.run(3, discover_on_two_nodes)
    assert clusters[0] == clusters[1] == clusters[2]
    cluster = clusters[0]
    assert [device.node for device in cluster.devices] == ["first", "first", "second"]
    assert all(device.speed_flops_per_s > 1e8 for device in cluster.devices)
    # Two ranks share the first node's memory, the third has its own node to itself.
    first, second, third = (device.memory_bytes for device in cluster.devices)
    assert first == second
    assert first < third
    for link in (cluster.within_node, cluster.between_nodes):
        assert isinstance(link, Link)
        assert 1e6 < link.bandwidth_bytes_per_s < 1e12
        assert 0 < link.latency_s < 1


def test_a_rank_that_fails_is_named_on_all(ranks):
    for status, kind, message in ranks.run_outcomes(2, discover_with_a_broken_rank):
        assert (status, kind) == ("error", "ClusterError")
        assert "rank 1: ZeroDivisionError" in message
        assert "rank 0" not in message


def test_pairs_by_node(monkeypatch):
    asked = []
    monkeypatch.setattr(links, "_measure_pairs", lambda pairs, device: asked.append(pairs))
    links.measure_links(["a", "a", "a", "b", "c", "c"], torch.device("cpu"))
    assert asked == [[(0, 1), (4, 5)], [(0, 3)]]
