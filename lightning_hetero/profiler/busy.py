"""Who else uses a device: its memory is not there for a plan."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from lightning_hetero.profiler.devices import look_at
from lightning_hetero.units import format_bytes

BUSY = 0.05
"""share of a device's memory that others hold from which on it is called busy"""

_NAMED = 4
_TIMEOUT_S = 20.0
_QUERY = ("--query-compute-apps=gpu_uuid,pid,process_name,used_memory", "--format=csv,noheader,nounits")


@dataclass(frozen=True)
class DeviceUser:
    """A process on a device.

    Args:
        pid: of the process, as the driver sees it; in a container that may be another number than inside.
        name: of its program.
        memory_bytes: that it holds there; ``None`` where the driver does not say.
    """

    pid: int
    name: str
    memory_bytes: int | None


@dataclass(frozen=True)
class DeviceUse:
    """How much of a device is taken.

    Args:
        total_bytes: all its memory.
        free_bytes: what this process may still use.
        users: other processes on it; empty for the processor, and where no tool names them.
    """

    total_bytes: int
    free_bytes: int
    users: tuple[DeviceUser, ...] = ()

    @property
    def taken_bytes(self) -> int:
        """Memory that others hold, the driver included."""
        return max(0, self.total_bytes - self.free_bytes)


def device_use(device: torch.device) -> DeviceUse:
    """Memory of a CUDA device or of this machine, and the other processes on it.

    The processes are those that ``nvidia-smi`` lists, where it is installed.

    Raises:
        ClusterError: if ``device`` is neither.
    """
    found = look_at(device)
    users = () if found.is_cpu or found.uuid is None else users_of(found.uuid)
    return DeviceUse(found.total_bytes, found.free_bytes, users)


def users_of(uuid: str, tool: str = "nvidia-smi") -> tuple[DeviceUser, ...]:
    """Other processes on the device with this UUID, largest first; none where ``tool`` cannot say."""
    path = shutil.which(tool)
    if path is None:
        return ()
    try:
        listed = subprocess.run([path, *_QUERY], capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ()
    return parse_users(listed.stdout.splitlines(), uuid) if listed.returncode == 0 else ()


def parse_users(lines: Sequence[str], uuid: str) -> tuple[DeviceUser, ...]:
    """What ``nvidia-smi`` lists for one device, without this process: ``uuid, pid, name, MiB`` a line."""
    users = []
    for line in lines:
        # a program's name may hold commas
        owner, _, rest = line.partition(",")
        pid, _, rest = rest.strip().partition(",")
        name, _, mebibytes = rest.rpartition(",")
        if _bare(owner) != _bare(uuid) or not pid.strip().isdigit() or int(pid) == os.getpid():
            continue
        size = mebibytes.strip()
        users.append(DeviceUser(int(pid), name.strip(), int(size) * 2**20 if size.isdigit() else None))
    return tuple(sorted(users, key=lambda user: -(user.memory_bytes or 0)))


def _bare(uuid: str) -> str:
    """Torch prints a UUID without the driver's prefix."""
    return uuid.strip().removeprefix("GPU-").lower()


def users_text(users: Sequence[DeviceUser]) -> str:
    """``, by python (process 7, 256 MiB), 2 more``; empty without users."""
    named = [
        f"{user.name} (process {user.pid}"
        + (f", {format_bytes(user.memory_bytes)})" if user.memory_bytes is not None else ")")
        for user in users[:_NAMED]
    ]
    if len(users) > _NAMED:
        named.append(f"{len(users) - _NAMED} more")
    return f", by {', '.join(named)}" if named else ""
