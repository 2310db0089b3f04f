"""Find out on the first batch whether the loss is a mean over samples.

Only then do uneven shares, weighted by their samples, give what one device gives over the global batch. Sums,
contrastive losses and class-weighted means are not, and nothing else would tell (DESIGN section 5).
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_hetero.data import batch_size_of
from lightning_hetero.plan import ShardPlan

_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}
_COARSE_TOLERANCE = 3e-2


def split_batch_in_two(batch: Any, samples: int) -> tuple[Any, Any, int] | None:
    """Return the halves of a batch and the samples of the first; None where it cannot be cut.

    Tensors whose first dimension is ``samples`` are cut, and so are lists of that length; all else goes to both.
    """
    if samples < 2:
        return None
    # not in the middle where it can be helped: a loss that ignores sizes would pass with equal halves
    first = max(1, samples // 3)
    return cut(batch, samples, 0, first), cut(batch, samples, first, samples), first


def cut(value: Any, samples: int, start: int, stop: int) -> Any:
    """Return samples ``start`` to ``stop`` of what holds so many ``samples``."""
    if isinstance(value, Tensor):
        return value[start:stop] if value.ndim and value.shape[0] == samples else value
    if isinstance(value, Mapping):
        make: Any = type(value)  # such as the dict of its own that a tokenizer returns
        return make({key: cut(item, samples, start, stop) for key, item in value.items()})
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(cut(item, samples, start, stop) for item in value))
    if isinstance(value, list | tuple):
        if len(value) == samples and not any(isinstance(item, Tensor) and item.ndim for item in value):
            return value[start:stop]
        return type(value)(cut(item, samples, start, stop) for item in value)
    if is_dataclass(value) and not isinstance(value, type):
        made = copy.copy(value)  # not made anew: its fields need not be what its __init__ takes
        for each in fields(value):
            setattr(made, each.name, cut(getattr(value, each.name), samples, start, stop))
        return made
    return value


def check_mean_loss(
    loss_of: Callable[[Any, int], Tensor | None],
    batch: Any,
    *,
    halves: bool,
    weight_of: Callable[[Any], float] | None = None,
) -> str | None:
    """Compare the loss of a batch with the weighted losses of its parts.

    Args:
        loss_of: runs the user's step on a batch, in eval mode and under the random state of a seed; called four times
            on every rank, whatever the batch, since it is collective.
        batch: this rank's samples.
        halves: whether this rank's batch may be cut; otherwise the calls are made for the others' sake.
        weight_of: what the loss of a batch counts for; its samples by default.

    Returns:
        What is wrong, or None when the loss is a mean over samples, or items (or that could not be found out).
    """
    samples = batch_size_of(batch)
    parts = split_batch_in_two(batch, samples) if halves else None
    first, second, count = parts if parts is not None else (batch, batch, samples)
    # a step that draws (augmentation, mixup) draws other numbers for the parts: another seed gives it away
    losses = [_number(loss_of(part, seed)) for part, seed in ((batch, 0), (batch, 1), (first, 0), (second, 0))]
    if parts is None or any(loss is None for loss in losses):
        return None
    whole, again, loss_1, loss_2 = (loss for loss in losses if loss is not None)
    weights = (float(count), float(samples - count)) if weight_of is None else (weight_of(first), weight_of(second))
    if not sum(weights):
        return None
    # the mean over no items is not a number, and counts for nothing
    weighted = sum(w * loss[0] for w, loss in zip(weights, (loss_1, loss_2), strict=True) if w) / sum(weights)
    tolerance = _TOLERANCE.get(whole[1], _COARSE_TOLERANCE)
    scale = max(abs(whole[0]), *(abs(loss[0]) for w, loss in zip(weights, (loss_1, loss_2), strict=True) if w), 1e-12)
    if abs(whole[0] - again[0]) > tolerance * scale or not math.isfinite(whole[0]):
        return None
    if abs(whole[0] - weighted) <= tolerance * scale:
        return None
    by, mean, remedy = (
        "samples",
        "samples",
        (
            "; a mean over other items, such as unpadded tokens, is exact with loss_weight=, a function of the batch "
            "that returns how many it has"
        ),
    )
    if weight_of is not None:
        by, mean, remedy = f"loss_weight ({weights[0]:g} and {weights[1]:g})", "what loss_weight counts", ""
    return (
        f"the loss of {samples} samples is {whole[0]:.6g}, but its parts of {count} and {samples - count} samples, "
        f"weighted by {by}, give {weighted:.6g}: training_step's loss is not a mean over {mean} (a sum, a "
        f"contrastive or a class-weighted loss?), so uneven shares will not give what one device gives{remedy}"
    )


def _number(loss: Tensor | None) -> tuple[float, torch.dtype] | None:
    return None if loss is None else (float(loss.detach()), loss.dtype)


def batch_norm_problem(names: Sequence[str]) -> str | None:
    """Say of these BatchNorm layers that they normalise over this rank's samples only; None if there are none."""
    if not names:
        return None
    shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    return (
        f"BatchNorm in training mode ({shown}) normalises over each rank's own samples, so the result depends on how "
        "the global batch is split, and a rank with one sample cannot run: use Trainer(sync_batchnorm=True) on GPUs, "
        "freeze it (eval mode), or use LayerNorm or GroupNorm"
    )


def synchronised_norm_problems(plan: ShardPlan) -> list[str]:
    """Say what of a plan SyncBatchNorm cannot run with: all ranks meet in each layer's forward, each with samples."""
    problems = []
    empty = [rank for rank in range(plan.world_size) if 0 in plan.micro_batch_samples(rank)]
    if empty:
        problems.append(
            f"ranks {', '.join(map(str, empty))} have a micro-batch without samples (batch_shares "
            f"{list(plan.batch_shares)}, micro_batches {list(plan.micro_batches) or 1}): the sample that they repeat "
            "for the others' sake would count in the statistics; give each of them a sample for every micro-batch"
        )
    counts = [plan.micro_batches_of(index) for index in range(len(plan.groups))]
    if len(set(counts)) > 1:
        problems.append(
            f"groups run {', '.join(map(str, counts))} micro-batches a step, so that some ranks would wait in a layer "
            "for ever; give all groups the same micro_batches"
        )
    if len({plan.checkpoints(rank) for rank in range(plan.world_size)}) > 1:
        problems.append(
            f"activation_checkpointing {list(plan.activation_checkpointing)}: ranks that compute a layer again would "
            "wait in it for the others for ever; set it for all ranks or for none"
        )
    return problems


def combine_findings(findings: Sequence[str | None]) -> str | None:
    """Return the ranks' findings as one text, each different one once, or None."""
    different = [text for text in dict.fromkeys(findings) if text]
    return different[0] if different else None
