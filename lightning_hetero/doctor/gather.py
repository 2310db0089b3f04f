"""Gather this rank's facts: every look that fails is noted with its reason, and none stops the others."""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import platform
import resource
import socket
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from lightning_hetero.doctor import amd, nvidia
from lightning_hetero.doctor.facts import DeviceFacts, DriverView, LimitFacts, RankFacts
from lightning_hetero.doctor.nvidia import DriverReport
from lightning_hetero.doctor.place import Place
from lightning_hetero.profiler.power_gpu import pci_address

_VARIABLES = (
    "CUDA_VISIBLE_DEVICES",
    "HIP_VISIBLE_DEVICES",
    "ROCR_VISIBLE_DEVICES",
    "NCCL_SOCKET_IFNAME",
    "GLOO_SOCKET_IFNAME",
    "NCCL_IB_DISABLE",
    "NCCL_P2P_DISABLE",
)
_SHARED = Path("/dev/shm")
_OPEN = Path("/proc/self/fd")


def gather(place: Place | None = None, port: int | None = None) -> RankFacts:
    """Return this rank's facts.

    Args:
        place: of this rank among the others; alone, all GPUs of the machine are looked at.
        port: where this rank listens for its peers.
    """
    unchecked: dict[str, str] = {}
    # before torch looks at the GPUs, so that this process is not found on them
    report = _driver_report(unchecked)
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        visible = torch.cuda.device_count() if torch.cuda.is_available() else 0
        devices = _devices(place, visible, report, unchecked)
    facts = RankFacts(
        rank=0 if place is None else place.rank,
        node=socket.gethostname(),
        local_rank=0 if place is None else place.local_rank,
        pid=os.getpid(),
        versions=versions(report),
        architectures=tuple(torch.cuda.get_arch_list()),
        devices=devices,
        visible_devices=visible,
        driver_devices=None if report is None else len(report.devices),
        torch_says=tuple(dict.fromkeys(str(each.message).strip().splitlines()[0] for each in heard)),
        limits=_limits(unchecked),
        own_address=_own_address(),
        port=port,
        environment={name: os.environ[name] for name in _VARIABLES if name in os.environ},
        unchecked=unchecked,
    )
    return facts if place is None else replace(facts, address=_address_towards(place.host, place.port))


def _driver_report(unchecked: dict[str, str]) -> DriverReport | None:
    try:
        return nvidia.ask_driver()
    except OSError as error:
        if torch.version.hip is None:
            unchecked["driver"] = str(error)
        return None


def versions(report: DriverReport | None = None) -> dict[str, str]:
    """What is installed here, by name; what is not is left out.

    Args:
        report: of NVIDIA's driver.
    """
    found: dict[str, str | None] = {
        "lightning_hetero": own_code(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "lightning": _installed("lightning") or _installed("pytorch-lightning"),
        "cuda": torch.version.cuda,
        "rocm": torch.version.hip,
        "rccl" if torch.version.hip else "nccl": _nccl(),
        "driver": None if report is None else report.version,
    }
    if torch.version.hip:
        try:
            found["amdgpu"] = amd.DRIVER_VERSION.read_text(encoding="utf-8").strip()
        except OSError:
            found["amdgpu"] = None  # in the kernel itself, which has no version of its own
    return {name: str(version) for name, version in found.items() if version}


def own_code() -> str:
    """Return this package's version with a digest of its source: checkouts of one version may differ."""
    root = Path(__file__).parents[1]
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes())
    return f"{_installed('lightning-hetero') or 'not installed'}, code {digest.hexdigest()[:12]}"


def _installed(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _nccl() -> str | None:
    try:
        return ".".join(str(part) for part in torch.cuda.nccl.version())  # type: ignore[no-untyped-call]
    except (AttributeError, RuntimeError):
        return None  # built without it


def _devices(
    place: Place | None, visible: int, report: DriverReport | None, unchecked: dict[str, str]
) -> tuple[DeviceFacts, ...]:
    if place is None:
        indices = list(range(visible))
    else:
        indices = [place.local_rank] if place.local_rank < visible else []
    found = []
    for index in indices:
        try:
            found.append(_device(index, report, unchecked))
        except RuntimeError as error:  # torch's, of whatever goes wrong on a GPU
            unchecked[f"GPU {index}"] = str(error).strip().splitlines()[0]
    return tuple(found)


def _device(index: int, report: DriverReport | None, unchecked: dict[str, str]) -> DeviceFacts:
    properties: Any = torch.cuda.get_device_properties(index)
    uuid = getattr(properties, "uuid", None)
    driver: DriverView | None = None
    if torch.version.hip:
        try:
            driver = amd.amd_view(pci_address(properties))
        except (LookupError, OSError) as error:
            unchecked["driver"] = str(error)
    elif report is not None:
        driver = report.of(str(uuid))
        if driver is None:
            unchecked["driver"] = f"nvidia-smi does not list {uuid}, which may be a part of a GPU (MIG)"
    return DeviceFacts(
        index=index,
        name=properties.name,
        kind="rocm" if torch.version.hip else "cuda",
        architecture=(
            properties.gcnArchName.split(":")[0] if torch.version.hip else f"sm_{properties.major}{properties.minor}"
        ),
        uuid=None if uuid is None else str(uuid),
        total_bytes=properties.total_memory,
        driver=driver,
    )


def _limits(unchecked: dict[str, str]) -> LimitFacts | None:
    try:
        soft, hard = (
            None if limit == resource.RLIM_INFINITY else limit for limit in resource.getrlimit(resource.RLIMIT_NOFILE)
        )
        open_files = len(list(_OPEN.iterdir()))
    except OSError as error:
        unchecked["limits"] = f"{_OPEN} cannot be read ({error.strerror})"
        return None
    total = free = None
    if _SHARED.is_dir():
        space = os.statvfs(_SHARED)
        total, free = space.f_frsize * space.f_blocks, space.f_frsize * space.f_bavail
    return LimitFacts(open_files, soft, hard, total, free, _cores())


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _own_address() -> str | None:
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError:
        return None


def _address_towards(host: str, port: int) -> str | None:
    """The address of the interface over which a host is reached; nothing is sent."""
    try:
        family, kind, _, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(where)
            return str(probe.getsockname()[0])
    except OSError:
        return None
