"""What every rank sees of its machine: plain data, so that machines that nobody has at hand can be checked in tests."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal

from lightning_hetero.profiler.busy import DeviceUser


def known(cls: Any, data: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a dataclass has fields for: ranks may run other versions of this package, which is to be found."""
    names = {each.name for each in fields(cls)}
    return {name: value for name, value in data.items() if name in names}


@dataclass(frozen=True)
class DriverView:
    """A GPU as its driver sees it; every value is ``None`` where the driver does not say.

    Args:
        uuid: identifier; of an AMD GPU its PCI address.
        taken_bytes: memory in use, before this process used any.
        users: processes on it, before this one was.
        utilisation: share of the last moment in which it computed, 0 to 1.
        power_limit_w: power cap in force, in watts.
        default_power_limit_w: power cap that it comes with, in watts.
        clock_mhz: clock that applications are given, in MHz.
        default_clock_mhz: clock that they are given by default, in MHz.
        slowed_by: reasons why it is slowed down now ("hw_thermal_slowdown").
        mode: who may use it ("Default", "Exclusive_Process", "Prohibited").
    """

    uuid: str
    taken_bytes: int | None = None
    users: tuple[DeviceUser, ...] = ()
    utilisation: float | None = None
    power_limit_w: float | None = None
    default_power_limit_w: float | None = None
    clock_mhz: float | None = None
    default_clock_mhz: float | None = None
    slowed_by: tuple[str, ...] = ()
    mode: str | None = None

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> DriverView:
        """The inverse of ``dataclasses.asdict``."""
        users = tuple(DeviceUser(**known(DeviceUser, user)) for user in data.get("users", ()))
        return cls(**{**known(cls, data), "users": users, "slowed_by": tuple(data.get("slowed_by", ()))})


@dataclass(frozen=True)
class DeviceFacts:
    """A GPU of a rank.

    Args:
        index: its number in this process.
        name: what it calls itself ("NVIDIA H200").
        kind: "cuda" or "rocm".
        architecture: what it executes: "sm_90", "gfx942".
        uuid: its identifier, where it has one.
        total_bytes: all its memory.
        driver: what its driver says of it; ``None`` where nothing could be asked.
    """

    index: int
    name: str
    kind: Literal["cuda", "rocm"]
    architecture: str
    uuid: str | None
    total_bytes: int
    driver: DriverView | None = None

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> DeviceFacts:
        """The inverse of ``dataclasses.asdict``."""
        driver = data.get("driver")
        return cls(**{**known(cls, data), "driver": None if driver is None else DriverView.from_dict(driver)})


@dataclass(frozen=True)
class LimitFacts:
    """What the system allows this process.

    Args:
        open_files: files that it has open.
        open_files_soft: how many it may have; ``None`` without a limit.
        open_files_hard: how far it may raise that itself; ``None`` without a limit.
        shared_total_bytes: size of ``/dev/shm``; ``None`` where there is none.
        shared_free_bytes: free space there.
        cores: processor cores that it may use.
    """

    open_files: int
    open_files_soft: int | None
    open_files_hard: int | None
    shared_total_bytes: int | None
    shared_free_bytes: int | None
    cores: int


@dataclass(frozen=True)
class RankFacts:
    """What one rank sees.

    Args:
        rank: the rank; 0 when alone.
        node: name of its machine.
        local_rank: its number on the machine.
        pid: of its process.
        versions: by what ("torch", "nccl", "driver"), what is installed; nothing where it is not.
        architectures: what torch was built for (``torch.cuda.get_arch_list()``).
        devices: its own GPU; alone, all of the machine's.
        visible_devices: GPUs that torch sees in this process.
        driver_devices: GPUs that the machine's driver lists; ``None`` where it cannot be asked.
        torch_says: warnings of torch's when it looked for GPUs.
        limits: what the system allows; ``None`` where that could not be read.
        address: the one from which the rendezvous is reached.
        own_address: what the machine's own name resolves to there; ``None`` where it does not.
        port: where it listens for its peers.
        environment: the variables that choose devices and interfaces, where they are set.
        unchecked: by what could not be looked at, why.
    """

    rank: int
    node: str
    local_rank: int = 0
    pid: int = 0
    versions: Mapping[str, str] = field(default_factory=dict)
    architectures: tuple[str, ...] = ()
    devices: tuple[DeviceFacts, ...] = ()
    visible_devices: int = 0
    driver_devices: int | None = None
    torch_says: tuple[str, ...] = ()
    limits: LimitFacts | None = None
    address: str | None = None
    own_address: str | None = None
    port: int | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    unchecked: Mapping[str, str] = field(default_factory=dict)

    @property
    def has_gpu(self) -> bool:
        """Whether this rank has a GPU."""
        return bool(self.devices)

    def to_dict(self) -> dict[str, Any]:
        """The facts as JSON has them."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> RankFacts:
        """The inverse of :meth:`to_dict`, also after JSON."""
        limits = data.get("limits")
        return cls(
            **{
                **known(cls, data),
                "architectures": tuple(data.get("architectures", ())),
                "torch_says": tuple(data.get("torch_says", ())),
                "devices": tuple(DeviceFacts.from_dict(device) for device in data.get("devices", ())),
                "limits": None if limits is None else LimitFacts(**known(LimitFacts, limits)),
            }
        )
