"""Batches that one rank of a pipeline reads, a batch ahead, and hands to the others."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_hetero.strategies.pipe.hand import Hand
from lightning_hetero.strategies.pipe.reading import Reader
from tests.harness import WarmRanks

READS = 1  # the rank that reads


def batches(count: int, begin: int = 0) -> Iterator[Any]:
    """Of many types and shapes, one larger than the first message, one without a tensor."""
    for k in range(begin, begin + count):
        yield {
            "rows": torch.full((k % 3, 5), float(k), dtype=torch.float64),
            "turned": torch.arange(6).view(2, 3).t() + k,
            "flags": [torch.tensor([True, k % 2 == 0]), torch.tensor(k, dtype=torch.bfloat16)],
            "text": "x" * (3000 if k == 1 else 3),
        }
    yield "no tensor"


def alike(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(alike(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(alike, one, other))
    return bool(one == other)


def readers(rank: int) -> Reader:
    return Reader(Hand(READS, rank, dist.new_group([0, 1, 2])))


def read(rank: int, ahead: bool) -> bool:
    """Whether this rank got all batches, with an evaluation's in between and another epoch after one broken off."""
    reader = readers(rank)

    def source(count: int, begin: int = 0) -> Any:
        return batches(count, begin) if rank == READS else iter(())

    expected, found = [*batches(4), *batches(3, 10), *list(batches(4))[:2], *batches(2, 20)], []
    inner: list[Any] = []
    for k, batch in enumerate(reader.batches(source(4))):
        found.append(batch)
        if ahead:
            reader.read_ahead()
            reader.go_on()
        if k == 1:  # read ahead is waiting meanwhile
            inner += reader.batches(source(3, 10))
    found += inner
    for k, batch in enumerate(reader.batches(source(4))):
        found.append(batch)
        if ahead:
            reader.read_ahead()
        if k == 1:
            break
    found += reader.batches(source(2, 20))
    reader.end()
    return alike(found, expected)


@pytest.mark.parametrize("ahead", [True, False])
def test_every_rank_has_every_batch(ranks: WarmRanks, ahead: bool) -> None:
    assert ranks.run(3, _on_a_rank, ahead) == [True] * 3


def _on_a_rank(ahead: bool) -> bool:
    return read(dist.get_rank(), ahead)


def failing() -> Iterator[Any]:
    yield 1
    raise OSError("the disk is gone")


def _fails_when_asked() -> str:
    rank = dist.get_rank()
    reader = readers(rank)
    iterator = reader.batches(failing() if rank == READS else iter(()))
    assert next(iterator) == 1
    reader.read_ahead()  # which says nothing yet: the step at hand still ends
    told = torch.tensor(1.0)
    dist.all_reduce(told)
    assert told == 3
    if rank != READS:
        reader.end()
        return "waits"
    with pytest.raises(OSError, match="the disk is gone"):
        next(iterator)
    return "raised"


def test_what_reading_ahead_raises_is_raised_where_the_batch_is_asked_for(ranks: WarmRanks) -> None:
    assert ranks.run(3, _fails_when_asked) == ["waits", "raised", "waits"]


def test_a_rank_alone_reads_for_itself_and_never_ahead() -> None:
    read: list[int] = []

    def source() -> Iterator[int]:
        for k in range(3):
            read.append(k)
            yield k

    reader = Reader(Hand(0, 0, None))
    iterator = reader.batches(source())
    assert next(iterator) == 0
    reader.read_ahead()
    assert read == [0]
    assert [*iterator] == [1, 2]


class Noting(Hand):
    """The reading rank's, without others: notes what it hands on."""

    def __init__(self) -> None:
        super().__init__(0, 0, "a group")
        self.handed: list[Any] = []

    def hand_on(self, value: Any) -> None:
        self.handed.append(value)


def test_a_reading_that_is_dropped_late_does_not_end_the_one_at_hand() -> None:
    """Who drops an iterator, and when, is Lightning's and the garbage collector's: it may differ from rank to rank."""
    hand = Noting()
    reader = Reader(hand)
    evaluation, training = reader.batches([1, 2]), reader.batches([3, 4])
    assert (next(evaluation), next(training)) == (1, 3)
    evaluation.close()  # type: ignore[attr-defined]
    reader.read_ahead()
    assert hand.handed == [(1,), (3,), (4,)]


def test_an_interruption_is_not_kept_for_later() -> None:
    def interrupted() -> Iterator[int]:
        yield 1
        raise KeyboardInterrupt

    hand = Noting()
    reader = Reader(hand)
    iterator = reader.batches(interrupted())
    assert next(iterator) == 1
    with pytest.raises(KeyboardInterrupt):
        reader.read_ahead()
    assert hand.handed == [(1,), "failed"]


def _goes_on_alone() -> int:
    """In each round another rank goes on while the rest are at something else that needs it."""
    rank, size = dist.get_rank(), dist.get_world_size()
    reader = Reader(Hand(READS, rank, dist.new_group(list(range(size)))))
    large = [f"{k} " + "x" * 5000 for k in range(size + 1)]
    found = 0
    for k, batch in enumerate(reader.batches(iter(large) if rank == READS else iter(()))):
        found += batch == large[k]
        if k == size:
            break
        reader.read_ahead()
        until_s = time.monotonic() + 0.1
        while rank == k and time.monotonic() < until_s:
            reader.go_on()
            time.sleep(0.01)
        dist.all_reduce(torch.tensor(1.0))
    reader.end()
    return found


def test_going_on_waits_for_nobody(ranks: WarmRanks) -> None:
    """A broadcast reaches some ranks by way of others, who have not asked for it yet."""
    assert ranks.run(4, _goes_on_alone, timeout=20) == [5] * 4
