"""Check: clocks and power caps are at their defaults."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_hetero.doctor.devices import each_device
from lightning_hetero.doctor.facts import DeviceFacts, DriverView, RankFacts
from lightning_hetero.doctor.finding import Finding
from lightning_hetero.doctor.places import device_place

CHECK = "clocks"

_HOT = "see to its cooling and power supply: the driver slows it down to protect it"


def check_clocks(ranks: Sequence[RankFacts]) -> list[Finding]:
    """Devices with a power cap or clock below the default, and such as are slowed down now."""
    findings = []
    for facts, device in each_device(ranks):
        if device.driver is not None:
            where = device_place(facts, device)
            findings += [
                Finding("warning", CHECK, where, what, step) for what, step in _lowered(device, device.driver)
            ]
    return findings


def _lowered(device: DeviceFacts, driver: DriverView) -> list[tuple[str, str]]:
    found = []
    name = device.uuid or str(device.index)
    cap, default_cap = driver.power_limit_w, driver.default_power_limit_w
    if cap is not None and default_cap is not None and cap < default_cap:
        command = (
            f"nvidia-smi -i {name} -pl {default_cap:g}"
            if device.kind == "cuda"
            else f"amd-smi reset --gpu {device.index} --power-cap"
        )
        found.append(
            (
                f"its power is capped at {cap:g} W, {cap / default_cap:.0%} of the default {default_cap:g} W: it is "
                "slower than its type under load",
                f"as administrator: {command}; or leave it, and let its measured speed count",
            )
        )
    clock, default_clock = driver.clock_mhz, driver.default_clock_mhz
    if clock is not None and default_clock is not None and clock < default_clock:
        found.append(
            (
                f"its clock for applications is {clock:g} MHz, the default is {default_clock:g} MHz",
                f"as administrator: nvidia-smi -i {name} -rac; or leave it, and let its measured speed count",
            )
        )
    if driver.slowed_by:
        found.append((f"it is slowed down now: {', '.join(driver.slowed_by)}", _HOT))
    return found
