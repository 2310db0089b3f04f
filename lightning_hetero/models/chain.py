"""A model as a chain of units, which a pipeline cuts into stages.

Between units travel named values: tensors, or None for what is absent. A unit says which values it reads and which it
writes, so a value goes from the stage that wrote it straight to the stages that read it, once to each, however many
stages lie between (attention masks, rotary tables)::

    begin(*args, **kwargs)     the arguments of the model's forward as values            first stage
    unit.run(values)           what it reads -> what it writes, unit after unit          the unit's stage
    end(values)                what the model's forward returns                          last stage

A model of one's own is split once it has a method ``unit_chain(self) -> UnitChain``::

    class Tower(nn.Module):
        def unit_chain(self):
            units = [ChainUnit("stem", ("stem",), lambda v: {"hidden": self.stem(v["image"])}, reads=("image",))]
            for i, block in enumerate(self.blocks):
                units.append(ChainUnit(f"blocks.{i}", (f"blocks.{i}",), lambda v, b=block: {"hidden": b(v["hidden"])}))
            return UnitChain(
                tuple(units), begin=lambda image: {"image": image}, end=lambda v: v["hidden"], inputs=("image",)
            )

``begin`` and ``end`` use no parameters. All units together own every parameter of the model; one that two units own
is tied, and lives in both of their stages. A unit must not look at what other units own: on its stage there are no
values in it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from lightning_hetero.errors import UnsupportedError, raise_all

Values = dict[str, Tensor | None]
"""named values between units; a tensor's first dimension is the samples of the micro-batch, where it has samples"""


@dataclass(frozen=True)
class ChainUnit:
    """One unit of a chain.

    Args:
        name: as plans and tables show it; unlike those of the other units. Best the dotted name of its main module.
        modules: dotted names, in the model, of the modules that it owns.
        run: from the values that it reads to those that it writes.
        reads: names of values.
        writes: names of values; one that was there before is replaced.
        tensors: dotted names of parameters and buffers that it owns and that no module of ``modules`` holds
            (``cls_token``).
    """

    name: str
    modules: tuple[str, ...]
    run: Callable[[Values], Values]
    reads: tuple[str, ...] = ("hidden",)
    writes: tuple[str, ...] = ("hidden",)
    tensors: tuple[str, ...] = ()


@dataclass(frozen=True)
class UnitChain:
    """A model's units in the order in which they run.

    Args:
        units: at least one.
        begin: from the arguments of the model's forward to the first values. An argument that the chain cannot do is
            refused with an error that names it.
        end: from the last values to what the model's forward returns.
        inputs: names of the values that ``begin`` makes.
        outputs: names of the values that ``end`` reads.
    """

    units: tuple[ChainUnit, ...]
    begin: Callable[..., Values]
    end: Callable[[Values], Any]
    inputs: tuple[str, ...] = ("hidden",)
    outputs: tuple[str, ...] = ("hidden",)

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Run all of it on one device: what the model's forward returns for these arguments."""
        values = self.begin(*args, **kwargs)
        for unit in self.units:
            values |= run_unit(unit, values)
        return self.end({name: values[name] for name in self.outputs})


def run_unit(unit: ChainUnit, values: Mapping[str, Tensor | None]) -> Values:
    """Run one unit on what it reads of ``values``; return what it wrote.

    Raises:
        UnsupportedError: if it wrote other values than it says.
    """
    written = unit.run({name: values[name] for name in unit.reads})
    if written.keys() != set(unit.writes):
        raise UnsupportedError(
            f"unit {unit.name!r} wrote {', '.join(sorted(written)) or 'nothing'} and says that it writes "
            f"{', '.join(unit.writes)}: correct its writes"
        )
    return written


def check_chain(model: nn.Module, chain: UnitChain) -> None:
    """Check that a chain can be cut anywhere.

    Raises:
        UnsupportedError: listing names that are used twice or do not exist in the model, values that are read and
            never written, and parameters that no unit owns.
    """
    problems = [] if chain.units else ["it has no unit"]
    names = [unit.name for unit in chain.units]
    problems += [f"two units are called {name!r}" for name in sorted({n for n in names if names.count(n) > 1})]
    known = set(chain.inputs)
    for unit in chain.units:
        problems += [
            f"unit {unit.name!r} reads {name!r}, which nothing wrote" for name in unit.reads if name not in known
        ]
        known |= set(unit.writes)
        problems += _unknown_names(model, unit)
    problems += [f"end reads {name!r}, which nothing wrote" for name in chain.outputs if name not in known]
    if not problems:
        problems += _ownerless(model, chain.units)
    raise_all(UnsupportedError, f"the unit chain of {type(model).__name__} is not valid", problems)


def owned_tensors(model: nn.Module, unit: ChainUnit) -> dict[str, Tensor]:
    """The parameters and buffers that a unit owns, by their names in the model."""
    found: dict[str, Tensor] = {}
    for name in unit.modules:
        module = model.get_submodule(name)
        for source in (module.named_parameters(remove_duplicate=False), module.named_buffers(remove_duplicate=False)):
            found |= {f"{name}.{inner}": tensor for inner, tensor in source}
    for name in unit.tensors:
        tensor = _tensor(model, name)
        if tensor is not None:
            found[name] = tensor
    return found


def _unknown_names(model: nn.Module, unit: ChainUnit) -> list[str]:
    modules = dict(model.named_modules(remove_duplicate=False))
    unknown = [name for name in unit.modules if name not in modules]
    unknown += [name for name in unit.tensors if _tensor(model, name) is None]
    return [f"unit {unit.name!r} owns {name!r}, which is not in the model" for name in unknown]


def _tensor(model: nn.Module, name: str) -> Tensor | None:
    holder, _, own = name.rpartition(".")
    try:
        tensor = getattr(model.get_submodule(holder), own, None)
    except AttributeError:
        return None
    return tensor if isinstance(tensor, Tensor) else None


def _ownerless(model: nn.Module, units: Sequence[ChainUnit]) -> list[str]:
    owned = {id(tensor) for unit in units for tensor in owned_tensors(model, unit).values()}
    names = [name for name, parameter in model.named_parameters() if id(parameter) not in owned]
    return [f"no unit owns {name}" for name in names]
