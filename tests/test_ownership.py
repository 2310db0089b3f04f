"""Ownership: every element's owners are summed together, whatever the layouts, and everyone agrees on the pieces."""

import itertools
import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_hetero.ownership import Ownership, Piece, Slice, shard_slices

SLICES = st.lists(
    st.builds(
        lambda rank, name, start, length: Slice(rank, name, start, start + length),
        st.integers(0, 5),
        st.sampled_from("ab"),
        st.integers(0, 30),
        st.integers(0, 12),
    ),
    max_size=12,
)


@given(SLICES)
def test_pieces_hold_exactly_the_elements_of_their_owners(slices):
    ownership = Ownership(slices)
    for name in "ab":
        owners = {
            element: tuple(sorted({s.rank for s in slices if s.parameter == name and s.start <= element < s.stop}))
            for element in range(50)
        }
        found = {}
        for piece in ownership.pieces.get(name, ()):
            assert piece.elements > 0
            for element in range(piece.start, piece.stop):
                assert element not in found
                found[element] = piece.owners
        assert found == {element: ranks for element, ranks in owners.items() if ranks}
        # as few pieces as there can be
        for left, right in itertools.pairwise(ownership.pieces.get(name, ())):
            assert left.owners != right.owners or left.stop < right.start


@given(SLICES, st.integers(0, 99))
def test_pieces_do_not_depend_on_the_order_of_the_slices(slices, seed):
    shuffled = list(slices)
    random.Random(seed).shuffle(shuffled)
    one, other = Ownership(slices), Ownership(shuffled)
    assert one.owner_sets == other.owner_sets
    assert one.pieces == other.pieces


@given(SLICES)
def test_what_a_rank_sums_is_what_it_owns_with_others(slices):
    ownership = Ownership(slices)
    for rank in range(6):
        pieces = [piece for name in "ab" for piece in ownership.of_rank(rank, name)]
        assert all(rank in piece.owners and piece.owners in ownership.owner_sets for piece in pieces)
        assert ownership.elements_summed(rank) == sum(piece.elements for piece in pieces)


@pytest.mark.parametrize("shape", [(7, 3), (1, 5), (8,), (3, 2, 2), (2, 4)])
@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_shards_are_those_of_torch_chunks(shape, size):
    whole = torch.arange(torch.Size(shape).numel()).view(shape)
    chunks = list(torch.chunk(whole, size, dim=0))
    chunks += [whole[:0]] * (size - len(chunks))
    for own, chunk in zip(shard_slices("p", shape, [tuple(range(size))]), chunks, strict=True):
        assert whole.flatten()[own.start : own.stop].tolist() == chunk.flatten().tolist()


def test_unequal_groups_are_cut_at_the_union_of_their_borders():
    ownership = Ownership(shard_slices("p", (6, 2), [(0, 1), (2, 3, 4)]))
    assert ownership.pieces["p"] == (
        Piece("p", 0, 4, (0, 2)),
        Piece("p", 4, 6, (0, 3)),
        Piece("p", 6, 8, (1, 3)),
        Piece("p", 8, 12, (1, 4)),
    )
    assert ownership.owner_sets == ((0, 2), (0, 3), (1, 3), (1, 4))
    assert [ownership.elements_summed(rank) for rank in range(5)] == [6, 6, 4, 4, 4]


def test_stages_of_two_pipelines_own_whole_units():
    cuts = {0: "a", 1: "bc", 2: "ab", 3: "c"}
    ownership = Ownership(Slice(rank, name, 0, 10) for rank, names in cuts.items() for name in names)
    assert ownership.owner_sets == ((0, 2), (1, 2), (1, 3))


def test_what_one_replica_holds_is_summed_with_nobody():
    ownership = Ownership(shard_slices("p", (6, 2), [(0, 1, 2)]))
    assert ownership.owner_sets == ()
    assert ownership.elements_summed(0) == 0
