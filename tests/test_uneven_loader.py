"""The uneven loader in one process: what all ranks read together, resumption, and what of the user's it keeps."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, WeightedRandomSampler

from lightning_hetero.data import UnevenLoader, batch_size_of, can_be_split
from lightning_hetero.errors import DataError
from lightning_hetero.kept import KeptLoader, SizedKeptLoader
from lightning_hetero.plan import ShardPlan
from lightning_hetero.strategies.loss_check import cut


@dataclass
class Pair:
    name: str
    x: torch.Tensor


class Numbers(Dataset[int]):
    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        return index


def plan(*shares: int) -> ShardPlan:
    return ShardPlan(sum(shares), shares, (tuple(range(len(shares))),), ("d",) * len(shares))


def uneven(loader: DataLoader[Any], rank: int, shares: tuple[int, ...], sizes: list[Any] | None = None) -> UnevenLoader:
    return UnevenLoader(
        loader,
        rank=rank,
        global_batch_size=sum(shares),
        split=plan(*shares).samples,
        seed=5,
        announce=(sizes if sizes is not None else []).append,
        agree=lambda number: (number,) * len(shares),
    )


def all_ranks(make: Any, shares: tuple[int, ...], epoch: int = 0) -> list[list[list[int]]]:
    """Per step, per rank, the samples read; ranks without samples read one and it is left out."""
    steps: list[list[list[int]]] = []
    for rank in range(len(shares)):
        sizes: list[tuple[int, ...]] = []
        loader = uneven(make(), rank, shares, sizes)
        loader.set_epoch(epoch)
        batches = [batch.tolist() for batch in loader]
        assert len(batches) == len(loader) == len(sizes)
        for step, (batch, size) in enumerate(zip(batches, sizes, strict=True)):
            assert len(batch) == max(1, size[rank])
            if rank == 0:
                steps.append([])
            steps[step].append(batch if size[rank] else [])
    return steps


def permutation(length: int, epoch: int) -> list[int]:
    generator = torch.Generator()
    generator.manual_seed(5 + epoch)
    return torch.randperm(length, generator=generator).tolist()


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("epoch", [0, 3])
def test_ranks_together_read_the_global_batches_in_order(workers: int, epoch: int) -> None:
    shares = (5, 2, 1, 4)
    make = lambda: DataLoader(Numbers(50), batch_size=3, shuffle=True, num_workers=workers)  # noqa: E731
    order = permutation(50, epoch)
    together = [sum(step, []) for step in all_ranks(make, shares, epoch)]
    assert together == [order[i : i + 12] for i in range(0, 50, 12)]


def test_order_does_not_depend_on_ranks_or_shares() -> None:
    make = lambda: DataLoader(Numbers(31), batch_size=1, shuffle=True)  # noqa: E731
    flat = {
        shares: [sum(step, []) for step in all_ranks(make, shares)] for shares in [(6,), (1, 5), (2, 2, 2), (4, 1, 1)]
    }
    assert len({str(value) for value in flat.values()}) == 1


def test_sequential_stays_sequential_and_drop_last_drops() -> None:
    make = lambda: DataLoader(Numbers(10), batch_size=2, drop_last=True)  # noqa: E731
    assert all_ranks(make, (3, 1)) == [[[0, 1, 2], [3]], [[4, 5, 6], [7]]]


def test_a_short_last_batch_is_split_and_may_leave_a_rank_without() -> None:
    steps = all_ranks(lambda: DataLoader(Numbers(7), batch_size=2), (4, 1, 1))
    assert steps[-1] == [[6], [], []]


def test_position_counts_what_was_handed_out_not_what_workers_read_ahead() -> None:
    whole = [b.tolist() for b in uneven(DataLoader(Numbers(40), 4, shuffle=True), 1, (3, 1))]
    loader = uneven(DataLoader(Numbers(40), 4, shuffle=True, num_workers=2, prefetch_factor=3), 1, (3, 1))
    iterator = iter(loader)
    read = [next(iterator).tolist() for _ in range(3)]
    state = loader.state_dict()
    assert state == {"epoch": 0, "consumed": 3}
    again = uneven(DataLoader(Numbers(40), 4, shuffle=True), 1, (3, 1))
    again.load_state_dict(state)
    again.set_epoch(0)  # Lightning calls this before every epoch
    assert read + [b.tolist() for b in again] == whole
    # the next epoch starts at its beginning
    again.set_epoch(1)
    assert len(list(again)) == len(again)


def test_a_finished_epoch_is_not_resumed_at_its_end() -> None:
    loader = uneven(DataLoader(Numbers(8), 2), 0, (3, 1))
    assert len(list(loader)) == 2
    assert loader.state_dict()["consumed"] == 0


def test_users_loader_is_kept_but_for_the_batches() -> None:
    class Mine(DataLoader[Any]):
        pass

    theirs = Mine(Numbers(12), batch_size=4, collate_fn=lambda items: {"x": torch.tensor(items)}, num_workers=0)
    loader = uneven(theirs, 0, (3, 1))
    assert isinstance(loader.loader, Mine)
    assert [b["x"].tolist() for b in loader] == [[0, 1, 2], [4, 5, 6], [8, 9, 10]]
    assert [b["x"].tolist() for b in theirs] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]


def test_a_users_sampler_is_seeded_by_epoch() -> None:
    def make() -> DataLoader[Any]:
        return DataLoader(Numbers(9), 3, sampler=WeightedRandomSampler([1.0] * 9, 12))

    first, again, later = (all_ranks(make, (2, 1), epoch) for epoch in (0, 0, 1))
    assert first == again != later
    assert sum(len(b) for step in first for b in step) == 12


def test_samplers_that_disagree_are_refused() -> None:
    class Odd(Sampler[int]):
        def __len__(self) -> int:
            return 4

        def __iter__(self) -> Iterator[int]:
            return iter(range(4))

    loader = uneven(DataLoader(Numbers(4), 2, sampler=Odd()), 0, (1, 1))
    loader._agree = lambda number: (number, number + 1)
    with pytest.raises(DataError, match="Odd gives different orders on different ranks"):
        next(iter(loader))


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(5))


def test_kept_loaders_end_with_the_shortest_rank() -> None:
    # the other rank has batches of 3, 1 and then none
    others = iter([3, 1, -1])
    sizes: list[tuple[int, ...]] = []
    loader = KeptLoader(
        DataLoader(Stream(), batch_size=2), announce=sizes.append, agree=lambda own: (own, next(others))
    )
    assert [b.tolist() for b in loader] == [[0, 1], [2, 3]]
    assert sizes == [(2, 3), (2, 1)]
    with pytest.raises(TypeError):
        len(loader)  # type: ignore[arg-type]


def test_kept_loaders_have_the_shortest_length() -> None:
    loader = SizedKeptLoader([torch.ones(2)] * 4, announce=lambda sizes: None, agree=lambda own: (own, 3))
    assert len(loader) == 3


def test_what_can_be_split() -> None:
    assert can_be_split(DataLoader(Numbers(3)))
    assert not can_be_split(DataLoader(Stream()))
    assert not can_be_split(DataLoader(Numbers(3), batch_sampler=[[0], [1, 2]]))
    assert not can_be_split(DataLoader(Numbers(3), batch_size=None))
    assert not can_be_split([1, 2])


@pytest.mark.parametrize(
    ("batch", "samples"),
    [
        (torch.zeros(4, 2), 4),
        ({"text": ["a", "b", "c"], "y": torch.zeros(3)}, 3),
        ([torch.tensor(1.0), (torch.zeros(5, 1), torch.zeros(5))], 5),
        ("text", 1),
        (Pair("a", torch.zeros(6, 2)), 6),
        (Pair, 1),
    ],
)
def test_batch_size_is_read_off_the_first_tensor(batch: Any, samples: int) -> None:
    assert batch_size_of(batch) == samples


def test_a_dataclass_is_cut_like_other_batches() -> None:
    whole = Pair("a", torch.arange(6))
    part = cut(whole, 6, 2, 5)
    assert (part.name, part.x.tolist()) == ("a", [2, 3, 4])
    assert whole.x.tolist() == list(range(6))
