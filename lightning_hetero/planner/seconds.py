"""How long each unit takes on each device: measured where it was, else FLOPs over the device's speed."""

from __future__ import annotations

from lightning_hetero.cluster import Cluster
from lightning_hetero.costs import ModelCosts, UnitTiming
from lightning_hetero.errors import HeteroError, raise_all


def unit_timings(costs: ModelCosts, cluster: Cluster) -> dict[str, tuple[UnitTiming, ...]]:
    """The timing of every unit on every type of device in a cluster.

    A type is taken as measured only where all units with FLOPs or parameters were; a mixture of measured and
    computed seconds would not be comparable.

    Args:
        costs: of the model.
        cluster: its types are looked up by name; a type's speed is the slowest of its devices.

    Returns:
        Device type to one timing per unit. Without measured seconds: FLOPs per sample / speed, nothing fixed.

    Raises:
        HeteroError: listing every type that has neither measured seconds of all units nor a speed.
    """
    timings: dict[str, tuple[UnitTiming, ...]] = {}
    problems = []
    for kind in cluster.types:
        missing = [unit.name for unit in costs.units if kind not in unit.timings]
        speeds = [device.speed_flops_per_s for device in cluster.devices if device.type == kind]
        known = [speed for speed in speeds if speed is not None]
        if not missing:
            timings[kind] = tuple(unit.timings[kind] for unit in costs.units)
        elif len(known) == len(speeds):
            slowest = min(known)
            timings[kind] = tuple(
                UnitTiming(0.0, unit.forward_flops / slowest, 0.0, unit.backward_flops / slowest)
                for unit in costs.units
            )
        else:
            problems.append(
                f"device type {kind!r} has no measured seconds for {len(missing)} of {len(costs.units)} units "
                f"({missing[0]!r}, ...) and no speed: profile the model on it, or give its speed in the cluster file"
            )
    raise_all(HeteroError, f"the seconds of model {costs.model!r} are not known", problems)
    return timings
