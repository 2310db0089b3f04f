"""What every rank really is: looked up and measured, never assumed. Behind ``Cluster.discover()``."""

from __future__ import annotations

import os
import platform
import socket
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist

from lightning_hetero.cluster import Cluster, Device, Link
from lightning_hetero.cluster.discovery import register
from lightning_hetero.cluster.peaks import preset_for
from lightning_hetero.errors import ClusterError, raise_all
from lightning_hetero.profiler.links import measure_links as measure_link_pair
from lightning_hetero.profiler.speed import MATMUL_DTYPES, matmul_flops_per_s

T = TypeVar("T")


@dataclass(frozen=True)
class LocalDevice:
    """A device as the process on it sees it.

    Args:
        name: what it calls itself ("NVIDIA H200"; the processor's model name on CPU).
        node: the machine's host name.
        total_bytes: all its memory.
        free_bytes: memory that this process may still use, what it holds already included; on CPU of the
            whole machine, to be divided by the ranks on it.
        is_cpu: whether it is the processor, which the ranks of a node share.
        uuid: its identifier, where it has one.
        speed_flops_per_s: measured matmul speed, ``None`` where not measured.
    """

    name: str
    node: str
    total_bytes: int
    free_bytes: int
    is_cpu: bool
    uuid: str | None = None
    speed_flops_per_s: float | None = None


def discover(
    *,
    dtype: str = "float32",
    measure_speed: bool = True,
    measure_links: bool = True,
    device: torch.device | None = None,
) -> Cluster:
    """Describe and measure the devices of all ranks, or without a process group the local ones.

    With an initialised default process group this is a collective: every rank measures its own device, at
    the same time as the others, since that is how they will run (the ranks of a node share its processor),
    and every rank returns the same cluster. Without one, the cluster has every local CUDA device, or the
    processor as one device; links are then ``None``.

    Args:
        dtype: torch's name of the dtype whose matmul speed is measured: one of "float64", "float32",
            "bfloat16", "float16". float32 runs as TF32 if torch is set so.
        measure_speed: whether to measure matmul speed; otherwise it is ``None``.
        measure_links: whether to measure links; otherwise they are ``None``.
        device: this rank's device; by default the current CUDA device if the process group (or, without
            one, this machine) has CUDA, else the processor.

    Returns:
        A cluster whose ``memory_bytes`` is *free* memory, divided on CPU by the ranks of the node, and whose
        ``type`` is the preset's name where the device is known, else the device's own name.

    Raises:
        ClusterError: for another ``dtype``, or naming every rank that could not be measured.
    """
    if dtype not in MATMUL_DTYPES:
        raise ClusterError(f"dtype is {dtype!r}: give one of {', '.join(MATMUL_DTYPES)}")
    torch_dtype = MATMUL_DTYPES[dtype] if measure_speed else None
    if not dist.is_initialized():
        ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        local = [_look(each, torch_dtype) for each in ([device] if device else _local_devices())]
        return _cluster(local, None, None, cpu_ranks=Counter({socket.gethostname(): ranks_here}))
    mine = device or _rank_device()
    # Everyone starts together, so that measured speeds are those of the ranks side by side.
    dist.barrier()
    every = _gather(lambda: _look(mine, torch_dtype))
    within, between = None, None
    if measure_links:
        within, between = measure_link_pair([each.node for each in every], mine)
    return _cluster(every, within, between, cpu_ranks=Counter(each.node for each in every))


def _cluster(local: list[LocalDevice], within: Link | None, between: Link | None, cpu_ranks: Counter[str]) -> Cluster:
    devices = []
    for each in local:
        free = each.free_bytes
        if each.is_cpu:
            # The ranks looked at different moments; the least that any saw is shared by all of them alike.
            free = min(other.free_bytes for other in local if other.node == each.node and other.is_cpu)
            free //= cpu_ranks[each.node]
        devices.append(
            Device(
                type=type_of(each.name),
                node=each.node,
                memory_bytes=max(free, 1),
                speed_flops_per_s=each.speed_flops_per_s,
                name=each.name,
                uuid=each.uuid,
            )
        )
    return Cluster("discovered", tuple(devices), within, between)


def type_of(name: str) -> str:
    """The type by which a device is planned: the preset's name where it is known, else what it calls itself."""
    preset = preset_for(name)
    return preset.type if preset else name


def look_at(device: torch.device) -> LocalDevice:
    """What a CUDA device or the processor is, without measuring its speed."""
    return _look(device, None)


def describe(device: torch.device) -> tuple[str, str]:
    """Type and own name of a CUDA device or the processor."""
    name = look_at(device).name
    return type_of(name), name


def free_bytes(device: torch.device) -> int:
    """Memory of a CUDA device or of the machine that this process may still use, in bytes."""
    return look_at(device).free_bytes


def _gather(look: Callable[[], T]) -> list[T]:
    """``look()`` of every rank, in rank order; an error on one rank is raised on all, so that none waits."""
    outcome: tuple[T | None, str]
    try:
        outcome = (look(), "")
    except Exception as error:
        outcome = (None, f"{type(error).__name__}: {error}")
    outcomes: list[tuple[T | None, str]] = [(None, "")] * dist.get_world_size()
    dist.all_gather_object(outcomes, outcome)
    problems = [
        f"rank {rank}: {problem}; see that its device works, or describe the cluster in a file"
        for rank, (_, problem) in enumerate(outcomes)
        if problem
    ]
    raise_all(ClusterError, "devices could not be measured", problems)
    return [value for value, _ in outcomes if value is not None]


def _rank_device() -> torch.device:
    on_cuda = torch.cuda.is_available() and "nccl" in dist.get_backend_config()
    return torch.device("cuda", torch.cuda.current_device()) if on_cuda else torch.device("cpu")


def _local_devices() -> list[torch.device]:
    if torch.cuda.is_available():
        return [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    return [torch.device("cpu")]


def _look(device: torch.device, dtype: torch.dtype | None) -> LocalDevice:
    """What the device is and, with a dtype, how fast it multiplies matrices."""
    # Free memory first: measuring takes some.
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        # What the allocator of this process has reserved counts as used there, but is ours to use.
        free += torch.cuda.memory_reserved(device)
        uuid = getattr(torch.cuda.get_device_properties(device), "uuid", None)
        name = torch.cuda.get_device_name(device)
    elif device.type == "cpu":
        (free, total), name, uuid = _machine_memory(), processor_name(), None
    else:
        raise ClusterError(f"device {device} is neither CUDA nor CPU: describe the cluster in a file")
    return LocalDevice(
        name=name,
        node=socket.gethostname(),
        total_bytes=total,
        free_bytes=free,
        is_cpu=device.type == "cpu",
        uuid=str(uuid) if uuid is not None else None,
        speed_flops_per_s=None if dtype is None else matmul_flops_per_s(device, dtype, free),
    )


def processor_name() -> str:
    """The processor's model name as the system gives it, else its architecture."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    models = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    named = [model for model in models if model and model != "unknown"]
    return (named[0] if named else "") or platform.processor() or platform.machine() or "cpu"


def _machine_memory(meminfo: Path = Path("/proc/meminfo"), cgroup: Path = Path("/sys/fs/cgroup")) -> tuple[int, int]:
    """(available, total) bytes of this machine, within the limit of its container if it has one."""
    try:
        fields = dict(line.split(":", 1) for line in meminfo.read_text().splitlines() if ":" in line)
        # The file says kB and means 1024 bytes.
        available, total = (int(fields[key].split()[0]) * 1024 for key in ("MemAvailable", "MemTotal"))
    except (OSError, KeyError, ValueError) as error:
        raise ClusterError(
            f"free memory cannot be read from {meminfo} ({error}): "
            f"describe the devices in a file and use Cluster.from_yaml(path)"
        ) from error
    try:
        limit, used = ((cgroup / name).read_text().strip() for name in ("memory.max", "memory.current"))
    except OSError:
        return available, total  # no control group of version 2
    if limit == "max":
        return available, total
    return max(min(available, int(limit) - int(used)), 0), min(total, int(limit))


register(discover)
