"""The shapes of a model's parameters by unit, as what needs no torch takes them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from torch import nn

from lightning_hetero.membership.parameters import ParameterShape
from lightning_hetero.models.units import Unit

ROOT = "(root)"
"""name of the unit of parameters outside all units, where every unit is a block"""


def unit_parameters(root: nn.Module, units: Sequence[Unit]) -> tuple[ParameterShape, ...]:
    """Return the parameters of a model that is not sharded yet, each with the first unit that has it.

    Those that no unit has (class token, positions) are the first unit's that is no block, as in
    :func:`~lightning_hetero.profiler.analytic.analytic_costs`.

    Args:
        root: the model, on any device.
        units: of it (:func:`~lightning_hetero.models.units.find_units`).
    """
    owners: dict[int, list[str]] = {}
    for unit in units:
        for parameter in unit.module.parameters():
            owners.setdefault(id(parameter), []).append(unit.name)
    loose = next((unit.name for unit in units if not unit.is_block), ROOT)
    found = []
    names = count_names(root)
    for name, parameter in root.named_parameters():
        first, *others = owners.get(id(parameter), [loose])
        found.append(ParameterShape(name, first, tuple(parameter.shape), tuple(others), names[name]))
    return tuple(found)


def count_names(root: nn.Module) -> dict[str, int]:
    """Return how many names each parameter has, by the first of them; a tied one has several."""
    counts = Counter(id(parameter) for _, parameter in root.named_parameters(remove_duplicate=False))
    return {name: counts[id(parameter)] for name, parameter in root.named_parameters()}
