"""Sources of energy, on fakes of what drivers and the kernel tell; and the meter that reads them."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightning_hetero.profiler import power, power_rapl
from lightning_hetero.profiler.power import EnergyMeter, NoPowerSourceError, find_source
from lightning_hetero.profiler.power_gpu import AmdSmiSource, NvmlSource, pci_address
from lightning_hetero.profiler.power_rapl import RaplSource


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


class FakeNvml:
    """One GPU; ``energy_mj`` None is a card without the counter."""

    class NVMLError(Exception):
        pass

    def __init__(self, energy_mj: int | None, power_mw: int = 0) -> None:
        self.energy_mj, self.power_mw = energy_mj, power_mw
        self.open = 0

    def nvmlInit(self) -> None:  # noqa: N802
        self.open += 1

    def nvmlShutdown(self) -> None:  # noqa: N802
        self.open -= 1

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:  # noqa: N802
        if uuid != "GPU-1":
            raise self.NVMLError("Not Found")
        return uuid

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: str) -> int:  # noqa: N802
        if self.energy_mj is None:
            raise self.NVMLError("Not Supported")
        return self.energy_mj

    def nvmlDeviceGetPowerUsage(self, handle: str) -> int:  # noqa: N802
        return self.power_mw


def test_nvml_counts_energy() -> None:
    nvml = FakeNvml(energy_mj=5_000_000)
    source = NvmlSource(nvml, "GPU-1")
    assert source.joules() == 0
    nvml.energy_mj = 5_002_500
    assert source.joules() == 2.5
    assert "counter of energy" in source.label
    source.close()
    assert nvml.open == 0


def test_nvml_without_a_counter_is_integrated() -> None:
    nvml, clock = FakeNvml(None, power_mw=100_000), Clock()
    source = NvmlSource(nvml, "GPU-1", clock)
    clock.now_s += 2
    nvml.power_mw = 300_000
    assert source.joules() == pytest.approx(2 * 200)  # the mean of 100 and 300 W
    clock.now_s += 1
    assert source.joules() == pytest.approx(2 * 200 + 300)
    assert "power, integrated" in source.label


def test_nvml_is_closed_where_the_device_is_not_found() -> None:
    nvml = FakeNvml(0)
    with pytest.raises(FakeNvml.NVMLError):
        NvmlSource(nvml, "GPU-2")
    assert nvml.open == 0


class FakeAmdSmi:
    def __init__(self, **told: Any) -> None:
        self.told = told
        self.open = 0

    def amdsmi_init(self) -> None:
        self.open += 1

    def amdsmi_shut_down(self) -> None:
        self.open -= 1

    def amdsmi_get_processor_handles(self) -> list[str]:
        return ["0000:C1:00.0", "0000:D1:00.0"]

    def amdsmi_get_gpu_device_bdf(self, handle: str) -> str:
        return handle

    def amdsmi_get_power_info(self, handle: str) -> dict[str, Any]:
        assert handle == "0000:D1:00.0"
        return self.told


@pytest.mark.parametrize(
    "told",
    [
        {"socket_power": 250, "average_socket_power": "N/A"},
        {"current_socket_power": 250, "average_socket_power": 2**32 - 1},
        {"current_socket_power": "N/A", "average_socket_power": 250},
    ],
)
def test_amdsmi(told: dict[str, Any]) -> None:
    amdsmi, clock = FakeAmdSmi(**told), Clock()
    source = AmdSmiSource(amdsmi, "0000:d1:00.0", clock)
    clock.now_s += 2
    assert source.joules() == pytest.approx(500)
    source.close()
    assert amdsmi.open == 0


def test_amdsmi_that_does_not_tell() -> None:
    amdsmi = FakeAmdSmi(socket_power="N/A")
    with pytest.raises(LookupError, match="does not tell this GPU's power"):
        AmdSmiSource(amdsmi, "0000:d1:00.0")
    with pytest.raises(LookupError, match=r"knows no GPU at 0000:e1:00\.0"):
        AmdSmiSource(amdsmi, "0000:e1:00.0")
    assert amdsmi.open == 0


def test_the_address_of_a_gpu() -> None:
    properties = SimpleNamespace(pci_domain_id=0, pci_bus_id=0xC1, pci_device_id=0)
    assert pci_address(properties) == "0000:c1:00.0"
    with pytest.raises(LookupError, match="newer"):
        pci_address(SimpleNamespace())


def zone(root: Path, folder: str, name: str, microjoules: int, limit: int = 262_143_328_850) -> Path:
    path = root / folder
    path.mkdir(parents=True)
    (path / "name").write_text(f"{name}\n")
    (path / "energy_uj").write_text(f"{microjoules}\n")
    (path / "max_energy_range_uj").write_text(f"{limit}\n")
    return path


def test_rapl_counts_packages_and_memory_over_wraps(tmp_path: Path) -> None:
    first = zone(tmp_path, "intel-rapl:0", "package-0", 1_000_000)
    memory = zone(tmp_path, "intel-rapl:0:1", "dram", 0)
    second = zone(tmp_path, "intel-rapl:1", "package-1", 9_000_000, limit=10_000_000)
    cores = zone(tmp_path, "intel-rapl:0:0", "core", 0)
    whole = zone(tmp_path, "intel-rapl:2", "psys", 0)
    (tmp_path / "dtpm").mkdir()
    source = RaplSource(tmp_path)
    assert source.joules() == 0
    for counted, microjoules in ((first, 3_000_000), (memory, 500_000), (second, 1_000_000), (cores, 7), (whole, 9)):
        (counted / "energy_uj").write_text(f"{microjoules}\n")
    # 2 J and 0.5 J, and from 9 J over the end at 10 J to 1 J; cores are in the package, psys is all of it
    assert source.joules() == pytest.approx(2 + 0.5 + 2)
    (second / "energy_uj").write_text("0\n")
    assert source.joules() == pytest.approx(2 + 0.5 + 2 + 9)
    assert source.label == "RAPL, package-0, dram, package-1"


def test_ranks_share_the_processor(tmp_path: Path) -> None:
    package = zone(tmp_path, "intel-rapl:0", "package-0", 0)
    source = RaplSource(tmp_path, share=0.25)
    (package / "energy_uj").write_text("8000000\n")
    assert source.joules() == 2
    assert "0.25 of it for each rank" in source.label


def test_rapl_that_is_not_there(tmp_path: Path) -> None:
    for root in (tmp_path, tmp_path / "none"):
        with pytest.raises(LookupError, match="no intel-rapl in"):
            RaplSource(root)


def test_rapl_that_may_not_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = zone(tmp_path, "intel-rapl:0", "package-0", 0)

    def refuse(self: Path) -> int:
        raise PermissionError(13, "Permission denied", str(self / "energy_uj"))

    monkeypatch.setattr(RaplSource, "_read", staticmethod(refuse))
    with pytest.raises(PermissionError, match=rf"{package}/energy_uj may not be read .* chmod a\+r"):
        RaplSource(tmp_path)


def test_the_reason_where_there_is_no_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(power, "RaplSource", lambda share: RaplSource(tmp_path, share))
    with pytest.raises(NoPowerSourceError, match="no intel-rapl in"):
        find_source(torch.device("cpu"))
    with pytest.raises(NoPowerSourceError, match="type 'mps'"):
        find_source(torch.device("mps"))
    package = zone(tmp_path, "intel-rapl:0", "package-0", 0)
    source = find_source(torch.device("cpu"), ranks_here=2)
    (package / "energy_uj").write_text("8000000\n")
    assert source.joules() == 4
    assert Path("/sys/class/powercap") == power_rapl.ROOT


def on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="1"))
    monkeypatch.setattr(torch.version, "hip", None)


def test_nvidia_gpus_are_read_by_nvml(monkeypatch: pytest.MonkeyPatch) -> None:
    on_cuda(monkeypatch)
    nvml = FakeNvml(1000)
    monkeypatch.setattr(power, "import_module", {"pynvml": nvml}.__getitem__)
    source = find_source(torch.device("cuda", 0))
    nvml.energy_mj = 3000
    assert source.joules() == 2
    nvml.nvmlDeviceGetHandleByUUID = lambda uuid: exec("raise nvml.NVMLError('Not Found')", {"nvml": nvml})
    with pytest.raises(NoPowerSourceError, match="NVMLError: Not Found"):
        find_source(torch.device("cuda", 0))


def test_a_library_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    on_cuda(monkeypatch)

    def absent(name: str) -> None:
        raise ModuleNotFoundError(name=name)

    monkeypatch.setattr(power, "import_module", absent)
    with pytest.raises(NoPowerSourceError, match="pynvml is not there: install nvidia-ml-py"):
        find_source(torch.device("cuda", 0))


class Steady:
    """So many watts since it was made; ``told`` is what it told the main thread."""

    label = "a fake"

    def __init__(self, watts: float = 100.0, fails_after: int | None = None) -> None:
        self.watts, self.fails_after = watts, fails_after
        self.reads, self.closed = 0, 0
        self.threads: set[str] = set()
        self.told: list[float] = []
        self._began_s = time.monotonic()

    def joules(self) -> float:
        self.reads += 1
        self.threads.add(threading.current_thread().name)
        if self.fails_after is not None and self.reads > self.fails_after:
            raise OSError("the driver is gone")
        joules = self.watts * (time.monotonic() - self._began_s)
        if threading.current_thread() is threading.main_thread():
            self.told.append(joules)
        return joules

    def close(self) -> None:
        self.closed += 1


def test_the_meter_reads_in_a_thread_and_ends_it() -> None:
    source = Steady()
    meter = EnergyMeter(source, period_s=0.01)
    meter.start()
    deadline_s = time.monotonic() + 10
    while source.reads < 3 and time.monotonic() < deadline_s:
        time.sleep(0.01)
    assert source.threads == {"lightning-hetero energy"}
    before, after = meter.read(), meter.read()
    assert before is not None
    assert after is not None
    assert 0 < before.joules <= after.joules
    assert before.at_s <= after.at_s
    meter.stop()
    meter.stop()
    assert source.closed == 1
    assert not [each for each in threading.enumerate() if each.name == "lightning-hetero energy"]
    reads = source.reads
    assert meter.read() is not None  # what was read last
    assert source.reads == reads


def test_a_source_that_fails_is_not_a_zero() -> None:
    meter = EnergyMeter(Steady(fails_after=1), period_s=60)
    meter.start()
    assert meter.read() is not None
    assert meter.problem is None
    assert meter.read() is None
    assert meter.problem == "OSError: the driver is gone"
    meter.stop()
    assert meter.read() is None


def test_amd_gpus_are_read_by_amdsmi(monkeypatch: pytest.MonkeyPatch) -> None:
    properties = SimpleNamespace(pci_domain_id=0, pci_bus_id=0xD1, pci_device_id=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.version, "hip", "7.0")
    monkeypatch.setattr(power, "import_module", {"amdsmi": FakeAmdSmi(socket_power=250)}.__getitem__)
    assert "GPU at 0000:d1:00.0" in find_source(torch.device("cuda", 0)).label
