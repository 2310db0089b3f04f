"""Check: clocks and power caps are at their defaults."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from lightning_hetero.doctor.devices import each_device
from lightning_hetero.doctor.facts import DeviceFacts, DriverView, RankFacts
from lightning_hetero.doctor.finding import Finding
from lightning_hetero.doctor.places import device_place

CHECK = "clocks"

_OR_LEAVE = "or leave it, and let its measured speed count"
_HOT = "see to its cooling and power supply: the driver slows it down to protect it"
_LEVEL = "let the driver choose: echo auto into power_dpm_force_performance_level"


def check_clocks(ranks: Sequence[RankFacts]) -> list[Finding]:
    """Devices with a power cap or clock below the default, and such as are slowed down now."""
    findings = []
    for facts, device in each_device(ranks):
        if device.driver is not None:
            where = device_place(facts, device)
            lowered = _lowered(device, device.driver)
            findings += [Finding("warning", CHECK, where, what, step) for what, step in lowered]
    return findings


def _lowered(device: DeviceFacts, driver: DriverView) -> Iterator[tuple[str, str]]:
    """What is below its default, and the next step."""
    name = device.uuid or str(device.index)
    cap, default_cap = driver.power_limit_w, driver.default_power_limit_w
    if cap is not None and default_cap is not None and cap < default_cap:
        what = f"its power is capped at {cap:g} W, {cap / default_cap:.0%} of the default {default_cap:g} W"
        command = f"nvidia-smi -i {name} -pl {default_cap:g}"
        if device.kind == "rocm":
            command = f"rocm-smi -d {device.index} --resetpoweroverdrive"
        yield f"{what}: it is slower than its type under load", f"as administrator: {command}; {_OR_LEAVE}"
    clock, default_clock = driver.clock_mhz, driver.default_clock_mhz
    if clock is not None and default_clock is not None and clock < default_clock:
        what = f"its clock for applications is {clock:g} MHz, the default is {default_clock:g} MHz"
        yield what, f"as administrator: nvidia-smi -i {name} -rac; {_OR_LEAVE}"
    if driver.slowed_by:
        step = _LEVEL if device.kind == "rocm" else _HOT
        yield f"it is slowed down now: {', '.join(driver.slowed_by)}", step
