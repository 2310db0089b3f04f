"""Loaders whose batches are the user's own: an iterable dataset, or a batch sampler that is not torch's."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import Any

from lightning_hetero.data import Agree, batch_size_of, nothing


class UsersBatches:
    """What Lightning iterates in place of a loader whose batches stay as the user makes them.

    Args:
        loader: the user's.
    """

    def __init__(self, loader: Any) -> None:
        self.loader = loader
        self.on_start = nothing

    @property
    def dataset(self) -> Any:
        """The user's dataset, if there is one."""
        return getattr(self.loader, "dataset", None)

    def set_epoch(self, epoch: int) -> None:
        """Pass the epoch on to the samplers and the dataset that want it."""
        for part in ("sampler", "batch_sampler", "dataset"):
            set_epoch = getattr(getattr(self.loader, part, None), "set_epoch", None)
            if callable(set_epoch):
                set_epoch(epoch)

    @property
    def sampler(self) -> UsersBatches:
        """What Lightning calls ``set_epoch`` on."""
        return self


class KeptLoader(UsersBatches):
    """A loader whose batches are the user's own (iterable dataset or batch sampler); only their sizes are shared.

    Ranks compare sizes before each batch: the step is weighted by them, and all stop when the first one has no more.
    """

    def __init__(self, loader: Iterable[Any], *, announce: Callable[[tuple[int, ...]], None], agree: Agree) -> None:
        super().__init__(loader)
        self._announce = announce
        self._agree = agree
        self._first: Any = None
        self._keep_first = True
        self._pending: Iterator[Any] | None = None

    def first_batch(self, epoch: int) -> Any:
        """Return the first batch without taking it from who iterates next; once. None where a rank has none."""
        if self._first is None:
            # not asked for yet: Lightning reads ahead only where the length is not known
            self.set_epoch(epoch)
            self._pending = iter(self.loader)
            self._first = next(self._pending, None)
            if self._first is not None:
                self._pending = chain([self._first], self._pending)
        first, self._first, self._keep_first = self._first, None, False
        return first

    def __iter__(self) -> Iterator[Any]:
        self.on_start()
        iterator, self._pending = self._pending or iter(self.loader), None
        while True:
            batch = next(iterator, None)
            sizes = self._agree(-1 if batch is None else batch_size_of(batch))
            if min(sizes) < 0:
                return
            self._announce(sizes)
            if self._keep_first:
                self._first, self._keep_first = batch, False
            yield batch


class SizedKeptLoader(KeptLoader):
    """A :class:`KeptLoader` whose length is known: the shortest over the ranks."""

    def __init__(self, loader: Any, *, announce: Callable[[tuple[int, ...]], None], agree: Agree) -> None:
        super().__init__(loader, announce=announce, agree=agree)
        self._length = min(agree(len(loader)))

    def __len__(self) -> int:
        return self._length


def length_of(loader: Any) -> int | None:
    """A loader's batches; None where it does not know them."""
    try:
        return len(loader)
    except (TypeError, NotImplementedError):
        return None
