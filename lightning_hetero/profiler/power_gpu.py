"""Energy of a GPU, as NVML and amdsmi tell it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

_UNKNOWN = 2**32 - 1  # amdsmi fills fields that a device does not have with it
_SOCKET_POWER = ("socket_power", "current_socket_power", "average_socket_power")


class Integrated:
    """Energy from readings of power: the mean of two neighbouring ones, times the time between them.

    Args:
        watts: reads the power, in W.
        clock: seconds.
    """

    def __init__(self, watts: Callable[[], float], clock: Callable[[], float] = time.monotonic) -> None:
        self._watts = watts
        self._clock = clock
        self._joules = 0.0
        self._last = (clock(), watts())

    def joules(self) -> float:
        """Energy since the first reading, in joules."""
        now_s, watts = self._clock(), self._watts()
        last_s, last_watts = self._last
        self._joules += (now_s - last_s) * (watts + last_watts) / 2
        self._last = (now_s, watts)
        return self._joules


class NvmlSource:
    """An NVIDIA GPU: the driver's own counter of energy (Volta and newer), else its power, integrated.

    Args:
        nvml: the module ``pynvml`` of the package ``nvidia-ml-py``.
        uuid: of the GPU, with its prefix ("GPU-...").
        clock: seconds.
    """

    def __init__(self, nvml: Any, uuid: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._nvml = nvml
        nvml.nvmlInit()
        try:
            self._handle = nvml.nvmlDeviceGetHandleByUUID(uuid)
            self._integrated: Integrated | None = None
            try:
                self._first_mj = int(nvml.nvmlDeviceGetTotalEnergyConsumption(self._handle))
            except nvml.NVMLError:
                self._integrated = Integrated(lambda: nvml.nvmlDeviceGetPowerUsage(self._handle) / 1e3, clock)
        except BaseException:
            nvml.nvmlShutdown()
            raise
        counted = "its counter of energy" if self._integrated is None else "its power, integrated"
        self.label = f"NVML, {uuid}, {counted}"

    def joules(self) -> float:
        """Energy since the source was made, in joules."""
        if self._integrated is not None:
            return self._integrated.joules()
        return (int(self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._handle)) - self._first_mj) / 1e3

    def close(self) -> None:
        """Let go of NVML."""
        self._nvml.nvmlShutdown()


class AmdSmiSource:
    """An AMD GPU: the power of its socket, integrated.

    Args:
        amdsmi: the module.
        address: of the GPU on the PCI bus ("0000:c1:00.0").
        clock: seconds.

    Raises:
        LookupError: no GPU has this address, or its power is not told.
    """

    def __init__(self, amdsmi: Any, address: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._amdsmi = amdsmi
        amdsmi.amdsmi_init()
        try:
            handles = amdsmi.amdsmi_get_processor_handles()
            own = [each for each in handles if str(amdsmi.amdsmi_get_gpu_device_bdf(each)).lower() == address.lower()]
            if not own:
                raise LookupError(f"amdsmi knows no GPU at {address}")
            self._handle = own[0]
            self._integrated = Integrated(self._watts, clock)
        except BaseException:
            amdsmi.amdsmi_shut_down()
            raise
        self.label = f"amdsmi, GPU at {address}, its power, integrated"

    def _watts(self) -> float:
        told = self._amdsmi.amdsmi_get_power_info(self._handle)
        for name in _SOCKET_POWER:
            value = told.get(name)
            # a field that the device does not have is "N/A"
            if isinstance(value, (int, float)) and 0 < value < _UNKNOWN:
                return float(value)
        raise LookupError(f"amdsmi does not tell this GPU's power ({told})")

    def joules(self) -> float:
        """Energy since the source was made, in joules."""
        return self._integrated.joules()

    def close(self) -> None:
        """Let go of amdsmi."""
        self._amdsmi.amdsmi_shut_down()


def pci_address(properties: Any) -> str:
    """A GPU's address as drivers and sysfs write it ("0000:c1:00.0"), from ``get_device_properties``.

    Raises:
        LookupError: this torch does not tell it.
    """
    parts = [getattr(properties, f"pci_{part}_id", None) for part in ("domain", "bus", "device")]
    numbers = [int(part) for part in parts if part is not None]
    if len(numbers) < len(parts):
        raise LookupError("this torch does not tell a GPU's PCI address: use a newer one")
    domain, bus, slot = numbers
    return f"{domain:04x}:{bus:02x}:{slot:02x}.0"
