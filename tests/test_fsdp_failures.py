"""One rank fails: all ranks end, quickly, with that rank's message."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from lightning_hetero import checkpoint as state_io
from lightning_hetero.strategies import HeteroFSDPStrategy
from tests.fits import Classifier, Fit, cluster_for, dataset, plan_for
from tests.harness import WarmRanks
from tests.test_fsdp_checkpoints import EveryStep, hetero, one_device

SECONDS = 30.0
"""until all ranks have ended; most of it is for a machine that does other things as well"""


class _FailsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise ArithmeticError("broken in backward")


class Breaking(Classifier):
    """Fails on one rank at one step."""

    def __init__(self, where: str, rank: int, step: int = 2) -> None:
        super().__init__("mlp")
        self.where, self.at_rank, self.at_step = where, rank, step

    def due(self, where: str) -> bool:
        return self.where == where and self.trainer.global_rank == self.at_rank and self.global_step >= self.at_step

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        if self.due("training_step"):
            raise ArithmeticError("broken in training_step")
        if self.due("kill"):
            os.kill(os.getpid(), signal.SIGKILL)
        loss = super().training_step(batch, batch_idx)
        return _FailsInBackward.apply(loss) if self.due("backward") else loss  # type: ignore[no-any-return]

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        if self.due("validation_step"):
            raise ArithmeticError("broken in validation_step")
        self.log("val_loss", self(batch[0]).mean(), sync_dist=True)


class BreakingCallback(pl.Callback):
    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, *args: Any) -> None:
        if module.due("callback"):
            raise ArithmeticError("broken in callback")


class BreakingData(Dataset[Any]):
    """Fails from the ``after``-th sample on, which one rank alone reads."""

    def __init__(self, fails: bool, after: int) -> None:
        self.data, self.fails, self.after = dataset(40, "32-true"), fails, after

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Any:
        if self.fails and index >= self.after:
            raise ArithmeticError("broken in dataset")
        return self.data[index]


def fit(where: str, culprit: int, shares: tuple[int, ...], workers: int = 0) -> float:
    described = Fit("mlp", shares=shares)
    strategy = HeteroFSDPStrategy(
        cluster=cluster_for(described.ranks), plan=plan_for(described), check_loss="off", summary=False
    )
    trainer = pl.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=described.ranks,
        max_epochs=1,
        num_sanity_val_steps=0,
        val_check_interval=3,
        callbacks=[BreakingCallback()],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    fails = where == "dataset" and trainer.global_rank == culprit
    # with 4 samples a step, the third step reads samples 8 to 11
    train = DataLoader(BreakingData(fails, after=8), batch_size=1, num_workers=workers)
    val = DataLoader(dataset(8, "32-true"), batch_size=2)
    try:
        trainer.fit(Breaking(where, culprit), train, val)
    except BaseException as error:
        # a caller who goes on after the error: neither threads nor the grace period may end this process
        if any(thread.name == "hetero-failure-watch" for thread in threading.enumerate()):
            raise AssertionError("the failure watch is still running") from error
        raise
    return 0.0


def assert_ended(
    ranks: WarmRanks, where: str, culprit: int, shares: tuple[int, ...], stage: str, workers: int = 0
) -> None:
    began = time.monotonic()
    outcomes = ranks.run_outcomes(
        len(shares), fit, where, culprit, shares, workers, timeout=2 * SECONDS, process_group=False
    )
    took_s = time.monotonic() - began
    for rank, (status, *rest) in enumerate(outcomes):
        assert status == "error", outcomes
        kind, message = rest
        assert f"broken in {where}" in message, outcomes
        if rank == culprit:
            assert kind == "ArithmeticError", outcomes
        else:
            assert kind == "RankFailedError", outcomes
            assert message.startswith(f"rank {culprit} failed in {stage}: ArithmeticError: "), message
            assert "test_fsdp_failures.py:" in message or workers, message  # where, in the user's own file
    assert took_s < SECONDS


@pytest.mark.parametrize("culprit", [0, 1, 2])
def test_any_rank_that_raises_in_a_step_ends_all(ranks: WarmRanks, culprit: int) -> None:
    assert_ended(ranks, "training_step", culprit, (2, 1, 1), "train, step 2")


@pytest.mark.parametrize(
    ("where", "culprit", "stage", "workers"),
    [
        ("backward", 1, "train, step 2", 0),
        ("dataset", 0, "train, step 2", 0),
        ("dataset", 1, "train, step 2", 1),
        ("validation_step", 1, "validate, step 3", 0),
        ("callback", 0, "train, step 2", 0),
    ],
)
def test_wherever_a_rank_raises(ranks: WarmRanks, where: str, culprit: int, stage: str, workers: int) -> None:
    assert_ended(ranks, where, culprit, (3, 1), stage, workers)


@pytest.mark.parametrize("killed", [0, 1])
def test_a_killed_rank_ends_the_others(ranks: WarmRanks, killed: int) -> None:
    began = time.monotonic()
    outcomes = ranks.run_outcomes(3, fit, "kill", killed, (2, 1, 1), timeout=2 * SECONDS, process_group=False)
    took_s = time.monotonic() - began
    assert outcomes[killed][:2] == ("error", "RankDied")
    for rank, (status, *rest) in enumerate(outcomes):
        if rank == killed:
            continue
        assert (status, rest[0]) == ("error", "RankFailedError"), outcomes
        assert rest[1].startswith(f"rank {killed} failed in train, step 2: its process ended without a word"), outcomes
    assert took_s < SECONDS


# -- started by launchers ----------------------------------------------------------------------------------------------

SCRIPT = textwrap.dedent(
    """
    import os, signal, sys
    import lightning.pytorch as pl
    import torch
    from torch.utils.data import DataLoader, TensorDataset
    import lightning_hetero

    class Module(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = torch.nn.Linear(4, 2)
        def training_step(self, batch, batch_idx):
            if self.global_step == 2 and self.global_rank == int(sys.argv[1]):
                print("pids", os.getpid(), os.getppid(), flush=True)
                if sys.argv[2] == "kill":
                    os.kill(os.getpid(), signal.SIGKILL)
                raise ArithmeticError("broken on purpose")
            return self.model(batch[0]).square().mean()
        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.1)

    if __name__ == "__main__":
        torch.set_num_threads(1)
        loader = DataLoader(TensorDataset(torch.randn(64, 4)), batch_size=4)
        pl.Trainer(strategy="hetero_fsdp", max_epochs=1, logger=False, enable_checkpointing=False,
                   enable_progress_bar=False, enable_model_summary=False).fit(Module(), loader)
        print("trained", flush=True)
    """
)

CLUSTER = """
schema: 1
name: pair
emulate: true
nodes:
  - name: n
    devices: [{type: fast, memory: 2 GiB, speed: 2 GFLOP/s}, {type: slow, memory: 2 GiB, speed: 1 GFLOP/s}]
"""


@pytest.mark.parametrize(
    ("culprit", "how", "launcher"),
    [
        pytest.param(1, "raise", "lightning", marks=pytest.mark.slow),
        pytest.param(0, "kill", "lightning", marks=pytest.mark.slow),
        pytest.param(0, "raise", "lightning", marks=pytest.mark.slow),
        pytest.param(1, "kill", "lightning", marks=pytest.mark.slow),
        pytest.param(1, "kill", "torchrun", marks=pytest.mark.slow),
    ],
)
def test_the_launcher_ends_with_the_failing_ranks_message(
    tmp_path: Path, culprit: int, how: str, launcher: str
) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "pair.yaml").write_text(CLUSTER)
    root = str(Path(__file__).parents[1])
    path = os.pathsep.join([root, os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "LIGHTNING_HETERO_CLUSTER": "pair.yaml", "OMP_NUM_THREADS": "1"}
    torchrun = (
        ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"] if launcher == "torchrun" else []
    )
    command = [sys.executable, *torchrun, "train.py", str(culprit), how]
    with (tmp_path / "out").open("w+") as out:
        # not a pipe: an orphan that holds it open would be waited for, and go unnoticed
        process = subprocess.Popen(
            command, cwd=tmp_path, env=environment, stdout=out, stderr=out, start_new_session=True
        )
        try:
            code = process.wait(timeout=90)
            # the others end by themselves, within seconds: they learn of it from their connection to the failed one
            deadline = time.monotonic() + 10
            while (orphans := _members(process.pid)) and time.monotonic() < deadline:
                time.sleep(0.2)
        finally:
            if _members(process.pid):
                os.killpg(process.pid, signal.SIGKILL)
        out.seek(0)
        text = out.read()
    assert code != 0, text
    assert "trained" not in text
    if how == "raise":
        assert "ArithmeticError: broken on purpose" in text, text
        assert f"RankFailedError: rank {culprit} failed in train, step 2: ArithmeticError: broken on purpose" in text, (
            text
        )
    else:
        assert f"RankFailedError: rank {culprit} failed in train, step 2: its process ended without a word" in text, (
            text
        )
    assert not orphans, text


def _members(group: int) -> list[int]:
    """The processes of a process group, zombies aside."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[2]) == group and fields[0] != "Z":
            found.append(int(stat.parent.name))
    return found


# -- what is left to go on with ----------------------------------------------------------------------------------------

FIT = Fit("mlp", shares=(1, 1, 2), samples=18)  # 5 global batches an epoch
DIES_AT = 4


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def hetero_killed(when: str, culprit: int, folder: str, sharded: bool) -> None:
    """A fit that saves every step; the culprit is killed after a step, or while that step is saved."""
    rank = int(os.environ["RANK"])
    torch_save, dcp_save = torch.save, state_io.save
    now = [False]

    def save(self: Any, trainer: pl.Trainer, *args: Any) -> None:
        now[0] = trainer.global_step == DIES_AT and rank == culprit and when == "saving"
        trainer.save_checkpoint(f"{folder}/last.ckpt")
        if trainer.global_step == DIES_AT and rank == culprit:
            die()

    def half_a_file(state: Any, file: Any, *args: Any, **kwargs: Any) -> None:
        if now[0] and hasattr(file, "write"):
            file.write(b"half a file")
            file.flush()
            die()
        torch_save(state, file, *args, **kwargs)

    def half_a_folder(state: Any, checkpoint_id: Any, **kwargs: Any) -> None:
        if now[0]:
            (Path(checkpoint_id) / f"__{rank}_0.distcp").write_bytes(b"half a file")
            die()
        dcp_save(state, checkpoint_id=checkpoint_id, **kwargs)

    EveryStep.on_train_batch_end = save  # type: ignore[assignment]
    torch.save, state_io.save = half_a_file, half_a_folder  # type: ignore[assignment]
    hetero(FIT, 12, folder, None, sharded)


@pytest.mark.parametrize(
    ("when", "culprit", "sharded", "left"),
    [
        ("step", 2, False, DIES_AT),
        pytest.param("step", 0, True, DIES_AT, marks=pytest.mark.slow),
        pytest.param("saving", 0, False, DIES_AT - 1, marks=pytest.mark.slow),
        pytest.param("saving", 1, True, DIES_AT - 1, marks=pytest.mark.slow),
        pytest.param("saving", 0, True, DIES_AT - 1, marks=pytest.mark.slow),
    ],
)
def test_a_relaunch_on_fewer_ranks_goes_on(
    ranks: WarmRanks, tmp_path: Path, when: str, culprit: int, sharded: bool, left: int
) -> None:
    """From the last whole checkpoint, to the loss curve of one device that was never stopped."""
    straight = one_device(FIT, 12, str(tmp_path / "one"))
    outcomes = ranks.run_outcomes(
        3, hetero_killed, when, culprit, str(tmp_path / "a"), sharded, timeout=2 * SECONDS, process_group=False
    )
    for rank, (status, *rest) in enumerate(outcomes):
        assert status == "error", outcomes
        assert rest[0] == ("RankDied" if rank == culprit else "RankFailedError"), outcomes
        assert rank == culprit or rest[1].startswith(f"rank {culprit} failed in train, step {DIES_AT}:"), outcomes
    remaining = FIT.on(shares=(3, 1))
    path = str(tmp_path / "a" / "last.ckpt")
    assert Path(path).is_dir() == sharded
    for result in ranks.run(2, hetero, remaining, 12, str(tmp_path / "b"), path, sharded):
        assert result["losses"] == pytest.approx(straight["losses"][left:], abs=1e-12)
        for name, value in straight["parameters"].items():
            assert torch.allclose(result["parameters"][name], value, rtol=0, atol=1e-12), name
