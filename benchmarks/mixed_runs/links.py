"""Which link lies between two nodes, by the names in a file of runs.

``same_site`` is the speed between nodes of one site. ``with_X_site`` is the speed between a node with GPUs of type X,
which stand at a site of their own, and one at any other site. What crosses from site to site shares that one link.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from lightning_hetero.errors import HeteroError

SAME_SITE, _BEFORE, _AFTER = "same_site", "with_", "_site"


class SiteLinks:
    """The links between nodes.

    Args:
        bytes_per_s: speed of each, by name.

    Raises:
        HeteroError: listing names that say nothing.
    """

    def __init__(self, bytes_per_s: Mapping[str, float]) -> None:
        self._within = bytes_per_s.get(SAME_SITE)
        self._own_sites = {
            name.removeprefix(_BEFORE).removesuffix(_AFTER): speed
            for name, speed in bytes_per_s.items()
            if name.startswith(_BEFORE) and name.endswith(_AFTER)
        }
        strange = [
            name
            for name in bytes_per_s
            if name != SAME_SITE and not (name.startswith(_BEFORE) and name.endswith(_AFTER))
        ]
        if strange:
            raise HeteroError(
                f"measured_inter_node_bytes_per_s has {', '.join(strange)}: name links {SAME_SITE} or with_GPU_site"
            )

    def _site(self, gpu: str) -> str:
        return gpu if gpu in self._own_sites else ""

    def speed_bytes_per_s(self, one: str, other: str) -> float:
        """Between a node with GPUs of type ``one`` and another with ``other``.

        Raises:
            HeteroError: if it is not given.
        """
        if self._site(one) == self._site(other):
            if self._within is None:
                raise HeteroError(f"the speed between {one} and {other} is not given: add {SAME_SITE}")
            return self._within
        return min(self._own_sites[gpu] for gpu in (one, other) if gpu in self._own_sites)

    def name(self, one: str, other: str) -> str | None:
        """The link that messages from ``one`` to ``other`` share with others; within a site they share none."""
        start, end = self._site(one), self._site(other)
        return None if start == end else f"{start or 'other'} site to {end or 'other'} site"

    def ring(self, gpus: Iterable[str]) -> tuple[float, tuple[str, ...]]:
        """The slowest speed on a ring through nodes, and the links that it crosses, both ways."""
        nodes = list(gpus)
        pairs = [(a, b) for i, a in enumerate(nodes) for j, b in enumerate(nodes) if i != j]
        names = dict.fromkeys(name for a, b in pairs if (name := self.name(a, b)) is not None)
        return min(self.speed_bytes_per_s(a, b) for a, b in pairs), tuple(names)
