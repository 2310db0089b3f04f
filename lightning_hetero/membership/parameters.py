"""The parameters of a model by name, unit and shape: what ownership and bytes follow from."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from lightning_hetero.costs import ModelCosts

OUTSIDE = ""
"""the unit of parameters that are outside the model that a pipeline splits; every rank has them"""


@dataclass(frozen=True)
class ParameterShape:
    """One parameter.

    Args:
        name: dotted, in the LightningModule; the first one, where it is tied.
        unit: name of the first unit that has it, or :data:`OUTSIDE`.
        shape: of all of it, at least one dimension.
        tied_to: names of further units that have it.
        names: how many it has in the model's state: more than one where it is tied.
    """

    name: str
    unit: str
    shape: tuple[int, ...]
    tied_to: tuple[str, ...] = ()
    names: int = 1

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", tuple(self.shape))
        object.__setattr__(self, "tied_to", tuple(self.tied_to))

    @property
    def elements(self) -> int:
        """How many it has."""
        return math.prod(self.shape)

    @property
    def rows(self) -> int:
        """Length of dimension 0, over which FSDP2 shards."""
        return self.shape[0]

    @property
    def width(self) -> int:
        """Elements in a row."""
        return math.prod(self.shape[1:])

    @property
    def units(self) -> tuple[str, ...]:
        """All units that have it."""
        return (self.unit, *self.tied_to) if self.unit != OUTSIDE else ()


def parameters_of_costs(costs: ModelCosts) -> tuple[ParameterShape, ...]:
    """Return one parameter per unit, of one element a row, where only the units' sizes are known.

    Borders between ranks are then those of elements; a real model's are those of whole rows.

    Args:
        costs: of the model; units without parameters are left out.
    """
    return tuple(ParameterShape(unit.name, unit.name, (unit.parameters,)) for unit in costs.units if unit.parameters)


def shapes_by_unit(parameters: Iterable[ParameterShape]) -> Mapping[str, tuple[tuple[int, ...], ...]]:
    """Return the shapes of each unit's parameters, by its name; a tied parameter counts with its first unit."""
    found: dict[str, tuple[tuple[int, ...], ...]] = {}
    for each in parameters:
        found[each.unit] = (*found.get(each.unit, ()), each.shape)
    return found
