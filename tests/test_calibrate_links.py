"""Bandwidths and latencies are found again in the communication of runs, as far as runs tell them apart."""

from dataclasses import replace

import pytest

from lightning_hetero.cluster import Fabric, Link
from tests.calibration_runs import (
    GUESSED,
    LARGE,
    SMALL,
    WITHIN,
    World,
    calibrate,
    cluster,
    costs,
    found,
    several,
    write_files,
    write_run,
)


@pytest.fixture
def files(tmp_path):
    return write_files(tmp_path)


def test_one_message_size_tells_one_constant_of_a_link(files):
    """Latency, with the bandwidth as given; or the bandwidth where no latency explains the runs as well."""
    one_node = cluster(nodes=1)
    run = write_run(files / "run", World(), one_node, SMALL, "FULL_SHARD", 2)
    again = write_run(files / "again", World(), one_node, SMALL, "FULL_SHARD", 1)
    for runs, count in (([run], "1 run"), ([run, again], "2 runs")):
        assert calibrate(files, runs) == 0
        calibration = found(files)
        assert calibration.links["within_node"].bandwidth_bytes_per_s == pytest.approx(GUESSED.bandwidth_bytes_per_s)
        assert calibration.links["within_node"].latency_s > World().within.latency_s  # it stands for both
        assert max(abs(each.error) for each in calibration.runs) < 0.01
        assert min(abs(each.uncalibrated_step_s / each.measured_step_s - 1) for each in calibration.runs) > 0.1
        assert (
            "only its latency, with bandwidth as the cluster file gives it (10 GB/s)"
            in (calibration.sources["links.within_node"])
        )
        refused = " ".join(calibration.refused)
        for text in (
            f"links.within_node.bandwidth: bandwidth and latency cannot be told apart by {count}",
            "a run with shard groups of another size, or of a model whose blocks have another size, would tell",
            "discover measures both",
            "a fixed part of the optimizer's step cannot be told",
        ):
            assert text in refused
    # groups of another size send parts of another size
    halves = write_run(files / "halves", World(), one_node, SMALL, "HYBRID_2", 2)
    assert calibrate(files, [run, halves]) == 0
    assert found(files).links["within_node"].latency_s == pytest.approx(World().within.latency_s, rel=1e-2)


def test_a_bandwidth_is_fitted_where_the_given_one_is_too_slow_for_any_latency(files):
    one_node = cluster(nodes=1, link=Link(1e8, 1e-5))
    one_node.to_yaml(files / "slow.yaml")
    run = write_run(files / "run", World(), one_node, LARGE, "FULL_SHARD", 2)
    assert calibrate(files, [run], where="slow.yaml") == 0
    calibration = found(files)
    assert calibration.links["within_node"].latency_s == pytest.approx(1e-5)
    assert calibration.links["within_node"].bandwidth_bytes_per_s == pytest.approx(4e9, rel=0.2)
    assert abs(calibration.runs[0].error) < 0.01
    assert any(text.startswith("links.within_node.latency: ") for text in calibration.refused)


def test_of_two_links_that_are_always_used_together_the_one_between_nodes_is_fitted(files):
    assert calibrate(files, several(files, World(), [(LARGE, "FULL_SHARD")])) == 0
    calibration = found(files)
    assert list(calibration.links) == ["between_nodes"]
    assert abs(calibration.runs[0].error) < 0.01
    assert any(text.startswith("links.between_nodes.bandwidth: ") for text in calibration.refused)
    assert any(text.startswith("links.within_node: ") for text in calibration.refused)


def test_groups_of_two_sizes_on_two_nodes_tell_something_of_each_link(files):
    """Two message sizes and four constants: a group of all four ranks, and one in each node."""
    where = cluster(nodes=2, per_node=2)
    where.to_yaml(files / "four.yaml")
    world, model = World(within=Link(10e9, 6e-3), between=Link(10e9, 9e-3), noise=0.02), costs(100, blocks=1)
    model.save(files / "model.json")
    runs = [
        write_run(files / f"{sharding}-{samples}", world, where, model, sharding, samples, seed=samples)
        for sharding in ("FULL_SHARD", "HYBRID_2")
        for samples in (4, 8)
    ]
    assert calibrate(files, runs, where="four.yaml", models=["model.json"]) == 0
    calibration = found(files)
    assert set(calibration.links) == {"within_node", "between_nodes"}
    assert calibration.mean_error < 0.05
    assert min(abs(each.uncalibrated_step_s / each.measured_step_s - 1) for each in calibration.runs) > 0.5


def test_hidden_communication_says_nothing_of_links(files):
    fast = World(within=Link(1e12, 1e-8), between=Link(1e12, 1e-8))
    runs = [(LARGE, "FULL_SHARD"), (SMALL, "FULL_SHARD")]
    assert calibrate(files, several(files, fast, runs, samples=4000)) == 0
    calibration = found(files)
    assert calibration.links == {}
    assert sum("links." in text for text in calibration.refused) == 2
    assert calibration.devices["fast"].compute_scale == pytest.approx(1.2, rel=1e-3)


def test_network_cards_and_pairs_stay_what_they_are(files):
    pair, cards = Link(8e9, 20e-6), Fabric(2e9, 100e-6, nics=2, half_bandwidth_nodes=64)
    where = replace(cluster(), within_pair=pair, between_nodes=cards)
    where.to_yaml(files / "cards.yaml")
    real = Fabric(1e9, 150e-6, nics=2, half_bandwidth_nodes=64)
    truth = replace(World().constants(), links={"within_pair": pair, "within_node": WITHIN, "between_nodes": real})
    runs = [(LARGE, "FULL_SHARD"), (LARGE, "HYBRID_4"), (SMALL, "FULL_SHARD"), (SMALL, "HYBRID_4")]
    paths = [
        write_run(files / f"run-{index}", World(), where, model, sharding, 2, truth=truth)
        for index, (model, sharding) in enumerate(runs)
    ]
    assert calibrate(files, paths, where="cards.yaml") == 0
    links = found(files).links
    assert (links["between_nodes"].nics, links["between_nodes"].half_bandwidth_nodes) == (2, 64)
    assert links["between_nodes"].bandwidth_bytes_per_s == pytest.approx(1e9, rel=0.01)
    assert links["within_node"].bandwidth_bytes_per_s == pytest.approx(WITHIN.bandwidth_bytes_per_s, rel=0.01)
    assert "within_pair" not in links  # no group was a pair
