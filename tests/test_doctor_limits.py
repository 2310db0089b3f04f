"""Open files and shared memory, against what loaders need."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lightning_hetero.doctor import (
    LoaderNeeds,
)
from lightning_hetero.errors import HeteroError
from tests.test_doctor_checks import GIB, MIB, ROOMY, found, rank, the_one


def test_shared_memory_of_64_mib():
    docker = replace(ROOMY, shared_total_bytes=64 * MIB, shared_free_bytes=64 * MIB)
    facts = [rank(0, limits=docker), rank(1, limits=docker)]
    finding = the_one(found(*facts))
    # two ranks with 8 workers each, of the 16 cores; a worker has 2 batches, and one is trained on
    needed = 2 * (8 * 2 + 1) * 32 * 3 * 224 * 224 * 4
    assert (finding.level, finding.check, finding.where) == ("warning", "limits", "node a (ranks 0-1)")
    assert f"64 MiB free of 64 MiB, about {needed / MIB:.4g} MiB are needed: 16 loader workers" in finding.what
    assert "assumed" in finding.what
    assert "--shm-size=1g" in finding.next_step
    # what the user says will be used decides
    given = the_one(found(*facts, needs=LoaderNeeds(workers=4, batch_bytes=8 * MIB)))
    assert (given.level, "assumed" in given.what) == ("error", False)
    assert found(*facts, needs=LoaderNeeds(workers=4, batch_bytes=MIB)) == []
    assert found(*facts, needs=LoaderNeeds(workers=0, batch_bytes=GIB)) == []
    assert found(rank(0), rank(1), needs=LoaderNeeds(workers=4, batch_bytes=GIB)) == []


def test_too_few_open_files():
    tight = replace(ROOMY, open_files=20, open_files_soft=64, open_files_hard=4096)
    needs = LoaderNeeds(workers=4, batch_bytes=MIB, tensors=3)
    finding = the_one(found(rank(0), rank(1, limits=tight), needs=needs))
    # 20 now, 4 workers with 2 x 3 tensors and 8 pipes, one peer with 2 connections
    assert "64 open files are allowed, about 78 are needed" in finding.what
    assert (finding.level, finding.where) == ("error", "node a (rank 1)")
    assert finding.next_step == "ulimit -n 4096 before the start"
    hard = replace(tight, open_files_hard=64)
    assert "hard limit of 78 or more" in the_one(found(rank(0), rank(1, limits=hard), needs=needs)).next_step
    unlimited = replace(tight, open_files_soft=None, open_files_hard=None)
    assert found(rank(0), rank(1, limits=unlimited), needs=needs) == []


def test_limits_that_cannot_be_read():
    finding = the_one(found(rank(0), rank(1, limits=None, unchecked={"limits": "no /proc"})))
    assert (finding.checked, finding.what) == (False, "not checked: open files and shared memory: no /proc")
    none = replace(ROOMY, shared_total_bytes=None, shared_free_bytes=None)
    assert "there is no /dev/shm" in the_one(found(rank(0, limits=none), rank(1, limits=none))).what


def test_needs_that_none_can_be():
    with pytest.raises(HeteroError) as raised:
        LoaderNeeds(workers=-1, batch_bytes=0, tensors=0)
    assert all(text in str(raised.value) for text in ("workers is -1", "batch_bytes is 0", "tensors is 0"))
