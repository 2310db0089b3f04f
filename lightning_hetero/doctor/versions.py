"""Check: the same software on every rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lightning_hetero.doctor.facts import RankFacts
from lightning_hetero.doctor.finding import Finding, Level
from lightning_hetero.doctor.places import grouped, places

CHECK = "versions"


@dataclass(frozen=True)
class _Rule:
    """What must be alike.

    Args:
        key: in the ranks' versions.
        level: how bad a difference is.
        why: what comes of it.
        install: what to do, given the version that most have.
        part: of the version, what is compared.
        on_gpus: whether only ranks with a GPU use it.
    """

    key: str
    level: Level
    why: str
    install: str
    part: Callable[[str], str] = str
    on_gpus: bool = False


def _release(version: str) -> str:
    return version.partition("+")[0]


def _build(version: str) -> str:
    return version.partition("+")[2]


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])


# NCCL compares its version with every peer's when a communicator is made, and refuses ("Mismatched NCCL version
# detected", src/init.cc); RCCL is a fork of it.
_NCCL = "it refuses to connect ranks of different versions"
_RULES = (
    _Rule("lightning_hetero", "error", "ranks would plan and communicate differently", "install {} everywhere"),
    _Rule("torch", "error", "ranks would run different collectives, and hang", "pip install torch=={} there", _release),
    _Rule("torch", "warning", "kernels, and so roundings, may differ", "install the build {} there", _build),
    _Rule("nccl", "error", _NCCL, "install the torch that brings NCCL {}, or that NCCL, there", on_gpus=True),
    _Rule("rccl", "error", _NCCL, "install the ROCm and torch that bring RCCL {} there", on_gpus=True),
    _Rule("cuda", "warning", "kernels, and so roundings, may differ", "install a torch built for CUDA {} there"),
    _Rule("rocm", "warning", "kernels, and so roundings, may differ", "install a torch built for ROCm {} there"),
    _Rule("lightning", "warning", "loops may call hooks in another order", "pip install lightning=={} there"),
    _Rule("python", "warning", "pickled objects may not be read by all", "use Python {} there", _minor),
    _Rule("driver", "warning", "the older one may lack what the CUDA of torch needs", "bring the driver to {} there"),
    _Rule("amdgpu", "warning", "the older one may lack what ROCm needs", "bring the driver to {} there"),
)


def check_versions(ranks: Sequence[RankFacts]) -> list[Finding]:
    """What differs between ranks, and collectives that a rank's torch does not have."""
    findings = []
    for rule in _RULES:
        users = [each for each in ranks if _part(rule, each) and (each.has_gpu or not rule.on_gpus)]
        by_version = grouped(users, lambda each: _part(rule, each))  # noqa: B023
        if len(by_version) > 1:
            findings.append(_difference(rule, by_version))
    for library, kind in (("nccl", "cuda"), ("rccl", "rocm")):
        without = [each for each in ranks if library not in each.versions and _has_kind(each, kind)]
        if without and len(ranks) > 1:
            what = f"this torch has no {library.upper()}, over which GPUs talk to each other"
            step = "install a torch from pytorch.org for Linux, which has it"
            findings.append(Finding("error", CHECK, places(without), what, step))
    return findings


def _part(rule: _Rule, facts: RankFacts) -> str:
    """Return what is compared; nothing where it is not installed, or has no such part."""
    return rule.part(facts.versions.get(rule.key, ""))


def _has_kind(facts: RankFacts, kind: str) -> bool:
    return any(device.kind == kind for device in facts.devices)


def _difference(rule: _Rule, by_version: dict[str, list[RankFacts]]) -> Finding:
    most = max(by_version, key=lambda version: len(by_version[version]))
    others = [each for version, here in by_version.items() if version != most for each in here]
    named = "; ".join(f"{version} on {places(here)}" for version, here in by_version.items())
    build = " build" if rule.part is _build else ""
    what = f"{rule.key}{build} differs: {named}: {rule.why}"
    return Finding(
        rule.level, CHECK, places(sorted(others, key=lambda each: each.rank)), what, rule.install.format(most)
    )
