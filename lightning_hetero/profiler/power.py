"""Energy that this rank's device takes: what can tell it, and a meter that reads it.

Where there is no source the reason is said, and nothing is reported: never a zero.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Protocol

import torch

from lightning_hetero.errors import HeteroError
from lightning_hetero.profiler.power_gpu import AmdSmiSource, NvmlSource, pci_address
from lightning_hetero.profiler.power_rapl import RaplSource

PERIOD_S = 0.1
"""seconds between readings: drivers refresh power at about this pace, and no counter wraps within it"""

_PACKAGES = {"pynvml": "nvidia-ml-py", "amdsmi": "amdsmi, which comes with ROCm"}


@dataclass(frozen=True)
class Reading:
    """A meter's reading.

    Args:
        joules: energy since the source was made.
        at_s: when, by ``time.monotonic``.
    """

    joules: float
    at_s: float


class PowerSource(Protocol):
    """Tells the energy of a device, or of the part of it that counts for this rank."""

    @property
    def label(self) -> str:
        """What is measured, and by what: "RAPL, package-0"."""

    def joules(self) -> float:
        """Energy in joules since the source was made; asked every period, by one thread at a time."""

    def close(self) -> None:
        """Let go of the library behind it."""


class NoPowerSourceError(HeteroError):
    """Nothing can tell this device's power, for the reason given."""


def find_source(device: torch.device, ranks_here: int = 1) -> PowerSource:
    """The source for a rank's device.

    Args:
        device: NVIDIA GPUs are read by NVML (package ``nvidia-ml-py``), AMD GPUs by amdsmi, the processor by RAPL.
        ranks_here: ranks on this machine: they share its processor, whose energy is divided evenly among them.

    Raises:
        NoPowerSourceError: there is none, with the reason and what to do.
    """
    if device.type not in ("cpu", "cuda"):
        raise NoPowerSourceError(f"nothing is known that tells the power of a device of type {device.type!r}")
    try:
        return _source(device, ranks_here)
    except ImportError as error:
        package = _PACKAGES.get(error.name or "", str(error.name))
        raise NoPowerSourceError(f"the module {error.name} is not there: install {package}") from None
    except (LookupError, OSError) as error:  # our own, which say what to do
        raise NoPowerSourceError(str(error)) from error
    except Exception as error:  # the libraries', which derive from Exception alone
        raise NoPowerSourceError(f"{type(error).__name__}: {error}") from error


def _source(device: torch.device, ranks_here: int) -> PowerSource:
    if device.type == "cpu":
        return RaplSource(share=1 / ranks_here)
    properties: Any = torch.cuda.get_device_properties(device)
    if torch.version.hip:
        return AmdSmiSource(import_module("amdsmi"), pci_address(properties))
    return NvmlSource(import_module("pynvml"), f"GPU-{properties.uuid}")


class EnergyMeter:
    """Reads a source in a thread of its own, so that no counter wraps unseen and power is integrated finely.

    Args:
        source: what is read; closed at the end.
        period_s: seconds between readings.
    """

    def __init__(self, source: PowerSource, period_s: float = PERIOD_S) -> None:
        self.source = source
        self._period_s = period_s
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._last: Reading | None = None
        self._problem: Exception | None = None
        self._thread: threading.Thread | None = None

    @property
    def problem(self) -> str | None:
        """What went wrong with the source, which is not read any more; ``None`` while all is well."""
        return None if self._problem is None else f"{type(self._problem).__name__}: {self._problem}"

    def start(self) -> None:
        """Begin to read."""
        self._thread = threading.Thread(target=self._run, name="lightning-hetero energy", daemon=True)
        self._thread.start()

    def read(self) -> Reading | None:
        """Energy up to now, or up to the end; ``None`` once the source has failed."""
        with self._lock:
            if self._problem is None and not self._ended.is_set():
                try:
                    began_s = time.monotonic()
                    joules = self.source.joules()
                    self._last = Reading(joules, (began_s + time.monotonic()) / 2)
                except Exception as error:  # a driver may go at any time; training goes on
                    self._problem = error
            return None if self._problem is not None else self._last

    def stop(self) -> None:
        """Read a last time, end the thread and close the source; calling it again changes nothing."""
        if self._ended.is_set():
            return
        self.read()
        self._ended.set()
        if self._thread is not None:
            self._thread.join()
        self.source.close()

    def _run(self) -> None:
        while not self._ended.wait(self._period_s):
            self.read()
