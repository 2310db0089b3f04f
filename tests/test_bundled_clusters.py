"""Clusters that come with the package, and clusters with more or fewer nodes."""

import re
import shutil
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from lightning_hetero.cluster import Cluster, Device
from lightning_hetero.cluster.bundled_clusters import FOLDER, bundled_names, load_cluster
from lightning_hetero.cluster.peaks import peak_flops_per_s
from lightning_hetero.cluster.resized import with_node, with_nodes, without_node
from lightning_hetero.errors import ClusterError

ROOT = Path(__file__).parent.parent
NAMES = ("cloud_mix", "dgx_a100", "dgx_h100", "frontier", "h100_a100", "lab_3090_4090")


def test_the_bundled_ones():
    assert bundled_names() == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_each_loads_and_says_where_its_numbers_come_from(name):
    cluster = load_cluster(name)
    assert cluster.name == name
    assert not cluster.emulate
    assert cluster.within_node is not None
    assert cluster.between_nodes is not None
    for device in cluster.devices:
        peak = peak_flops_per_s(device.type, "bf16") or peak_flops_per_s(device.type, "fp16")
        assert peak is None or device.speed_flops_per_s < 0.8 * peak  # what is reached, not a peak
    text = " ".join((FOLDER / f"{name}.yaml").read_text().replace("#", " ").split())
    for word in ("memory", "speed", "links", "latency", "VENDOR'S PEAKS", "MEASURED by others"):
        assert word in text, (name, word)
    assert ("FITTED" if name == "frontier" else "ASSUMED") in text


def test_frontier_is_a_node_of_8_gcds():
    cluster = load_cluster("frontier")
    assert cluster.types == ("MI250X-GCD",)
    assert cluster.world_size == 8
    assert cluster.devices[0].memory_bytes == 64 * 10**9


def test_a_file_comes_before_a_bundled_cluster_and_a_name_that_is_neither_is_told(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Cluster("own", (Device("x", "n", 1, None),)).to_yaml("frontier")
    assert load_cluster("frontier").name == "own"
    with pytest.raises(ClusterError, match=r"(?s)nowhere does not exist.*or one of cloud_mix, dgx_a100"):
        load_cluster("nowhere")


def test_more_nodes_repeat_the_pattern():
    base = load_cluster("h100_a100")
    three = with_nodes(base, 3)
    assert three.nodes == ("dgx-h100-0", "dgx-a100-0", "dgx-h100-0 (2)")
    assert three.device_types() == ("H100-SXM",) * 8 + ("A100-80GB",) * 8 + ("H100-SXM",) * 8
    assert (three.within_node, three.between_nodes) == (base.within_node, base.between_nodes)
    assert with_nodes(base, 2) == base
    assert with_nodes(base, 1).types == ("H100-SXM",)
    assert len(with_nodes(load_cluster("frontier"), 128).nodes) == 128
    with pytest.raises(ClusterError, match="give at least 1"):
        with_nodes(base, 0)


def test_an_identifier_stays_with_its_own_device():
    base = Cluster("c", (Device("x", "n", 1, None, uuid="GPU-1"),))
    assert [device.uuid for device in with_nodes(base, 2).devices] == ["GPU-1", None]


def test_one_node_more_or_less():
    base = load_cluster("h100_a100")
    new = replace(base.devices[0], node="new")
    assert with_node(base, [new] * 2).device_types()[-3:] == ("A100-80GB", "H100-SXM", "H100-SXM")
    assert without_node(base, "dgx-h100-0").types == ("A100-80GB",)
    with pytest.raises(ClusterError, match="cannot be added"):
        with_node(base, [base.devices[0]])
    with pytest.raises(ClusterError, match="give one of dgx-h100-0, dgx-a100-0"):
        without_node(base, "slow")
    with pytest.raises(ClusterError, match="is the only one"):
        without_node(load_cluster("frontier"), "frontier-0")


def test_setuptools_is_told_to_package_them():
    found = re.search(
        r"\[tool.setuptools.package-data\]\nlightning_hetero = (\[.*\])", (ROOT / "pyproject.toml").read_text()
    )
    patterns = re.findall(r'"([^"]+)"', found[1])
    package = ROOT / "lightning_hetero"
    packaged = {path for pattern in patterns for path in package.glob(pattern)}
    assert {path.stem for path in packaged if path.suffix == ".yaml"} == set(NAMES)


@pytest.mark.slow
def test_a_wheel_contains_them(tmp_path):
    pytest.importorskip("setuptools", minversion="77")  # what pyproject.toml builds with
    source = tmp_path / "source"
    without = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "lightning_hetero", source / "lightning_hetero", ignore=without)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-q", "-w", tmp_path, source]
    subprocess.run(command, check=True)
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert {Path(name).stem for name in names if name.startswith("lightning_hetero/cluster/bundled/")} == set(NAMES)
