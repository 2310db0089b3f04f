"""Check: the system lets loader workers have the files and the shared memory that they need."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from lightning_hetero.doctor.facts import LimitFacts, RankFacts
from lightning_hetero.doctor.finding import Finding, Level, not_checked
from lightning_hetero.doctor.places import grouped, places
from lightning_hetero.errors import HeteroError, raise_all
from lightning_hetero.units import format_bytes

CHECK = "limits"

PREFETCHED = 2
"""batches that a worker has ready: the default of DataLoader(prefetch_factor=...)"""
FILES_PER_WORKER = 8
"""pipes, sentinels and events between a worker and its rank"""
FILES_PER_PEER = 2
"""connections to a peer: one in the default group, one in a group of the strategy's"""
ASSUMED_BATCH_BYTES = 32 * 3 * 224 * 224 * 4
"""where nothing is said: 32 images of 3 x 224 x 224 in float32"""


@dataclass(frozen=True)
class LoaderNeeds:
    """What the training's loader will need.

    Args:
        workers: loader workers of a rank; by default as many as there are cores for it.
        batch_bytes: of one batch of a rank; by default that of 32 images of 3 x 224 x 224 in float32.
        tensors: in a batch; each has an open file while it is on its way.

    Raises:
        HeteroError: for a number that none can be.
    """

    workers: int | None = None
    batch_bytes: int | None = None
    tensors: int = 2

    def __post_init__(self) -> None:
        problems = []
        if self.workers is not None and self.workers < 0:
            problems.append(f"workers is {self.workers}: give a whole number, 0 or more")
        if self.batch_bytes is not None and self.batch_bytes < 1:
            problems.append(f"batch_bytes is {self.batch_bytes}: give a whole number, 1 or more")
        if self.tensors < 1:
            problems.append(f"tensors is {self.tensors}: give a whole number, 1 or more")
        raise_all(HeteroError, "the loader's needs are not valid", problems)

    @property
    def are_given(self) -> bool:
        """Whether they are the user's own, and no assumption."""
        return self.workers is not None and self.batch_bytes is not None


def check_limits(ranks: Sequence[RankFacts], needs: LoaderNeeds | None = None) -> list[Finding]:
    """Ranks whose open files, and nodes whose shared memory, will not do.

    Args:
        ranks: the facts.
        needs: what loaders will need; what is not given is assumed, and said.
    """
    needs = needs or LoaderNeeds()
    findings = []
    for here in grouped(ranks, lambda each: each.node).values():
        findings += [found for facts in here for found in _files(facts, len(here), len(ranks), needs)]
        findings += _shared_memory(here, needs)
    return findings


def _workers(limits: LimitFacts, ranks_here: int, needs: LoaderNeeds) -> int:
    return max(1, limits.cores // ranks_here) if needs.workers is None else needs.workers


def _files(facts: RankFacts, ranks_here: int, world_size: int, needs: LoaderNeeds) -> Iterator[Finding]:
    limits = facts.limits
    if limits is None:
        why = facts.unchecked.get(CHECK, "the system does not say")
        yield not_checked(CHECK, places([facts]), f"open files and shared memory: {why}")
        return
    workers = _workers(limits, ranks_here, needs)
    each = PREFETCHED * needs.tensors + FILES_PER_WORKER
    needed = limits.open_files + workers * each + (world_size - 1) * FILES_PER_PEER
    soft, hard = limits.open_files_soft, limits.open_files_hard
    if soft is None or soft >= needed:
        return
    raised = "unlimited" if hard is None else str(hard)
    step = (
        f"ulimit -n {raised} before the start"
        if hard is None or hard >= needed
        else (
            f"ask for a hard limit of {needed} or more (limits.conf, or docker run --ulimit nofile=...), it is {hard}; "
            "or use fewer workers"
        )
    )
    yield Finding(
        _level(needs),
        CHECK,
        places([facts]),
        f"{soft} open files are allowed, about {needed} are needed: {limits.open_files} now, {workers} loader workers "
        f"with {each} each ({PREFETCHED} batches of {needs.tensors} tensors, {FILES_PER_WORKER} pipes), "
        f"{FILES_PER_PEER} for each of {world_size - 1} peers",
        step,
    )


def _shared_memory(here: Sequence[RankFacts], needs: LoaderNeeds) -> Iterator[Finding]:
    measured = [facts.limits for facts in here if facts.limits is not None]
    if not measured:
        return
    sizes = [each.shared_free_bytes for each in measured if each.shared_free_bytes is not None]
    if not sizes:
        yield not_checked(CHECK, places(here), "there is no /dev/shm, through which loader workers hand over batches")
        return
    batch_bytes = ASSUMED_BATCH_BYTES if needs.batch_bytes is None else needs.batch_bytes
    by_rank = [_workers(each, len(here), needs) for each in measured]
    # a worker's batches, and the one that is trained on
    needed = sum((workers * PREFETCHED + 1) * batch_bytes for workers in by_rank if workers)
    free, total = min(sizes), max(each.shared_total_bytes or 0 for each in measured)
    if free >= needed:
        return
    assumed = "" if needs.batch_bytes is not None else " (assumed: say --batch-bytes)"
    yield Finding(
        _level(needs),
        CHECK,
        places(here),
        f"/dev/shm has {format_bytes(free)} free of {format_bytes(total)}, about {format_bytes(needed)} are needed: "
        f"{sum(by_rank)} loader workers with {PREFETCHED} batches of {format_bytes(batch_bytes)}{assumed} each. "
        "A worker that finds none left dies of a bus error",
        f"make it larger (docker run --shm-size={-(-needed // 2**30)}g, --ipc=host; Kubernetes: an emptyDir of medium "
        "Memory there), or use fewer workers",
    )


def _level(needs: LoaderNeeds) -> Level:
    return "error" if needs.are_given else "warning"
