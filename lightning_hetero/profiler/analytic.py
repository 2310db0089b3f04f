"""FLOPs and bytes of a model's units, counted on the meta device: no device and next to no memory is needed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from lightning_hetero.costs import ModelCosts, UnitCost
from lightning_hetero.errors import HeteroError
from lightning_hetero.models.units import Unit, find_units
from lightning_hetero.profiler.calls import Calls, input_shapes, learn_calls, meta_batch, run_on_meta
from lightning_hetero.profiler.flops import FlopCounter
from lightning_hetero.profiler.marks import Phase, UnitMarks
from lightning_hetero.profiler.memory import tensors_in
from lightning_hetero.profiler.meta import fused_attention, meta_copy
from lightning_hetero.profiler.speed import MATMUL_DTYPES

_SAMPLES = 2  # a batch of one is refused by BatchNorm

Loss = Callable[[Any], Tensor]
"""from the model's output to a loss, with targets of its own making"""


@dataclass
class UnitTally:
    """What one unit does with a batch; what runs between units counts with the unit before it.

    Attributes:
        forward_flops: of its forwards.
        backward_flops: of its backwards.
        kept_bytes: that its forwards keep for the backward, each storage once, parameters and buffers aside.
        kept_between_bytes: the same of what runs between this unit and the next.
        output_bytes: of what it returns.
        largest_kept_bytes: of the largest tensor of numbers that it keeps.
    """

    forward_flops: int = 0
    backward_flops: int = 0
    kept_bytes: int = 0
    kept_between_bytes: int = 0
    output_bytes: int = 0
    largest_kept_bytes: int = 0


@dataclass(frozen=True)
class Counted:
    """A model's units and what was counted of them with ``samples`` samples.

    Args:
        model: on meta.
        units: of that model.
        calls: with what the units are called.
        tallies: one per unit.
        loss_bytes: what the loss keeps, and the gradient of the model's output.
        samples: of the batch.
    """

    model: nn.Module
    units: tuple[Unit, ...]
    calls: Calls
    tallies: tuple[UnitTally, ...]
    loss_bytes: int
    samples: int = _SAMPLES

    def per_sample(self, total: int) -> int:
        """A total of the batch, per sample, rounded up."""
        return -(-total // self.samples)


def analytic_costs(
    model: nn.Module,
    inputs: Sequence[Tensor],
    *,
    name: str | None = None,
    dtype: str = "float32",
    loss: Loss | None = None,
    wrap: set[type[nn.Module]] | None = None,
) -> ModelCosts:
    """Costs of a model without measured seconds.

    The model runs forward and backward on the meta device, where nothing is computed. What runs between units counts
    with the unit before it, so that the FLOPs of all units are those of the model. Attention is counted as fused.

    Args:
        model: on any device, best on meta; it is not changed.
        inputs: examples of what it takes, with the batch first; only shapes and dtypes are used.
        name: of the model in the costs; by default its class.
        dtype: of parameters and compute: "float64", "float32", "bfloat16" or "float16".
        loss: from the output to a loss, for ``loss_bytes``; without one these are 0.
        wrap: as :func:`~lightning_hetero.models.units.find_units` takes it.

    Returns:
        One cost per unit, in the order of their first call; the parameters that belong to no unit are the first
        other unit's that is no block, or a unit's of their own (``(root)``) where there is none.

    Raises:
        HeteroError: for another dtype, or a model that has no parameters or cannot run without values.
    """
    counted = count_units(model, inputs, dtype=dtype, loss=loss, wrap=wrap)
    return costs_of(counted, name or type(model).__name__, inputs, dtype)


def count_units(
    model: nn.Module,
    inputs: Sequence[Tensor],
    *,
    dtype: str = "float32",
    loss: Loss | None = None,
    wrap: set[type[nn.Module]] | None = None,
) -> Counted:
    """Count what :func:`analytic_costs` gives; arguments and errors as there."""
    if dtype not in MATMUL_DTYPES:
        raise HeteroError(f"dtype is {dtype!r}: give one of {', '.join(MATMUL_DTYPES)}")
    input_shapes(inputs)
    torch_dtype = MATMUL_DTYPES[dtype]
    on_meta = meta_copy(model).to(dtype=torch_dtype)
    units = find_units(on_meta, wrap)
    if not units:
        raise HeteroError(f"{type(model).__name__} has no parameters: there is nothing to plan")
    with fused_attention(), torch.enable_grad():
        calls = learn_calls(on_meta, units, inputs, torch_dtype)
        counter = _Count(on_meta, units)
        output = counter.run(meta_batch(inputs, _SAMPLES, torch_dtype))
        loss_bytes = 0 if loss is None else counter.loss_bytes(output, loss)
    return Counted(on_meta, units, calls, tuple(counter.tallies), loss_bytes)


def costs_of(counted: Counted, name: str, inputs: Sequence[Tensor], dtype: str) -> ModelCosts:
    """What was counted, as costs; see :func:`analytic_costs`."""
    units, order = counted.units, _in_order(counted)
    own, shared = _parameters(counted, order)
    costs = []
    for position, index in enumerate(order):
        tally = counted.tallies[index]
        following = counted.calls.first.get(order[position + 1]) if position + 1 < len(order) else None
        taken = sum(shape.bytes(counted.samples) for shape in following.shapes()) if following else 0
        costs.append(
            UnitCost(
                name=units[index].name,
                parameters=own[index],
                forward_flops=tally.forward_flops / counted.samples,
                backward_flops=tally.backward_flops / counted.samples,
                kept_activation_bytes=counted.per_sample(tally.kept_bytes + tally.kept_between_bytes),
                output_bytes=counted.per_sample(max(tally.output_bytes, taken)),
                is_block=units[index].is_block,
                shared_parameters=shared[index],
                inner_gradient_bytes=counted.per_sample(tally.largest_kept_bytes),
                largest_parameter=max((p.numel() for p in units[index].module.parameters()), default=0),
            )
        )
    loose = sum(parameter.numel() for parameter in counted.model.parameters()) - sum(own)
    costs = _with_loose_parameters(costs, loose)
    loss_bytes = counted.per_sample(counted.loss_bytes)
    shapes = tuple(
        each if each.dtype.startswith(("int", "uint", "bool")) else type(each)(each.shape, dtype)
        for each in input_shapes(inputs)
    )
    return ModelCosts(name, tuple(costs), dtype, loss_bytes, shapes)


ROOT = "(root)"
"""name of the unit that holds the parameters outside all units, where no other can"""


def _with_loose_parameters(costs: list[UnitCost], loose: int) -> list[UnitCost]:
    """Give parameters that belong to no unit (class token, positions) to the first unit that is no block."""
    if not loose:
        return costs
    for position, cost in enumerate(costs):
        if not cost.is_block:
            costs[position] = replace(cost, parameters=cost.parameters + loose)
            return costs
    return [UnitCost(ROOT, loose, 0.0, 0.0, 0, costs[0].output_bytes, is_block=False), *costs]


def _in_order(counted: Counted) -> list[int]:
    """Unit indices by first call; one that is never called follows the unit that it follows in the model."""
    position = {index: place for place, index in enumerate(counted.calls.order)}
    keys, last = [], -1
    for index in range(len(counted.units)):
        last = position.get(index, last)
        keys.append((last, index not in position, index))
    return [index for _, _, index in sorted(keys)]


def _parameters(counted: Counted, order: Sequence[int]) -> tuple[list[int], list[int]]:
    """Per unit its own parameters, and those that count with an earlier unit."""
    own, shared = [0] * len(counted.units), [0] * len(counted.units)
    seen: set[int] = set()
    for index in order:
        for parameter in counted.units[index].module.parameters():
            (shared if id(parameter) in seen else own)[index] += parameter.numel()
            seen.add(id(parameter))
    return own, shared


class _Count:
    """A listener that gives FLOPs and kept bytes of one forward and backward to the units that cause them."""

    def __init__(self, model: nn.Module, units: Sequence[Unit]) -> None:
        self.model = model
        self.units = units
        self.tallies = [UnitTally() for _ in units]
        self._flops = FlopCounter()
        self._counted = 0
        self._inside: int | None = None
        self._last: int | None = None
        self._early_bytes = 0
        # Keeps the storages alive, so that ids stay theirs; on meta that takes no memory.
        self._storages = {
            id(storage): storage
            for tensor in (*model.parameters(), *model.buffers())
            for storage in [tensor.untyped_storage()]
        }

    def run(self, batch: Sequence[Tensor]) -> Any:
        """Run forward and backward; returns the model's output."""
        marks = UnitMarks(self.units, [self])
        handles = [unit.module.register_forward_hook(self._output_hook(index)) for index, unit in enumerate(self.units)]
        try:
            with marks, self._flops, saved_tensors_hooks(self._keep, lambda tensor: tensor):
                output = run_on_meta(self.model, batch)
                self._give(self._last, "forward")
                wanted = [tensor for tensor in tensors_in(output) if tensor.requires_grad]
                self._last = None
                if wanted:
                    torch.autograd.backward(wanted, [torch.empty_like(tensor) for tensor in wanted])
                marks.close()
                self._give(self._last, "backward")
        finally:
            for handle in handles:
                handle.remove()
        return output

    def loss_bytes(self, output: Any, loss: Loss) -> int:
        """Bytes that the loss keeps beside what is kept already, and those of the output's gradient."""
        before = set(self._storages)
        leaves = [tensor.detach().requires_grad_(tensor.is_floating_point()) for tensor in tensors_in(output)]
        outputs = {id(leaf.untyped_storage()): leaf.untyped_storage() for leaf in leaves}
        self._storages |= outputs
        with saved_tensors_hooks(self._remember, lambda tensor: tensor):
            loss(leaves[0] if isinstance(output, Tensor) else output)
        kept = sum(s.nbytes() for key, s in self._storages.items() if key not in before and key not in outputs)
        return kept + sum(leaf.nbytes for leaf in leaves if leaf.requires_grad)

    def begin(self, unit_index: int, phase: Phase) -> None:
        """In forward, what ran since the last unit is the last unit's; in backward, it is this one's."""
        before = self._last if phase == "forward" and self._last is not None else unit_index
        self._give(before, phase)
        self._inside = unit_index
        self.tallies[unit_index].kept_between_bytes += self._early_bytes
        self._early_bytes = 0

    def end(self, unit_index: int, phase: Phase) -> None:
        """What ran since the begin is this unit's."""
        self._give(unit_index, phase)
        self._inside, self._last = None, unit_index

    def _give(self, unit_index: int | None, phase: Phase) -> None:
        flops, self._counted = self._flops.flops - self._counted, self._flops.flops
        if unit_index is None:
            return
        if phase == "forward":
            self.tallies[unit_index].forward_flops += flops
        else:
            self.tallies[unit_index].backward_flops += flops

    def _remember(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        self._storages.setdefault(id(storage), storage)
        return tensor

    def _keep(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if id(storage) in self._storages:
            return tensor
        self._remember(tensor)
        if self._inside is not None:
            tally = self.tallies[self._inside]
            tally.kept_bytes += storage.nbytes()
            if tensor.is_floating_point():
                tally.largest_kept_bytes = max(tally.largest_kept_bytes, storage.nbytes())
        elif self._last is not None:
            self.tallies[self._last].kept_between_bytes += storage.nbytes()
        else:
            self._early_bytes += storage.nbytes()  # before the first unit, which will have them
        return tensor

    def _output_hook(self, index: int) -> Callable[..., None]:
        def after(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            self.tallies[index].output_bytes = sum(tensor.nbytes for tensor in tensors_in(output))

        return after
