"""Check: number formats that some devices have no fast path for."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_hetero.cluster.peaks import DTYPES, preset_for
from lightning_hetero.doctor.facts import RankFacts
from lightning_hetero.doctor.finding import Finding, Level, not_checked
from lightning_hetero.doctor.places import places
from lightning_hetero.errors import HeteroError

CHECK = "dtypes"

PRECISIONS = {
    "32-true": ("fp32", "tf32"),
    "64-true": ("fp64",),
    "16-mixed": ("fp16",),
    "16-true": ("fp16",),
    "bf16-mixed": ("bf16",),
    "bf16-true": ("bf16",),
    "transformer-engine": ("fp8",),
}
"""by what ``Trainer(precision=...)`` takes, the formats in which matrices are multiplied"""

_IN_USE = ("bf16", "fp16")
_LACKING = {
    "bf16": "bf16 is emulated there, at a fraction of the speed",
    "fp16": "fp16 matrices run at fp32's speed there or below",
    "fp8": "fp8 matrices cannot be multiplied there",
    "tf32": "fp32 matrices run without tensor cores there",
    "fp64": "fp64 runs at a fraction of fp32's speed there",
    "fp32": "fp32 has no published figure there",
}


def check_dtypes(ranks: Sequence[RankFacts], precision: str | None = None) -> list[Finding]:
    """Formats that some devices have a peak for and others do not, by the table of known devices.

    Args:
        ranks: the facts.
        precision: what training will be run with, as ``Trainer(precision=...)`` takes it; without it all formats are
            compared.

    Raises:
        HeteroError: for another precision.
    """
    if precision is not None and precision not in PRECISIONS:
        raise HeteroError(f"precision is {precision!r}: give one of {', '.join(PRECISIONS)}")
    wanted = DTYPES if precision is None else PRECISIONS[precision]
    known: dict[str, list[RankFacts]] = {}
    unknown: dict[str, list[RankFacts]] = {}
    for facts in ranks:
        for name in dict.fromkeys(device.name for device in facts.devices):
            preset = preset_for(name)
            (known if preset is not None and preset.peaks else unknown).setdefault(name, []).append(facts)
    findings = [found for dtype in wanted for found in _lacking(dtype, known, precision)]
    for name, those in unknown.items():
        why = f"the table of known devices (cluster/peaks.py) has no peaks of {name!r}"
        step = "measure with lightning-hetero discover --dtype bfloat16, and compare"
        findings.append(not_checked(CHECK, places(those), why, step))
    return findings


def _lacking(dtype: str, known: dict[str, list[RankFacts]], precision: str | None) -> list[Finding]:
    has = {name: dtype in preset.peaks for name in known if (preset := preset_for(name)) is not None}
    lacking = [name for name, there in has.items() if not there]
    if not lacking or (precision is None and len(lacking) == len(has)):
        return []  # a format that none has is told only to whom will use it
    level: Level = "warning" if dtype in _IN_USE or (precision is not None and dtype != "tf32") else "note"
    those = [facts for name in lacking for facts in known[name]]
    others = [name for name, there in has.items() if there]
    having = f", {', '.join(others)} {'has' if len(others) == 1 else 'have'}" if others else ""
    what = f"{', '.join(lacking)} {'has' if len(lacking) == 1 else 'have'} no fast {dtype}{having}: {_LACKING[dtype]}"
    best = next((name for name in ("bf16", "fp16", "fp32") if name != dtype and _all_have(name, known)), "fp32")
    step = {"bf16": "precision='bf16-mixed'", "fp16": "precision='16-mixed'"}.get(best, "precision='32-true'")
    return [Finding(level, CHECK, places(sorted(those, key=lambda each: each.rank)), what, _next_step(dtype, step))]


def _next_step(dtype: str, step: str) -> str:
    if dtype == "tf32":
        return "torch.set_float32_matmul_precision('highest') where all ranks must round alike"
    return f"train with {step}, which all of them have, or leave these devices out"


def _all_have(dtype: str, known: dict[str, list[RankFacts]]) -> bool:
    return all(dtype in preset.peaks for name in known if (preset := preset_for(name)) is not None)
