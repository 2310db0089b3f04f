"""Check: nobody else uses the devices."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_hetero.doctor.devices import each_device
from lightning_hetero.doctor.facts import DriverView, RankFacts
from lightning_hetero.doctor.finding import Finding
from lightning_hetero.doctor.places import device_place
from lightning_hetero.profiler.busy import BUSY, DeviceUser, users_text
from lightning_hetero.units import format_bytes

CHECK = "busy"

BUSY_UTILISATION = 0.1
"""share of the last moment from which on a device is called busy: a driver's own sampling shows a few percent"""

_STEP = "end those processes, or wait for them; plans take the memory that is free and the speed measured meanwhile"


def check_busy(ranks: Sequence[RankFacts]) -> list[Finding]:
    """Devices on which other processes are, hold memory, or compute."""
    own = {(facts.node, facts.pid) for facts in ranks}
    findings = []
    for facts, device in each_device(ranks):
        if device.driver is None:
            continue
        others = [user for user in device.driver.users if (facts.node, user.pid) not in own]
        signs = _signs(device.driver, others, device.total_bytes)
        if signs:
            where = device_place(facts, device)
            findings.append(Finding("warning", CHECK, where, f"busy: {'; '.join(signs)}", _STEP))
    return findings


def _signs(driver: DriverView, users: Sequence[DeviceUser], total_bytes: int) -> list[str]:
    signs = []
    taken = driver.taken_bytes
    if users or (taken is not None and taken > BUSY * total_bytes):
        held = "memory" if taken is None else f"{format_bytes(taken)} of {format_bytes(total_bytes)}"
        signs.append(f"{held} taken{users_text(users)}")
    if driver.utilisation is not None and driver.utilisation > BUSY_UTILISATION:
        signs.append(f"computing {driver.utilisation:.0%} of the last moment")
    return signs
