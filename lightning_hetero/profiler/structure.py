"""What a module is, apart from its values: to tell whether two cost the same, here or in an earlier run."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

from torch import nn

from lightning_hetero.models.units import original_class

# Attributes that tell a block's place and not what it does.
_PLACES = ("idx", "index", "layer_id", "layer_number")


def settings(module: nn.Module) -> Iterator[tuple[str, type, str, object]]:
    """Plain public attributes of a module and all in it: ``(path, class, name, value)``.

    Numbers, flags and texts (``num_heads``, ``p``, ``training``); those that tell a block's place in its model
    (``layer_idx``) are left out, since they make no difference to what it costs.
    """
    for path, inner in module.named_modules():
        for name, value in sorted(vars(inner).items()):
            plain = isinstance(value, (int, float, str)) and not name.startswith("_")
            if plain and name not in _PLACES and not name.endswith(tuple(f"_{place}" for place in _PLACES)):
                yield path, original_class(inner), name, value


def structure_hash(module: nn.Module) -> str:
    """A hash of classes, settings, shapes and forward code, the same in every process and run.

    It does not change with values, with sharding by FSDP2, or with the module's own plain attributes: a learning
    rate is kept there, and makes no difference to what a step costs. The code of functions that ``forward`` calls
    is not looked at.

    Args:
        module: a model or a LightningModule.

    Returns:
        64 hexadecimal digits.
    """
    digest = hashlib.sha256()
    for part in _parts(module):
        digest.update(repr(part).encode())
    return digest.hexdigest()


def _parts(module: nn.Module) -> Iterator[Any]:
    for path, inner in module.named_modules():
        cls = original_class(inner)
        code = getattr(cls.forward, "__code__", None)
        yield path, cls.__module__, cls.__qualname__, code and (code.co_code, code.co_names)
    yield from ((path, name, value) for path, _, name, value in settings(module) if path)
    for source in (module.named_parameters(), module.named_buffers()):
        for name, tensor in source:
            yield name, tuple(tensor.shape), str(tensor.dtype), tensor.requires_grad
