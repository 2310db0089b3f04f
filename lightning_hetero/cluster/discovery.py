"""Where the measuring layer plugs in: this layer knows no torch, so it cannot look at devices itself.

``lightning_hetero.profiler.devices`` registers its function here when it is imported, and
``Cluster.discover()`` calls whatever is registered.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from lightning_hetero.errors import ClusterError

if TYPE_CHECKING:
    from lightning_hetero.cluster.cluster import Cluster


class Discoverer(Protocol):
    """Looks at the devices of all ranks; see ``lightning_hetero.profiler.devices.discover``."""

    def __call__(self, *, dtype: str, measure_speed: bool, measure_links: bool) -> Cluster: ...


_registered: Discoverer | None = None


def register(discoverer: Discoverer) -> None:
    """Make ``discoverer`` the function that ``Cluster.discover()`` calls, replacing an earlier one."""
    global _registered
    _registered = discoverer


def discoverer() -> Discoverer:
    """The registered function.

    Raises:
        ClusterError: if nothing that can look at devices was imported.
    """
    if _registered is None:
        raise ClusterError(
            "no device can be looked at: the part that measures devices needs torch and was not imported; "
            "install torch and `import lightning_hetero` (or `import lightning_hetero.profiler.devices`), "
            "or describe the devices in a file and use Cluster.from_yaml(path)"
        )
    return _registered
