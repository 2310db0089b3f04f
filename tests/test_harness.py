"""The warm ranks do what every other test relies on."""

from __future__ import annotations

import ctypes
import os
import time
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.harness import RankFailedError, RanksTimedOutError, WarmRanks


def _sum_of_ranks(offset: int) -> tuple[int, float]:
    value = torch.tensor([float(dist.get_rank() + offset)])
    dist.all_reduce(value)
    return dist.get_rank(), value.item()


def _raise_on(rank: int, then_collective: bool) -> str:
    if dist.get_rank() == rank:
        raise LookupError(f"rank {rank} lost its keys")
    if then_collective:
        dist.barrier()
    return "fine"


def _hang_on(rank: int) -> None:
    if dist.get_rank() == rank:
        _sleep_for_ever()


def _sleep_for_ever() -> None:
    time.sleep(3600)


def _die() -> None:
    if dist.get_rank() == 1:
        os._exit(7)
    dist.barrier()


def _dirty() -> None:
    torch.set_default_dtype(torch.float64)
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(99)
    os.environ["PL_GLOBAL_SEED"] = "99"
    warnings.simplefilter("ignore")
    Path("left-behind").touch()
    dist.barrier()


def _state() -> dict[str, object]:
    dist.barrier()
    return {
        "dtype": str(torch.get_default_dtype()),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "seed": torch.initial_seed(),
        "global_seed": os.environ.get("PL_GLOBAL_SEED"),
        "files": sorted(p.name for p in Path.cwd().iterdir()),
        "threads": torch.get_num_threads(),
    }


def _share_a_file() -> list[str]:
    Path(f"from-{dist.get_rank()}").touch()
    dist.barrier()
    return sorted(p.name for p in Path.cwd().iterdir())


def _warn() -> None:
    warnings.warn("careful", UserWarning, stacklevel=1)


def _cluster_environment() -> tuple[str, int, int, int, bool]:
    from lightning.fabric.utilities.rank_zero import rank_zero_only
    from lightning.pytorch import Trainer

    trainer = Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    environment = trainer.strategy.cluster_environment
    name, rank = type(environment).__name__, environment.global_rank()
    return name, rank, environment.world_size(), rank_zero_only.rank, dist.is_initialized()


@pytest.mark.parametrize("world_size", [1, 2, 4, 5])
def test_results_come_by_rank(ranks: WarmRanks, world_size: int) -> None:
    total = sum(range(world_size)) + 10 * world_size
    assert ranks.run(world_size, _sum_of_ranks, 10) == [(rank, total) for rank in range(world_size)]


def test_the_first_failure_is_told_with_its_traceback(ranks: WarmRanks) -> None:
    with pytest.raises(RankFailedError, match="rank 2 failed first: LookupError") as told:
        ranks.run(3, _raise_on, 2, then_collective=True)
    assert told.value.rank == 2
    assert told.value.error_type == "LookupError"
    assert "in _raise_on" in str(told.value)
    # peers of a dead rank fail in their collective: they end, and are not mistaken for the cause
    assert [o.status for o in told.value.outcomes][2] == "error"


def test_outcomes_of_a_failure(ranks: WarmRanks) -> None:
    outcomes = ranks.run_outcomes(3, _raise_on, 1, then_collective=False)
    assert outcomes == [("ok", "fine"), ("error", "LookupError", "rank 1 lost its keys"), ("ok", "fine")]


def test_a_hang_is_killed_and_shown(ranks: WarmRanks) -> None:
    start_s = time.monotonic()
    with pytest.raises(RanksTimedOutError, match="ranks 1 were still running after 1 s") as told:
        ranks.run(2, _hang_on, 1, timeout=1)
    assert time.monotonic() - start_s < 10
    assert told.value.running == (1,)
    assert "_sleep_for_ever" in str(told.value)
    assert ranks.run(2, _sum_of_ranks, 0) == [(0, 1.0), (1, 1.0)]


def test_a_rank_that_dies_is_a_failure(ranks: WarmRanks) -> None:
    with pytest.raises(RankFailedError) as told:
        ranks.run(2, _die)
    assert ("error", "RankDied", "the process ended without a result, exit code 7") in [
        o.short for o in told.value.outcomes
    ]


def test_nothing_leaks_between_jobs(ranks: WarmRanks) -> None:
    before = ranks.run(2, _state)
    ranks.run(2, _dirty)
    assert ranks.run(2, _state) == before
    assert before[0]["threads"] == 1
    assert before[0]["files"] == []


def test_the_working_directory_is_shared(ranks: WarmRanks) -> None:
    assert ranks.run(2, _share_a_file) == [["from-0", "from-1"]] * 2


def test_warnings_are_errors_in_ranks(ranks: WarmRanks) -> None:
    assert ranks.run_outcomes(1, _warn) == [("error", "UserWarning", "careful")]


def test_lightning_sees_torchrun(ranks: WarmRanks) -> None:
    told = ranks.run(2, _cluster_environment)
    assert told == [("TorchElasticEnvironment", rank, 2, rank, True) for rank in range(2)]


def test_the_process_group_can_be_left_to_the_function(ranks: WarmRanks) -> None:
    assert ranks.run(1, dist.is_initialized, process_group=False) == [False]


def test_a_warm_job_is_quick(ranks: WarmRanks) -> None:
    ranks.run(2, _sum_of_ranks, 0)
    start_s = time.monotonic()
    for _ in range(3):
        ranks.run(4, _sum_of_ranks, 0)
    # 0.1 s a job on an idle machine; the bound leaves room for a busy one
    assert (time.monotonic() - start_s) / 3 < 3


def break_memory(times: int, counted: Path) -> int:
    """Rank 1 breaks memory in the first so many runs."""
    if dist.get_rank() == 1:
        counted.write_text(counted.read_text() + "x")
        if len(counted.read_text()) <= times:
            ctypes.string_at(0)  # a real one: a signal sent by kill may come when the rank has long returned
    return dist.get_rank()


@pytest.mark.parametrize("times", [1, 2])
def test_a_rank_that_breaks_memory_is_run_again_once(pytestconfig: pytest.Config, tmp_path: Path, times: int) -> None:
    counted = tmp_path / "runs"
    counted.write_text("")
    own = WarmRanks(Path(str(pytestconfig.rootpath)))
    if times == 1:
        assert own.run(2, break_memory, times, counted) == [0, 1]
    else:
        with pytest.raises(RankFailedError, match="exit code -11"):
            own.run(2, break_memory, times, counted)
    assert len(counted.read_text()) == 2
    assert len(own.crashes) == 1
    assert "in break_memory" in own.crashes[0]  # the stack that faulthandler wrote
