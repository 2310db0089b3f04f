"""What to mind about the precision of a training that is simulated from speeds instead of measured seconds."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_hetero.cli.model_costs import COMPUTE_DTYPES
from lightning_hetero.cluster import Cluster
from lightning_hetero.cluster.peaks import peak_flops_per_s, preset_for
from lightning_hetero.costs import ModelCosts
from lightning_hetero.units import format_flops_per_s


def precision_notes(precision: str, clusters: Sequence[Cluster], costs: Sequence[ModelCosts]) -> list[str]:
    """That seconds do not follow the precision, speeds that are above the known peak in it, devices that lack it.

    Args:
        precision: in Lightning's words, a known one.
        clusters: that are asked about.
        costs: that are asked about.
    """
    dtype = COMPUTE_DTYPES[precision]
    devices = [device for cluster in clusters for device in cluster.devices]
    untimed = [
        kind
        for kind in dict.fromkeys(device.type for device in devices)
        if any(kind not in each.timed_types for each in costs)
    ]
    if not untimed:
        return []
    notes = [
        (
            f"{precision} changes bytes, and not the seconds on {', '.join(untimed)}: their speeds are taken as the "
            f"cluster has them, so give what they reach in {dtype}"
        )
    ]
    for kind in untimed:
        peak, preset = _peak(kind, dtype), preset_for(kind)
        speed = max((device.speed_flops_per_s or 0.0 for device in devices if device.type == kind), default=0.0)
        if peak is not None and speed > peak:
            notes.append(
                f"mind: {kind} has a peak of {format_flops_per_s(peak)} in {dtype}, and {format_flops_per_s(speed)} "
                "here: steps will take longer"
            )
        elif peak is None and preset is not None and preset.peaks:
            notes.append(
                f"mind: {kind} computes in no {dtype} of its own (known peaks: {', '.join(preset.peaks)}): steps will "
                "take longer than this, if it runs at all"
            )
    return notes


def _peak(kind: str, dtype: str) -> float | None:
    """Of float32 also in TF32, which torch may be told to use."""
    known = [peak_flops_per_s(kind, name) for name in ([dtype, "tf32"] if dtype == "float32" else [dtype])]
    return max((peak for peak in known if peak is not None), default=None)
