"""Energy of a machine's processors: RAPL, which Linux shows in sysfs for Intel's and AMD's."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path("/sys/class/powercap")

# The packages, and the memory beside them. Other parts (cores, uncore) are within a package, "psys" holds them all.
_TOP = re.compile(r"intel-rapl:\d+")
_PART = re.compile(r"intel-rapl:\d+:\d+")


class RaplSource:
    """The packages and memory of this machine, or the share of them that counts for one rank.

    The kernel counts microjoules up to ``max_energy_range_uj`` and begins anew: at some hundred watts after minutes, so
    it has to be asked more often (docs.kernel.org/power/powercap/powercap.html).

    Args:
        root: the folder of sysfs.
        share: of the energy that counts, 0 to 1.

    Raises:
        LookupError: there are no such counters.
        PermissionError: they may not be read.
    """

    def __init__(self, root: Path = ROOT, share: float = 1.0) -> None:
        self._share = share
        self._zones = _zones(root)
        if not self._zones:
            raise LookupError(
                f"the processor tells no energy: there is no intel-rapl in {root} (virtual machines and containers "
                "often lack it)"
            )
        try:
            self._ranges = {zone: int((zone / "max_energy_range_uj").read_text()) for zone in self._zones}
            self._last = {zone: self._read(zone) for zone in self._zones}
        except PermissionError as error:
            raise PermissionError(
                f"{error.filename} may not be read by this user: as administrator, "
                f"chmod a+r {root}/intel-rapl:*/energy_uj"
            ) from None
        self._microjoules = 0
        names = ", ".join(self._zones.values())
        self.label = f"RAPL, {names}" + (f", {share:.3g} of it for each rank of the machine" if share < 1 else "")

    @staticmethod
    def _read(zone: Path) -> int:
        return int((zone / "energy_uj").read_text())

    def joules(self) -> float:
        """Energy since the source was made, in joules."""
        for zone, last in self._last.items():
            now = self._read(zone)
            self._microjoules += now - last if now >= last else now - last + self._ranges[zone]
            self._last[zone] = now
        return self._microjoules / 1e6 * self._share

    def close(self) -> None:
        """Nothing is open."""


def _zones(root: Path) -> dict[Path, str]:
    """The folders to read, with what they are."""
    found = {}
    for folder in sorted(root.iterdir()) if root.is_dir() else []:
        try:
            name = (folder / "name").read_text(encoding="utf-8").strip()
        except OSError:
            continue
        is_package = _TOP.fullmatch(folder.name) and name.startswith("package")
        if is_package or (_PART.fullmatch(folder.name) and name == "dram"):
            found[folder] = name
    return found
