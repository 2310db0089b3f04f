"""What NVIDIA's driver says of its GPUs: the report of ``nvidia-smi``, which comes with it."""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import dataclass
from xml.etree import ElementTree

from lightning_hetero.doctor.facts import DriverView
from lightning_hetero.profiler.busy import DeviceUser

_TIMEOUT_S = 60.0
_NUMBER = re.compile(r"[\d.]+")
_POWER = ("gpu_power_readings", "power_readings")  # from driver 535 on, and before
_LIMIT = ("current_power_limit", "power_limit")
_REASONS = (("clocks_event_reasons", "clocks_event_reason_"), ("clocks_throttle_reasons", "clocks_throttle_reason_"))
# what slows a device down against its will; the others are caps and settings, told from their values, or idleness
_SLOWING = ("hw_slowdown", "hw_thermal_slowdown", "hw_power_brake_slowdown", "sw_thermal_slowdown")


@dataclass(frozen=True)
class DriverReport:
    """What a driver says.

    Args:
        version: the driver's.
        devices: by UUID, without its prefix.
    """

    version: str | None
    devices: dict[str, DriverView]

    def of(self, uuid: str | None) -> DriverView | None:
        """What it says of a device."""
        return None if uuid is None else self.devices.get(bare(uuid))


def ask_driver(tool: str = "nvidia-smi") -> DriverReport:
    """Ask for the whole report.

    Raises:
        OSError: the tool is not there, fails, or says nothing that can be read; with the reason.
    """
    path = shutil.which(tool)
    if path is None:
        raise OSError(f"{tool} is not installed")
    try:
        said = subprocess.run([path, "-q", "-x"], capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        raise OSError(f"{tool} did not answer within {_TIMEOUT_S:g} s") from None
    if said.returncode != 0:
        words = (said.stdout + said.stderr).strip().splitlines()
        raise OSError(f"{tool} failed ({words[-1] if words else f'status {said.returncode}'})")
    return parse_report(said.stdout)


def parse_report(text: str) -> DriverReport:
    """Read what ``nvidia-smi -q -x`` writes; what a driver leaves out or does not know is ``None``.

    Raises:
        OSError: it is no such report.
    """
    try:
        root = ElementTree.fromstring(text)
    except ElementTree.ParseError as error:
        raise OSError(f"the report of nvidia-smi cannot be read ({error})") from None
    devices = {}
    for gpu in root.findall("gpu"):
        uuid = gpu.findtext("uuid")
        if uuid:
            devices[bare(uuid)] = _view(gpu, uuid.strip())
    return DriverReport(root.findtext("driver_version"), devices)


def _view(gpu: ElementTree.Element, uuid: str) -> DriverView:
    taken, percent = _number(gpu, "fb_memory_usage/used"), _number(gpu, "utilization/gpu_util")
    limits = [_number(gpu, f"{readings}/{limit}") for readings in _POWER for limit in _LIMIT]
    defaults = [_number(gpu, f"{readings}/default_power_limit") for readings in _POWER]
    active = [
        reason
        for group, prefix in _REASONS
        for reason in _SLOWING
        if (gpu.findtext(f"{group}/{prefix}{reason}") or "").strip() == "Active"
    ]
    return DriverView(
        uuid=uuid,
        taken_bytes=None if taken is None else int(taken * 2**20),
        users=tuple(_user(each) for each in gpu.findall("processes/process_info") if each.findtext("type") != "G"),
        utilisation=None if percent is None else percent / 100,
        power_limit_w=_first(limits),
        default_power_limit_w=_first(defaults),
        clock_mhz=_number(gpu, "applications_clocks/graphics_clock"),
        default_clock_mhz=_number(gpu, "default_applications_clocks/graphics_clock"),
        slowed_by=tuple(dict.fromkeys(active)),
        mode=gpu.findtext("compute_mode"),
    )


def _user(process: ElementTree.Element) -> DeviceUser:
    held = _number(process, "used_memory")
    pid = _number(process, "pid")
    return DeviceUser(
        int(pid or 0), process.findtext("process_name") or "a process", None if held is None else int(held * 2**20)
    )


def _number(parent: ElementTree.Element, path: str) -> float | None:
    """``700.00 W`` as 700.0; ``N/A`` and the like as ``None``."""
    match = _NUMBER.match((parent.findtext(path) or "").strip())
    return None if match is None else float(match[0])


def _first(values: list[float | None]) -> float | None:
    return next((value for value in values if value is not None), None)


def bare(uuid: str) -> str:
    """A UUID as torch prints it, without the driver's prefix."""
    return uuid.strip().removeprefix("GPU-").lower()
