"""What drivers say of their GPUs, read from what they write; and what this machine says of itself."""

from __future__ import annotations

import os
import socket
import stat

import pytest
import torch

from lightning_hetero.doctor import DriverView
from lightning_hetero.doctor.amd import amd_view
from lightning_hetero.doctor.gather import gather, own_code
from lightning_hetero.doctor.nvidia import ask_driver, parse_report
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
