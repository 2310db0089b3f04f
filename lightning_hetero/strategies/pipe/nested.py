"""Tensors in nested containers: the batches of a pipeline, and what its model makes of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor

from lightning_hetero.collate import MicroBatches
from lightning_hetero.strategies.loss_check import cut


def found_in(value: Any, kind: type) -> list[Any]:
    """All objects of a kind in nested containers, in order."""
    found: list[Any] = []

    def note(item: Any) -> Any:
        found.append(item)
        return item

    mapped(value, kind, note)
    return found


def mapped(value: Any, kind: type, function: Callable[[Any], Any]) -> Any:
    """The value, with what ``function`` makes of each object of a kind in its place."""
    if isinstance(value, MicroBatches):
        return MicroBatches(mapped(item, kind, function) for item in value)
    if isinstance(value, bytes):
        return value  # apply_to_collection would look at each byte, which takes a step's log some milliseconds
    return apply_to_collection(value, kind, function)


def shapes_of(value: Any) -> Any:
    """What the shapes of all that follows from a batch follow from: those of its tensors, hashable."""
    if isinstance(value, Tensor):
        return tuple(value.shape), str(value.dtype)
    if isinstance(value, Mapping):
        return tuple((str(key), shapes_of(item)) for key, item in value.items())
    if isinstance(value, list | tuple):
        return tuple(shapes_of(item) for item in value)
    if is_dataclass(value) and not isinstance(value, type):
        return tuple(shapes_of(getattr(value, each.name)) for each in fields(value))
    return type(value).__name__


def cut_whole(batch: Any, samples: int, sizes: Iterable[int]) -> MicroBatches:
    """Cut a batch that was collated whole, by the first dimension of its tensors."""
    found, at = MicroBatches(), 0
    for size in sizes:
        found.append(cut(batch, samples, at, at + size))
        at += size
    return found
