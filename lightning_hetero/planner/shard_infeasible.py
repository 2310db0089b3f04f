"""What to say when no shard plan fits: which bytes are missing where, and what would fit, found by planning it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import NoReturn

from lightning_hetero.errors import HeteroError, InfeasibleError
from lightning_hetero.planner.shard_changes import with_devices, without_ranks
from lightning_hetero.planner.shard_search import ShardPlanner
from lightning_hetero.simulator.shard_prediction import group_memory
from lightning_hetero.units import format_bytes

_MOST_RANKS_SHOWN = 16
_MOST_DEVICES_ADDED = 64


def refuse(planner: ShardPlanner) -> NoReturn:
    """Raise the error.

    Raises:
        InfeasibleError: with the bytes that are missing, and what would fit.
    """
    lines = list(_missing(planner))
    changes = list(_changes(planner))
    if changes:
        lines += ["what would fit, by planning it:", *(f"  - {change}" for change in changes)]
    else:
        lines.append(
            f"neither checkpointing, nor smaller micro-batches, nor {_MOST_DEVICES_ADDED} more devices of a type would "
            "do: use devices with more memory, smaller blocks, a lower precision, or an optimizer with less state"
        )
    raise InfeasibleError("\n".join(lines))


def _missing(planner: ShardPlanner) -> Iterator[str]:
    """Per rank what is missing where least is needed: all ranks in one group, a sample at a time."""
    ranks = planner.cluster.world_size
    mode = next((each for each in ("FULL_SHARD", "SHARD_GRAD_OP") if each in planner.options.modes), "NO_SHARD")
    again = planner.options.checkpointing
    peak = group_memory(planner.costs, planner.state, planner.curves.buffers, ranks, mode, again, False).peak(1)
    needed = peak.needed_bytes(1)
    short = [rank for rank, device in enumerate(planner.cluster.devices) if device.memory_bytes < needed]
    how = f"{mode} over all {ranks} ranks, 1 sample a rank{', with activation checkpointing' if again else ''}"
    if not short:
        held = sum(planner.most_samples_at_once())
        yield (
            f"no shard plan fits the memory of the devices: one sample a rank does ({how}), but all ranks hold "
            f"at most {held} samples at once in one group, and the global batch is {planner.batch}"
        )
        return
    yield f"no shard plan fits the memory of the devices; where least is needed ({how}):"
    for rank in short[:_MOST_RANKS_SHOWN]:
        device = planner.cluster.devices[rank]
        missing = needed - device.memory_bytes
        yield (
            f"  - rank {rank} ({device.type} on {device.node}) needs {format_bytes(needed)} ({peak}) and has "
            f"{format_bytes(device.memory_bytes)}: {format_bytes(missing)} ({missing} bytes) are missing"
        )
    if len(short) > _MOST_RANKS_SHOWN:
        yield f"  - and {len(short) - _MOST_RANKS_SHOWN} more ranks"


def _changes(planner: ShardPlanner) -> Iterator[str]:
    options, cluster = planner.options, planner.cluster
    if not options.checkpointing and _fits(planner.changed(options=replace(options, checkpointing=True))):
        yield "activation checkpointing (checkpointing=True)"
    if not options.accumulate and _fits(planner.changed(options=replace(options, accumulate=True))):
        yield "smaller micro-batches (accumulate=True)"
    if not options.accumulate:
        most = _largest(lambda batch: _fits(planner.changed(batch=batch)), planner.batch)
        if most:
            yield f"a global batch of {most} samples"
    for kind in cluster.types:

        def is_enough(count: int, kind: str = kind) -> bool:
            return _fits(planner.changed(cluster=with_devices(cluster, kind, count)))

        count = _fewest(is_enough, _MOST_DEVICES_ADDED)
        if count:
            yield f"{count} more device{'s' if count > 1 else ''} of type {kind}"
    for kind in cluster.types if len(cluster.types) > 1 else ():
        left_out = {rank for rank, device in enumerate(cluster.devices) if device.type == kind}
        if _fits(planner.changed(cluster=without_ranks(cluster, left_out))):
            yield f"leaving out the {len(left_out)} x {kind}"


def _fits(planner: ShardPlanner) -> bool:
    try:
        planner.search()
    except HeteroError:
        return False
    return True


def _fewest(is_enough: Callable[[int], bool], most: int) -> int:
    """The smallest count up to ``most`` that is enough, 0 if none is; more must not be worse."""
    count = 1
    while not is_enough(count):
        if count >= most:
            return 0
        count = min(2 * count, most)
    return 1 + _largest(lambda other: not is_enough(other), count, low=count // 2)


def _largest(fits: Callable[[int], bool], above: int, low: int = 0) -> int:
    """The largest number below ``above`` that fits, ``low`` if none above that does; more must not fit better."""
    while above - low > 1:
        middle = (low + above) // 2
        if fits(middle):
            low = middle
        else:
            above = middle
    return low
