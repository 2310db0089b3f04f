"""The uneven loader: every rank reads its share of each global batch, and together they read exactly that batch.

The order of samples depends only on ``(seed, epoch)``, never on the number of ranks or on their shares, so that a run
may be resumed on other devices and still see the same global batches.
"""

from __future__ import annotations

import copy
import hashlib
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import fields, is_dataclass
from typing import Any, cast

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
)

from lightning_hetero.collate import MicroCollate
from lightning_hetero.errors import DataError

Split = Callable[[int], tuple[int, ...]]
"""samples of a global batch -> whole samples per rank, summing to it"""

SplitAt = Callable[[int, int], Split]
"""epoch and batch in it -> how that batch is split"""

Share = Callable[[Iterable[Any]], Iterable[Any]]
"""batches that a loader would read -> the same batches, on every rank that takes them"""

Agree = Callable[[int], tuple[int, ...]]
"""this rank's number -> every rank's number, in rank order (a collective)"""


class SampleOrder:
    """The order of a dataset's samples in one epoch, the same on every rank.

    Args:
        length: samples in the dataset.
        sampler: the user's sampler; ``SequentialSampler`` keeps the order, ``RandomSampler`` without replacement
            becomes torch's permutation seeded by ``seed + epoch`` (the rule of ``DistributedSampler``), any other
            is iterated under torch's generator seeded by ``seed + epoch``.
        seed: added to the epoch.
    """

    def __init__(self, length: int, sampler: Iterable[int], seed: int) -> None:
        self.length = length
        self.sampler = sampler
        self.seed = seed
        self.kind = _kind_of(sampler, length)

    def __len__(self) -> int:
        return self.length if self.kind != "sampler" else len(cast(Sized, self.sampler))

    def indices(self, epoch: int) -> list[int]:
        """Return the dataset indices of ``epoch`` in order."""
        if self.kind == "sequential":
            return list(range(self.length))
        if self.kind == "permutation":
            generator = torch.Generator()
            generator.manual_seed(self.seed + epoch)
            return torch.randperm(self.length, generator=generator).tolist()
        return self._from_sampler(epoch)

    def _from_sampler(self, epoch: int) -> list[int]:
        set_epoch = getattr(self.sampler, "set_epoch", None)
        if callable(set_epoch):
            set_epoch(epoch)
        generator = getattr(self.sampler, "generator", None)
        if isinstance(generator, torch.Generator):
            generator.manual_seed(self.seed + epoch)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed + epoch)
            return list(self.sampler)


def _kind_of(sampler: Iterable[int], length: int) -> str:
    if type(sampler) is SequentialSampler:
        return "sequential"
    if type(sampler) is RandomSampler and not sampler.replacement and sampler.num_samples == length:
        return "permutation"
    return "sampler"


class UnevenBatchSampler(Sampler[list[int]]):
    """Yields this rank's indices of each global batch.

    A rank whose share of a batch is zero gets one sample of it, to take part with weight 0.

    Args:
        order: the order of the samples.
        rank: this rank.
        global_batch_size: samples of a full global batch.
        split: how many of ``n`` samples each rank takes.
        drop_last: drop a last global batch that is not full.
        split_at: the same by epoch and batch, where shares move; instead of ``split``.

    Attributes:
        first_batch: where the next iteration of the epoch begins.
        drawn: batches of the epoch up to the last one whose indices were asked for; loaders read ahead.
    """

    def __init__(
        self,
        order: SampleOrder,
        rank: int,
        global_batch_size: int,
        split: Split,
        drop_last: bool = False,
        split_at: SplitAt | None = None,
    ) -> None:
        self.order = order
        self.rank = rank
        self.global_batch_size = global_batch_size
        self.split = split
        self.drop_last = drop_last
        self.split_at = split_at
        self.epoch = 0
        self.first_batch = 0
        self.drawn = 0

    def __len__(self) -> int:
        full, rest = divmod(len(self.order), self.global_batch_size)
        return full + (1 if rest and not self.drop_last else 0)

    def samples_in(self, batch: int) -> int:
        """Return the samples of the ``batch``-th global batch (the last one may be short)."""
        return min(self.global_batch_size, len(self.order) - batch * self.global_batch_size)

    def sizes(self, batch: int) -> tuple[int, ...]:
        """Return every rank's samples of the ``batch``-th global batch."""
        split = self.split if self.split_at is None else self.split_at(self.epoch, batch)
        return split(self.samples_in(batch))

    def has_samples(self, batch: int) -> bool:
        """Whether this rank takes part in the ``batch``-th global batch with samples of its own."""
        return self.sizes(batch)[self.rank] > 0

    def __iter__(self) -> Iterator[list[int]]:
        indices = self.order.indices(self.epoch)
        for batch in range(self.first_batch, len(self)):
            self.drawn = batch + 1
            start = batch * self.global_batch_size
            sizes = self.sizes(batch)
            own = start + sum(sizes[: self.rank])
            yield indices[own : own + sizes[self.rank]] or [indices[start]]


def nothing() -> None:
    """What a loader does at the start of an iteration unless it is told otherwise."""


def _one() -> int:
    """How many micro-batches there are unless a plan says otherwise."""
    return 1


class UnevenLoader:
    """A ``DataLoader`` of which each rank reads its share; what Lightning iterates in its place.

    Everything of the user's loader but the batch sampler is kept: workers, collate, pin_memory, worker seeds,
    subclass. Iteration starts lazily, so that shares and the position may still be set after Lightning has asked for
    the iterator.

    Args:
        loader: the user's loader over a map-style dataset with automatic batching.
        rank: this rank.
        global_batch_size: samples per step over all ranks.
        split: how many of ``n`` samples each rank takes.
        seed: with the epoch it fixes the order.
        announce: called with every rank's samples each time a batch is handed out.
        agree: a collective, by which ranks compare the order that a user's own sampler gave.
        micro_batches: into how many micro-batches each batch is collated; asked at the start of an iteration.
        split_at: how a batch is split, by epoch and batch, where shares move; instead of ``split``.
        micro_samples: of a full micro-batch, where a short batch is to make fewer of them.
        share: what hands on the batches that are read, where several ranks take the same ones and one reads them.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        *,
        rank: int,
        global_batch_size: int,
        split: Split,
        seed: int,
        announce: Callable[[tuple[int, ...]], None],
        agree: Agree,
        micro_batches: Callable[[], int] | None = None,
        split_at: SplitAt | None = None,
        micro_samples: Callable[[], int] | None = None,
        share: Share = iter,
    ) -> None:
        batches = cast(BatchSampler, loader.batch_sampler)
        order = SampleOrder(len(cast(Sized, loader.dataset)), batches.sampler, seed)
        self.uneven = UnevenBatchSampler(order, rank, global_batch_size, split, batches.drop_last, split_at)
        self.loader = with_batch_sampler(loader, self.uneven)
        self._announce = announce
        self._agree = agree
        self._micro_batches = micro_batches or _one
        self._micro_samples = micro_samples
        self._share = share
        # by the number of micro-batches, and the samples of a full one
        self._collating: dict[tuple[int, int | None], DataLoader[Any]] = {}
        self._consumed = 0
        self._waited_s = 0.0
        self.on_start = nothing
        self.on_iteration = nothing
        """called before each iteration: what was not known when the loader was made is set then"""

    @property
    def position(self) -> tuple[int, int]:
        """Epoch and number of the batch that was handed out last."""
        return self.uneven.epoch, self._consumed - 1

    def take_waited_s(self) -> float:
        """Return the seconds that were spent in waiting for batches since the last call."""
        waited_s, self._waited_s = self._waited_s, 0.0
        return waited_s

    @property
    def batch_sampler(self) -> Any:
        """What gives this rank's indices, batch by batch."""
        return self.loader.batch_sampler

    @property
    def dataset(self) -> Any:
        """The user's dataset."""
        return self.loader.dataset

    @property
    def worker_init_fn(self) -> Any:
        """The loader's ``worker_init_fn`` (Lightning sets one under ``seed_everything(workers=True)``)."""
        return self.loader.worker_init_fn

    @worker_init_fn.setter
    def worker_init_fn(self, function: Any) -> None:
        self.loader.worker_init_fn = function

    @property
    def num_workers(self) -> int:
        """Worker processes of the loader."""
        return self.loader.num_workers

    @property
    def sampler(self) -> UnevenLoader:
        """What Lightning calls ``set_epoch`` on."""
        return self

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch whose order comes next; a position kept from another epoch is forgotten."""
        if epoch != self.uneven.epoch:
            self.uneven.epoch = epoch
            self.uneven.first_batch = 0
            self._consumed = 0

    def __len__(self) -> int:
        return len(self.uneven)

    def __iter__(self) -> Iterator[Any]:
        self.on_start()
        self.on_iteration()
        first = self.uneven.first_batch
        if self.uneven.order.kind == "sampler":
            self._check_order()
        self._consumed = first
        for batch, data in enumerate(self._timed(self._share(self._collated())), start=first):
            # counted when handed out: what workers have read ahead is not consumed
            self._consumed = batch + 1
            self._announce(self.uneven.sizes(batch))
            yield data
        self.uneven.first_batch = 0

    def _collated(self) -> DataLoader[Any]:
        """Return the loader, or one that collates into micro-batches: the same each time, with its workers."""
        count = self._micro_batches()
        samples = None if self._micro_samples is None else self._micro_samples()
        if count == 1 and samples is None:
            return self.loader
        if (count, samples) not in self._collating:
            clone = copy.copy(self.loader)
            clone.__dict__["_iterator"] = None
            clone.collate_fn = MicroCollate(cast(Any, self.loader.collate_fn), count, samples)
            self._collating[count, samples] = clone
        return self._collating[count, samples]

    def _timed(self, batches: Iterable[Any]) -> Iterator[Any]:
        began_s = time.perf_counter()
        for data in batches:
            self._waited_s += time.perf_counter() - began_s
            yield data
            began_s = time.perf_counter()

    def _check_order(self) -> None:
        indices = self.uneven.order.indices(self.uneven.epoch)
        digest = int.from_bytes(hashlib.sha256(repr(indices).encode()).digest()[:7], "big")
        if len(set(self._agree(digest))) > 1:
            raise DataError(
                f"the sampler {type(self.uneven.order.sampler).__name__} gives different orders on different "
                "ranks, so their shares would overlap. Seed it the same everywhere (torch's generator is seeded with "
                "seed + epoch before it is iterated), or use a batch sampler of your own that knows its rank."
            )

    def skip(self, epoch: int, batches: int) -> None:
        """Begin the next iteration of ``epoch`` after so many batches, which a resumed run has behind it."""
        self.uneven.epoch = epoch
        self.uneven.first_batch = self._consumed = batches

    def state_dict(self) -> dict[str, int]:
        """Return the position: the epoch and the batches handed out in it. Lightning takes it as resumable for this."""
        consumed = self._consumed if self._consumed < len(self) else 0
        return {"epoch": self.uneven.epoch, "consumed": consumed}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue after the batches that ``state`` counts; the next iteration starts there."""
        self.skip(int(state["epoch"]), int(state["consumed"]))


def with_batch_sampler(loader: DataLoader[Any], batch_sampler: Any) -> DataLoader[Any]:
    """Return a copy of ``loader`` that reads by ``batch_sampler`` and is the user's in all else."""
    clone = copy.copy(loader)
    # DataLoader forbids setting these after construction, for its own iterators' sake; the copy has none yet
    clone.__dict__["batch_sampler"] = batch_sampler
    clone.__dict__["_iterator"] = None
    return clone


def can_be_split(loader: Any) -> bool:
    """Whether the loader's batches can be cut anew: a map-style dataset batched by torch's own ``BatchSampler``."""
    return (
        isinstance(loader, DataLoader)
        and not isinstance(loader.dataset, IterableDataset)
        and type(loader.batch_sampler) is BatchSampler
        and isinstance(loader.dataset, Sized)
    )


def default_seed() -> int:
    """Return the seed of the sample order: ``seed_everything``'s, else 0 (as Lightning's own samplers do)."""
    return int(os.environ.get("PL_GLOBAL_SEED", "0"))


def batch_size_of(batch: Any) -> int:
    """Return the samples in a batch: the first dimension of its first tensor with one, else 1.

    Containers are searched in order: mappings, sequences, dataclasses.
    """
    found = _first_dimension(batch)
    return 1 if found is None else found


def _first_dimension(value: Any) -> int | None:
    if isinstance(value, torch.Tensor):
        return value.shape[0] if value.ndim else None
    children: Iterable[Any] = ()
    if isinstance(value, Mapping):
        children = value.values()
    elif isinstance(value, Sequence) and not isinstance(value, str | bytes):
        if value and all(isinstance(item, str) for item in value):
            return len(value)
        children = value
    elif is_dataclass(value) and not isinstance(value, type):
        children = (getattr(value, each.name) for each in fields(value))
    for child in children:
        found = _first_dimension(child)
        if found is not None:
            return found
    return None
