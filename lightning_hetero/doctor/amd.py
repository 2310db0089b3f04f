"""What AMD's driver says of its GPUs: the files of ``amdgpu`` in sysfs, which need no tool.

docs.kernel.org/gpu/amdgpu/driver-misc.html and thermal.html describe them; powers are in microwatts.
"""

from __future__ import annotations

from pathlib import Path

from lightning_hetero.doctor.facts import DriverView

PCI = Path("/sys/bus/pci/devices")
DRIVER_VERSION = Path("/sys/module/amdgpu/version")


def amd_view(address: str, root: Path = PCI) -> DriverView:
    """What the driver says of the GPU at a PCI address.

    Args:
        address: as "0000:c1:00.0".
        root: where devices are listed.

    Raises:
        OSError: there is no such device, or its driver says nothing of it.
    """
    folder = root / address
    taken, busy = _number(folder / "mem_info_vram_used"), _number(folder / "gpu_busy_percent")
    monitors = sorted(folder.glob("hwmon/hwmon*"))
    caps = [_number(each / "power1_cap") for each in monitors]
    defaults = [_number(each / "power1_cap_default") for each in monitors]
    values = [taken, busy, *caps, *defaults]
    if all(value is None for value in values):
        raise OSError(f"{folder} has none of the files of amdgpu that may be read")
    level = _text(folder / "power_dpm_force_performance_level")
    held_low = () if level in (None, "auto", "high", "perf_determinism") else (f"performance level {level}",)
    return DriverView(
        uuid=address,
        taken_bytes=taken,
        utilisation=None if busy is None else busy / 100,
        power_limit_w=_watts(caps),
        default_power_limit_w=_watts(defaults),
        slowed_by=held_low,
    )


def _watts(microwatts: list[int | None]) -> float | None:
    return next((value / 1e6 for value in microwatts if value is not None), None)


def _number(path: Path) -> int | None:
    text = _text(path)
    return int(text) if text is not None and text.isdigit() else None


def _text(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:
        return None
