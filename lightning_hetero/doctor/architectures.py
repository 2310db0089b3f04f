"""Check: torch was built for every device."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Literal

from lightning_hetero.doctor.facts import DeviceFacts, RankFacts
from lightning_hetero.doctor.finding import Finding, not_checked
from lightning_hetero.doctor.places import device_place, places

CHECK = "architectures"

_NVIDIA = re.compile(r"(sm|compute)_(\d+)(\d)([af]?)")


def check_architectures(ranks: Sequence[RankFacts]) -> list[Finding]:
    """Devices for which this torch has no code, or only code to be compiled."""
    findings = []
    for facts in ranks:
        if facts.has_gpu and not facts.architectures:
            findings.append(not_checked(CHECK, places([facts]), "torch does not say what it was built for"))
            continue
        for device in facts.devices:
            found = runs_on(facts.architectures, device)
            built = ", ".join(facts.architectures)
            if found == "no":
                what = f"it is {device.architecture}, and torch {facts.versions.get('torch', '')} was built for {built}"
                step = (
                    f"install a torch whose torch.cuda.get_arch_list() has {device.architecture} "
                    "(pytorch.org/get-started: newer CUDA or ROCm for newer devices, older for older ones), "
                    "or leave this device out"
                )
                findings.append(Finding("error", CHECK, device_place(facts, device), what, step))
            elif found == "compiled":
                what = f"it is {device.architecture}, for which torch has no code but some that the driver compiles"
                step = "expect minutes at the first start; a torch built for it starts at once"
                findings.append(Finding("warning", CHECK, device_place(facts, device), what, step))
    return findings


def runs_on(architectures: Sequence[str], device: DeviceFacts) -> Literal["yes", "compiled", "no"]:
    """Whether code for these architectures runs on a device.

    On NVIDIA, code for ``sm_XY`` runs where the major number is the same and the minor one at least as high, an ``a``
    at the end binds it to that one device; ``compute_XY`` is compiled by the driver on any newer device (CUDA C++
    Programming Guide, "Application compatibility" and "Feature set compiler targets"). On AMD names must be the same.

    Args:
        architectures: as ``torch.cuda.get_arch_list()`` has them.
        device: the device.
    """
    if device.kind == "rocm":
        return "yes" if device.architecture in {name.split(":")[0] for name in architectures} else "no"
    own = _parsed(device.architecture)
    if own is None:
        return "no"
    best: Literal["compiled", "no"] = "no"
    for name in architectures:
        code = _parsed(name)
        if code is None:
            continue
        what, major, minor, suffix = code
        if what == "sm" and major == own[1] and (minor == own[2] if suffix == "a" else minor <= own[2]):
            return "yes"
        if what == "compute" and not suffix and (major, minor) <= (own[1], own[2]):
            best = "compiled"
    return best


def _parsed(name: str) -> tuple[str, int, int, str] | None:
    match = _NVIDIA.fullmatch(name)
    return None if match is None else (match[1], int(match[2]), int(match[3]), match[4])
