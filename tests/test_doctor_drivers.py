"""What drivers say of their GPUs, read from what they write; and what this machine says of itself."""

from __future__ import annotations

import os
import socket
import stat
import warnings
from types import SimpleNamespace

import pytest
import torch

from lightning_hetero.doctor import DriverView, amd, nvidia
from lightning_hetero.doctor.amd import amd_view
from lightning_hetero.doctor.gather import gather, own_code
from lightning_hetero.doctor.nvidia import ask_driver, parse_report
from lightning_hetero.doctor.place import Place
from lightning_hetero.profiler.busy import DeviceUser

REPORT = """<?xml version="1.0" ?>
<!DOCTYPE nvidia_smi_log SYSTEM "nvsmi_device_v12.dtd">
<nvidia_smi_log>
  <driver_version>580.65.06</driver_version>
  <gpu id="00000000:1B:00.0">
    <product_name>NVIDIA H200</product_name>
    <uuid>GPU-AAAA-1</uuid>
    <compute_mode>Default</compute_mode>
    <fb_memory_usage><total>143771 MiB</total><reserved>600 MiB</reserved><used>2048 MiB</used></fb_memory_usage>
    <utilization><gpu_util>98 %</gpu_util><memory_util>N/A</memory_util></utilization>
    <clocks_event_reasons>
      <clocks_event_reason_hw_slowdown>Active</clocks_event_reason_hw_slowdown>
      <clocks_event_reason_sw_thermal_slowdown>Not Active</clocks_event_reason_sw_thermal_slowdown>
      <clocks_event_reason_gpu_idle>Active</clocks_event_reason_gpu_idle>
    </clocks_event_reasons>
    <gpu_power_readings>
      <current_power_limit>450.00 W</current_power_limit><default_power_limit>700.00 W</default_power_limit>
    </gpu_power_readings>
    <applications_clocks><graphics_clock>1200 MHz</graphics_clock></applications_clocks>
    <default_applications_clocks><graphics_clock>1980 MHz</graphics_clock></default_applications_clocks>
    <processes>
      <process_info><pid>42</pid><type>C</type><process_name>python</process_name><used_memory>1500 MiB</used_memory>
      </process_info>
      <process_info><pid>7</pid><type>G</type><process_name>Xorg</process_name><used_memory>9 MiB</used_memory>
      </process_info>
    </processes>
  </gpu>
  <gpu id="00000000:2B:00.0">
    <uuid>GPU-bbbb</uuid>
    <clocks_throttle_reasons>
      <clocks_throttle_reason_hw_thermal_slowdown>Active</clocks_throttle_reason_hw_thermal_slowdown>
    </clocks_throttle_reasons>
    <power_readings><power_limit>N/A</power_limit><default_power_limit>250.00 W</default_power_limit></power_readings>
    <applications_clocks><graphics_clock>Requested functionality has been deprecated</graphics_clock>
    </applications_clocks>
    <processes><process_info><pid>9</pid><type>C</type><used_memory>N/A</used_memory></process_info></processes>
  </gpu>
</nvidia_smi_log>
"""
FIRST = DriverView(
    "GPU-AAAA-1",
    taken_bytes=2**31,
    users=(DeviceUser(42, "python", 1500 * 2**20),),
    utilisation=0.98,
    power_limit_w=450.0,
    default_power_limit_w=700.0,
    clock_mhz=1200.0,
    default_clock_mhz=1980.0,
    slowed_by=("hw_slowdown",),
    mode="Default",
)


def test_the_report_of_nvidia_smi():
    report = parse_report(REPORT)
    assert report.version == "580.65.06"
    assert report.of("aaaa-1") == FIRST  # as torch writes it
    older = report.of("GPU-bbbb")
    assert older is not None
    assert (older.power_limit_w, older.default_power_limit_w, older.clock_mhz) == (None, 250.0, None)
    assert older.slowed_by == ("hw_thermal_slowdown",)
    assert older.users == (DeviceUser(9, "a process", None),)
    assert (older.taken_bytes, older.utilisation, older.mode) == (None, None, None)
    assert (report.of("cccc"), report.of(None)) == (None, None)


def test_asking_the_driver(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\n[ \"$*\" = '-q -x' ] || exit 3\ncat <<'END'\n{REPORT}END\n")
    tool.chmod(tool.stat().st_mode | stat.S_IXUSR)
    assert ask_driver().of("AAAA-1") == FIRST
    tool.write_text("#!/bin/sh\necho 'NVIDIA-SMI has failed: no driver'\nexit 9\n")
    with pytest.raises(OSError, match=r"nvidia-smi failed .*no driver"):
        ask_driver()
    tool.write_text("#!/bin/sh\necho hello\n")
    with pytest.raises(OSError, match="cannot be read"):
        ask_driver()
    with pytest.raises(OSError, match="no-such-tool is not installed"):
        ask_driver("no-such-tool")


def test_the_files_of_amdgpu(tmp_path):
    folder = tmp_path / "0000:c1:00.0"
    monitor = folder / "hwmon" / "hwmon3"
    monitor.mkdir(parents=True)
    with pytest.raises(OSError, match="none of the files of amdgpu"):
        amd_view("0000:c1:00.0", tmp_path)
    (folder / "mem_info_vram_used").write_text(f"{2**31}\n")
    (folder / "gpu_busy_percent").write_text("7\n")
    (folder / "power_dpm_force_performance_level").write_text("auto\n")
    (monitor / "power1_cap").write_text("500000000\n")
    (monitor / "power1_cap_default").write_text("750000000\n")
    view = DriverView("0000:c1:00.0", 2**31, utilisation=0.07, power_limit_w=500.0, default_power_limit_w=750.0)
    assert amd_view("0000:c1:00.0", tmp_path) == view
    (folder / "power_dpm_force_performance_level").write_text("low\n")
    assert amd_view("0000:c1:00.0", tmp_path).slowed_by == ("performance level low",)


def test_what_this_machine_says():
    facts = gather()
    assert (facts.rank, facts.node, facts.pid) == (0, socket.gethostname(), os.getpid())
    assert facts.versions["torch"] == torch.__version__
    assert facts.versions["lightning_hetero"] == own_code()
    assert len(facts.devices) == facts.visible_devices == torch.cuda.device_count()
    assert facts.limits is not None
    assert 0 < facts.limits.open_files < 10_000
    space = os.statvfs("/dev/shm")
    assert facts.limits.shared_total_bytes == space.f_frsize * space.f_blocks
    if not facts.devices:
        assert facts.architectures == tuple(torch.cuda.get_arch_list())


def with_gpus(monkeypatch: pytest.MonkeyPatch, *uuids: str) -> None:
    """Torch sees GPUs with these UUIDs; the last one is of an older kind."""

    def properties(index: int) -> SimpleNamespace:
        return SimpleNamespace(
            name=f"GPU {index}",
            uuid=uuids[index],
            major=9 - index,
            minor=0,
            total_memory=2**36,
            gcnArchName="gfx942:sramecc+:xnack-",
            pci_domain_id=0,
            pci_bus_id=0xC1,
            pci_device_id=0,
        )

    def available() -> bool:
        warnings.warn("a driver's warning\nmore of it", UserWarning, stacklevel=1)
        return True

    monkeypatch.setattr(torch.cuda, "is_available", available)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(uuids))
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: ["sm_90"])
    monkeypatch.setattr(nvidia, "ask_driver", lambda: parse_report(REPORT))


def test_facts_of_nvidia_gpus(monkeypatch):
    with_gpus(monkeypatch, "aaaa-1", "cccc")
    monkeypatch.setattr(torch.version, "hip", None)
    facts = gather()
    first, second = facts.devices
    assert (first.index, first.kind, first.architecture, first.uuid) == (0, "cuda", "sm_90", "aaaa-1")
    assert (first.total_bytes, first.driver) == (2**36, FIRST)
    assert (second.architecture, second.driver) == ("sm_80", None)
    assert "nvidia-smi does not list cccc" in facts.unchecked["driver"]
    assert (facts.visible_devices, facts.driver_devices, facts.architectures) == (2, 2, ("sm_90",))
    assert facts.versions["driver"] == "580.65.06"
    assert facts.torch_says == ("a driver's warning",)


def test_a_rank_looks_at_its_own_gpu(monkeypatch):
    with_gpus(monkeypatch, "aaaa-1", "bbbb")
    monkeypatch.setattr(torch.version, "hip", None)
    own = gather(Place(3, 4, 1, "127.0.0.1", 29500), port=7)
    assert [device.uuid for device in own.devices] == ["bbbb"]
    assert (own.rank, own.local_rank, own.port, own.address) == (3, 1, 7, "127.0.0.1")
    crowded = gather(Place(3, 4, 2, "127.0.0.1", 29500))
    assert (crowded.devices, crowded.visible_devices) == ((), 2)


def test_a_gpu_that_cannot_be_looked_at(monkeypatch):
    with_gpus(monkeypatch, "aaaa-1")

    def broken(index: int) -> None:
        raise RuntimeError("CUDA error: device is busy\nmore of it")

    monkeypatch.setattr(torch.cuda, "get_device_properties", broken)
    facts = gather()
    assert (facts.devices, facts.unchecked["GPU 0"]) == ((), "CUDA error: device is busy")


def test_facts_of_amd_gpus(monkeypatch, tmp_path):
    with_gpus(monkeypatch, "dddd")
    monkeypatch.setattr(torch.version, "hip", "7.0")
    monkeypatch.setattr(amd, "amd_view", lambda address: amd_view(address, tmp_path))
    facts = gather()
    assert (facts.devices[0].kind, facts.devices[0].architecture) == ("rocm", "gfx942")
    assert "none of the files of amdgpu" in facts.unchecked["driver"]
    folder = tmp_path / "0000:c1:00.0"
    folder.mkdir()
    (folder / "gpu_busy_percent").write_text("50\n")
    assert gather().devices[0].driver == DriverView("0000:c1:00.0", utilisation=0.5)
    assert facts.versions["rocm"] == "7.0"
    assert "nccl" not in facts.versions
