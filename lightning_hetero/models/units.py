"""The units of a model, found by its structure: its repeated blocks, and the parameters outside them.

A *stack* is a container (``nn.ModuleList``, ``nn.Sequential``) of two or more modules of one class. Its
children are the blocks. Three cases need care:

- A block may hold stacks of its own (the two Linear layers of an MLP, the experts of a mixture): the
  outermost wins.
- A stack of *stages* (Swin, ConvNeXt, ResNet) holds the stacks that are wanted. Stages are told from blocks
  by their parameter shapes: blocks of one stack are alike, stages differ from one to the next.
- A ``ModuleList`` is never called, so it is never a unit; where one is a child of a stack, its own children
  are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from torch import nn
from torch.distributed.fsdp import FSDPModule

# Stacks of one block are told by the name that timm and transformers give them.
_STACK_NAMES = frozenset({"blocks", "layers", "layer", "block", "h"})
_UNCALLED = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)


@dataclass(frozen=True)
class Unit:
    """One unit of a model.

    Args:
        name: dotted path from the root ("model.blocks.3"); the class name where the root itself is the unit.
        module: the module; its forward is what is called.
        is_block: whether it is one of the model's repeated blocks (what FSDP2 wraps one by one).
    """

    name: str
    module: nn.Module
    is_block: bool


def find_units(root: nn.Module, wrap: set[type[nn.Module]] | None = None) -> tuple[Unit, ...]:
    """Cut ``root`` into disjoint units, in module order.

    Blocks are the children of the model's stacks (timm ``blocks``, transformers' ``layers`` and ``h``,
    ``nn.TransformerEncoder``, the blocks inside Swin-like stages), or, in a model without any stack of
    composite modules, every child with parameters of its ``nn.Sequential``. The other units are the smallest
    modules outside the blocks that own parameters themselves (``patch_embed.proj``, ``norm``, ``head``); one
    that owns parameters and holds owners, such as ``nn.MultiheadAttention``, is one unit. Parameters owned by
    a module that holds blocks (``cls_token``, ``pos_embed``) belong to no unit. Modules that FSDP2 has
    wrapped count as their original class.

    Args:
        root: the model, or a LightningModule that holds it anywhere.
        wrap: classes whose outermost instances are the blocks, in place of what the structure says.

    Returns:
        The units. Empty for a model without parameters.
    """
    if wrap is not None:
        blocks = _outermost(root, lambda module: isinstance(module, tuple(wrap)))
    else:
        blocks = _blocks(root)
    return tuple(_units(root, "", {id(block) for block in blocks}, set()))


def original_class(module: nn.Module) -> type[nn.Module]:
    """The module's class before ``fully_shard`` put ``FSDPModule`` in front of it."""
    if not isinstance(module, FSDPModule):
        return type(module)
    bases = (base for base in type(module).__mro__ if issubclass(base, nn.Module))
    return next(base for base in bases if not issubclass(base, FSDPModule))


def _units(module: nn.Module, name: str, blocks: set[int], seen: set[int]) -> Iterator[Unit]:
    """Units under ``module``, in module order, each module once however often it is shared."""
    if id(module) in seen:
        return
    seen.add(id(module))
    if id(module) in blocks:
        yield Unit(name or type(module).__name__, module, is_block=True)
        return
    owns = any(True for _ in module.parameters(recurse=False)) and not isinstance(module, _UNCALLED)
    # A root with children is a LightningModule or a whole model: too large to be one unit.
    is_whole_model = not name and _is_composite(module)
    if owns and not is_whole_model and not any(id(inner) in blocks for inner in module.modules()):
        yield Unit(name or type(module).__name__, module, is_block=False)
        return
    for child_name, child in module.named_children():
        yield from _units(child, f"{name}.{child_name}" if name else child_name, blocks, seen)


def _blocks(root: nn.Module) -> list[nn.Module]:
    """The blocks that the structure shows."""
    stacks = list(_outermost_stacks(root, ""))
    if stacks:
        return [block for stack in stacks for block in _called(stack)]
    # Small models: any stack (Linear after Linear), any Sequential.
    return [child for container in _containers(root) for child in _called(_with_parameters(container))]


def _outermost_stacks(module: nn.Module, name: str) -> Iterator[list[nn.Module]]:
    """Stacks of composite modules in ``module``, in module order; stages give the stacks inside them."""
    children = _stack(module, name)
    if not any(_is_composite(child) for child in children):
        children = []
    elif _are_stages(children):
        yield from _open_stages(children)
    else:
        yield children
    done = {id(child) for child in children}
    for child_name, child in module.named_children():
        if id(child) not in done:
            yield from _outermost_stacks(child, child_name)


def _stack(module: nn.Module, name: str) -> list[nn.Module]:
    """The repeated children of a container; empty if it is none or nothing repeats."""
    if not isinstance(module, (nn.ModuleList, nn.Sequential)):
        return []
    children = _with_parameters(module)
    if len(children) == 1 and name in _STACK_NAMES:
        return children
    classes = [original_class(child) for child in children]
    repeated = {cls for cls in classes if classes.count(cls) > 1}
    if isinstance(module, nn.ModuleList):
        # Alternating kinds of layers (attention, state space) are one stack.
        return children if repeated else []
    # In a Sequential a stem, a head or a norm may stand beside the blocks.
    alike = [child for child, cls in zip(children, classes, strict=True) if cls in repeated]
    return [child for child in alike if _is_composite(child)] or alike


def _are_stages(children: Sequence[nn.Module]) -> bool:
    """Whether a stack's children differ in shape, most of them with a stack of composite modules inside."""
    if len(children) < 2 or len({_signature(child) for child in children}) <= len(children) // 2:
        return False
    return 2 * sum(any(True for _ in _stacks_inside(child)) for child in children) >= len(children)


def _open_stages(stages: Sequence[nn.Module]) -> Iterator[list[nn.Module]]:
    """The stacks inside stages; a stage of one block is recognised by the block's class in the others."""
    blocks = [block for stage in stages for stack in _stacks_inside(stage) for block in _called(stack)]
    classes = {original_class(block) for block in blocks} - {nn.Sequential}
    found = {id(block) for block in blocks}
    for stage in stages:
        yield _outermost(stage, lambda module: id(module) in found or original_class(module) in classes)


def _stacks_inside(stage: nn.Module) -> Iterator[list[nn.Module]]:
    # "blocks": a stage that is itself the Sequential of its blocks may hold a single one.
    return _outermost_stacks(stage, "blocks")


def _outermost(module: nn.Module, wanted: Callable[[nn.Module], bool]) -> list[nn.Module]:
    """The outermost modules in ``module`` for which ``wanted`` holds, in module order."""
    if wanted(module):
        return [module]
    return [found for child in module.children() for found in _outermost(child, wanted)]


def _containers(module: nn.Module) -> Iterator[nn.Module]:
    """Outermost ``nn.Sequential`` and ``nn.ModuleList`` with two or more children with parameters."""
    if isinstance(module, (nn.Sequential, nn.ModuleList)) and len(_with_parameters(module)) > 1:
        yield module
        return
    for child in module.children():
        yield from _containers(child)


def _called(children: Sequence[nn.Module]) -> Iterator[nn.Module]:
    """``children``, with containers that are never called replaced by what they hold."""
    for child in children:
        if isinstance(child, _UNCALLED):
            yield from _called(_with_parameters(child))
        else:
            yield child


def _with_parameters(module: nn.Module) -> list[nn.Module]:
    return [child for child in module.children() if any(True for _ in child.parameters())]


def _is_composite(module: nn.Module) -> bool:
    return bool(_with_parameters(module))


def _signature(module: nn.Module) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(parameter.shape) for parameter in module.parameters())
