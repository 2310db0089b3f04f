"""Emulated devices that change their speed in mid-run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lightning_hetero.cluster import Cluster, Device, SpeedChange
from lightning_hetero.emulation import Emulation
from lightning_hetero.errors import ClusterError
from lightning_hetero.models.units import find_units
from tests.test_emulation import model, run

FILE = """
schema: 1
name: one
emulate: EMULATE
nodes:
  - name: a
    devices: [{type: fast, memory: 2 GiB, speed: 6 GFLOP/s, speed_schedule: SCHEDULE}]
"""


def read(tmp_path: Path, schedule: str, emulate: str = "true") -> Cluster:
    path = tmp_path / "cluster.yaml"
    path.write_text(FILE.replace("SCHEDULE", schedule).replace("EMULATE", emulate))
    return Cluster.from_yaml(path)


def test_a_schedule_is_read_and_written(tmp_path: Path) -> None:
    cluster = read(tmp_path, "[{step: 10, factor: 0.5}, {step: 20, factor: 1}]")
    device = cluster.devices[0]
    assert device.speed_schedule == (SpeedChange(10, 0.5), SpeedChange(20, 1.0))
    assert [device.speed_factor(step) for step in (0, 9, 10, 19, 20, 99)] == [1.0, 1.0, 0.5, 0.5, 1.0, 1.0]
    cluster.to_yaml(tmp_path / "again.yaml")
    assert Cluster.from_yaml(tmp_path / "again.yaml") == cluster


@pytest.mark.parametrize(
    ("schedule", "words"),
    [
        ("[]", ["speed_schedule", "at least one change"]),
        ("{step: 1, factor: 2}", ["speed_schedule", "at least one change"]),
        ("[{step: -1, factor: 0}]", ["speed_schedule[0].step: -1", "speed_schedule[0].factor: 0"]),
        ("[{step: 3}]", ["key 'factor' is missing"]),
        ("[{step: 3, factor: 1, by: 2}]", ["unknown key 'by'"]),
        ("[{step: 3, factor: 1}, {step: 3, factor: 2}]", ["the steps 3, 3", "rising order"]),
    ],
)
def test_bad_schedules_are_refused_with_their_place(tmp_path: Path, schedule: str, words: list[str]) -> None:
    with pytest.raises(ClusterError) as error:
        read(tmp_path, schedule)
    for word in ["nodes[0].devices[0]", *words]:
        assert word in str(error.value)


def test_only_emulated_devices_have_one(tmp_path: Path) -> None:
    with pytest.raises(ClusterError, match="set emulate: true"):
        read(tmp_path, "[{step: 1, factor: 2}]", emulate="false")


@pytest.mark.parametrize("change", [{"step": 1.5, "factor": 1}, {"step": 1, "factor": float("nan")}])
def test_bad_changes_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ClusterError, match=r"(step|factor) is"):
        SpeedChange(**change)


def test_an_emulated_rank_follows_it() -> None:
    device = Device("fast", "a", 1 << 30, 6e8, speed_schedule=(SpeedChange(2, 0.5),))
    targets = []
    for steps_done in (1, 2):
        net = model()
        emulation = Emulation(device, 0, find_units(net))
        emulation.steps_done = steps_done
        run(emulation, net, steps=1)
        targets.append(emulation.report().target_s)
    assert targets[1] == pytest.approx(2 * targets[0])
