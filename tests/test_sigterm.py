"""SIGTERM to any rank: all ranks end after the same batch, with time to save; no process is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_hetero.cluster import Cluster, Device
from lightning_hetero.strategies import HeteroFSDPStrategy, HeteroPipelineStrategy
from lightning_hetero.strategies.parent import ParentWatch
from lightning_hetero.strategies.peers import Process
from lightning_hetero.strategies.termination import Termination
from tests.fits import Classifier, Fit, Validated, cluster_for, dataset, plan_for
from tests.harness import WarmRanks
from tests.pipe_fits import PipeFit, pictures
from tests.pipe_fits import Validated as ValidatedPictures
from tests.test_fsdp_failures import CLUSTER, _members

# -- how ranks agree ---------------------------------------------------------------------------------------------------


class FakeStore:
    """What the ranks of one process know of each other."""

    def __init__(self) -> None:
        self.values: dict[str, str] = {}

    def add(self, key: str, number: int) -> int:
        self.values[key] = str(int(self.values.get(key, "0")) + number)
        return int(self.values[key])

    def set(self, key: str, value: str) -> None:
        self.values[key] = value

    def check(self, keys: list[str]) -> bool:
        return all(key in self.values for key in keys)

    def get(self, key: str) -> bytes:
        return self.values[key].encode()

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        raise NotImplementedError


def make(ranks: int, **options: Any) -> tuple[list[Termination], list[str]]:
    store, said = FakeStore(), list[str]()
    made = [
        Termination(store, rank, ranks, give_up=said.append, failed=lambda: None, **options) for rank in range(ranks)
    ]
    return made, said


def test_ranks_at_different_batches_end_after_the_same_one() -> None:
    (ahead, behind), said = make(2)
    assert not any([ahead.end_batch(), ahead.end_batch(), behind.end_batch()])
    behind.ask()
    for each in (behind, ahead, behind):
        each.look()
    assert [ahead.end_batch(), behind.end_batch(), behind.end_batch()] == [True, False, True]
    assert ahead.is_due
    assert behind.is_due
    assert said == []


def test_a_rank_waits_at_a_batchs_end_for_what_is_agreed() -> None:
    (first, second), _ = make(2)
    first.ask()
    first.look()
    heard: list[bool] = []
    waiting = threading.Thread(target=lambda: heard.append(first.end_batch()), daemon=True)
    waiting.start()
    waiting.join(0.2)
    assert waiting.is_alive()  # the second may be in the batch after this one
    second.look()
    first.look()
    waiting.join(5)
    assert heard == [True]


def test_nothing_is_agreed_on_with_a_rank_that_failed() -> None:
    store = FakeStore()
    alone = Termination(store, 0, 2, give_up=lambda why: None, failed=lambda: "rank 1 failed")
    alone.ask()
    alone.look()
    assert alone.end_batch() is False


def test_a_rank_whose_batch_does_not_end_gives_up() -> None:
    (first, _), said = make(2, patience_s=-1e-9)
    first.ask()
    first.look()
    assert said[:1] == ["SIGTERM: no batch has ended within -0 s, so it ends in mid-batch"]


def test_two_runs_over_one_store_do_not_hear_each_other() -> None:
    store = FakeStore()
    rest: dict[str, Any] = {"give_up": print, "failed": lambda: None}
    before, after = (Termination(store, 0, 1, **rest) for _ in range(2))
    before.ask()
    before.look()
    after.look()
    assert before.end_batch() is True
    assert after.end_batch() is False


# -- in a Trainer ------------------------------------------------------------------------------------------------------


class Signals(pl.Callback):
    """Sends SIGTERM to its own rank, if that is the one, in the ``at``-th batch of a loop; counts batches."""

    def __init__(self, loop: str, rank: int, at: int) -> None:
        self.loop, self.rank, self.at = loop, rank, at
        self.begun = {"train": 0, "validation": 0, "predict": 0}

    def count(self, loop: str, trainer: pl.Trainer) -> None:
        self.begun[loop] += 1
        if (loop, self.begun[loop], trainer.global_rank) == (self.loop, self.at, self.rank):
            os.kill(os.getpid(), signal.SIGTERM)

    def on_train_batch_start(self, trainer: pl.Trainer, *args: Any) -> None:
        self.count("train", trainer)

    def on_validation_batch_start(self, trainer: pl.Trainer, *args: Any) -> None:
        self.count("validation", trainer)

    def on_exception(self, trainer: pl.Trainer, module: Any, exception: BaseException) -> None:
        if trainer.training and isinstance(exception, SystemExit):
            trainer.save_checkpoint("interrupted.ckpt")

    def on_predict_batch_start(self, trainer: pl.Trainer, *args: Any) -> None:
        self.count("predict", trainer)


class Slow(Validated):
    """Takes some time for each batch, so that there are batches left when the signal is heard."""

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        time.sleep(0.05)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        time.sleep(0.05)
        super().validation_step(batch, batch_idx)

    def predict_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        time.sleep(0.05)
        return self(batch[0])


class SlowPictures(ValidatedPictures):
    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        time.sleep(0.05)
        super().validation_step(batch, batch_idx)


def ended(what: Callable[[pl.Trainer], object], trainer: pl.Trainer, signals: Signals) -> dict[str, Any]:
    began_s = time.monotonic()
    try:
        what(trainer)
    except SystemExit as error:
        how = type(error).__name__
    else:
        how = "to its end"
    assert not [thread for thread in threading.enumerate() if thread.name == "hetero-failure-watch"]
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    return {"how": how, "begun": signals.begun, "step": trainer.global_step, "took_s": time.monotonic() - began_s}


def run(loop: str, rank: int, pipe: bool = False) -> dict[str, Any]:
    signals = Signals(loop, rank, at=3)
    described = Fit("mlp", shares=(2, 1), precision="32-true")
    plan = PipeFit(cuts=((5, 5),), samples=800) if pipe else None
    strategy: Any = (
        HeteroPipelineStrategy(Cluster("c", (Device("cpu", "n", 2**34, None),) * 2), plan=plan.plan(), summary=False)
        if plan
        else HeteroFSDPStrategy(cluster_for(2), plan=plan_for(described), check_loss="off", summary=False)
    )
    trainer = pl.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=2,
        max_epochs=1,
        num_sanity_val_steps=0,
        val_check_interval=1.0 if loop == "train" else 2,
        callbacks=[signals],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    if plan:
        model: Any = SlowPictures()
        train = val = DataLoader(pictures(800, torch.float32), batch_size=plan.batch)
    else:
        model = Slow("mlp")
        train = DataLoader(dataset(900, "32-true"), batch_size=1)
        val = DataLoader(dataset(900, "32-true"), batch_size=8)
    if loop == "predict":
        return ended(lambda t: t.predict(model, val), trainer, signals)
    return ended(lambda t: t.fit(model, train, val), trainer, signals)


@pytest.mark.parametrize(
    ("loop", "rank", "pipe"),
    [
        ("train", 0, False),
        pytest.param("train", 1, False, marks=pytest.mark.slow),
        pytest.param("validation", 1, False, marks=pytest.mark.slow),
        pytest.param("predict", 0, False, marks=pytest.mark.slow),
        ("validation", 0, True),
    ],
)
def test_all_ranks_end_after_the_same_batch(ranks: WarmRanks, loop: str, rank: int, pipe: bool) -> None:
    results = ranks.run(2, run, loop, rank, pipe, process_group=False)
    first, second = results
    assert [each["how"] for each in results] == ["SIGTERMException"] * 2
    assert first["begun"] == second["begun"]
    assert first["step"] == second["step"]
    assert 3 <= first["begun"][loop] < 100
    assert max(each["took_s"] for each in results) < 15


def interrupted() -> list[Any]:
    run("train", 1)
    saved = torch.load("interrupted.ckpt", weights_only=False)
    return [saved["global_step"], sorted(saved["state_dict"])]


def test_ranks_save_together_before_they_end(ranks: WarmRanks) -> None:
    first, second = ranks.run(2, interrupted, process_group=False)
    assert first == second
    assert first[0] >= 3
    assert first[1] == [f"model.{n}.{what}" for n in (1, 3, 5) for what in ("bias", "weight")]


def ends_before() -> None:
    """The signal comes in the last batch: the fit is over before anything can be agreed on."""
    described = Fit("mlp", shares=(2, 1), precision="32-true")
    strategy = HeteroFSDPStrategy(cluster_for(2), plan=plan_for(described), check_loss="off", summary=False)
    trainer = pl.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=2,
        max_steps=3,
        callbacks=[Signals("train", 1, at=3)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Classifier("mlp"), DataLoader(dataset(30, "32-true"), batch_size=1))


@pytest.mark.slow
def test_a_signal_at_the_end_of_a_fit_is_obeyed_after_it(ranks: WarmRanks) -> None:
    (status, *_), (other, kind, _) = ranks.run_outcomes(2, ends_before, process_group=False)
    assert status == "ok"
    assert (other, kind) == ("error", "RankDied")


# -- processes ---------------------------------------------------------------------------------------------------------

SCRIPT = textwrap.dedent(
    """
    import sys, time
    import lightning.pytorch as pl
    import torch
    from torch.utils.data import DataLoader, TensorDataset
    import lightning_hetero

    class Module(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = torch.nn.Linear(4, 2)
        def training_step(self, batch, batch_idx):
            if self.global_step == 2:
                print("training", flush=True)
            if sys.argv[1] == "stuck" and self.global_rank == 1 and self.global_step == 3:
                time.sleep(1000)
            time.sleep(0.02)
            return self.model(batch[0]).square().mean()
        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.1)

    if __name__ == "__main__":
        torch.set_num_threads(1)
        trainer = pl.Trainer(strategy="hetero_fsdp", max_epochs=100, logger=False, enable_checkpointing=False,
                             enable_progress_bar=False, enable_model_summary=False)
        if sys.argv[1] == "early" and trainer.local_rank == 0:
            trainer.strategy.setup_environment = lambda: (print("training", flush=True), time.sleep(1000))
        trainer.fit(Module(), DataLoader(TensorDataset(torch.randn(6400, 4)), batch_size=4))
        print("trained", flush=True)
    """
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("when", "number", "limit_s"),
    [
        ("train", signal.SIGTERM, 15),
        ("stuck", signal.SIGTERM, 30),  # the ranks wait for 10 s for the batch to end
        ("early", signal.SIGTERM, 15),
        ("early", signal.SIGKILL, 15),
        ("train", signal.SIGKILL, 25),  # rank 1 gets 10 s to end by itself
    ],
)
def test_no_process_is_left(tmp_path: Path, when: str, number: signal.Signals, limit_s: float) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "pair.yaml").write_text(CLUSTER)
    path = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "LIGHTNING_HETERO_CLUSTER": "pair.yaml", "OMP_NUM_THREADS": "1"}
    with (tmp_path / "out").open("w") as out:
        process = subprocess.Popen(
            [sys.executable, "train.py", when],
            cwd=tmp_path,
            env=environment,
            stdout=out,
            stderr=out,
            start_new_session=True,
        )
    try:
        _wait(lambda: "training" in (tmp_path / "out").read_text() and len(_members(process.pid)) == 2, 90)
        time.sleep(3 if when == "early" else 1)  # rank 1 waits for rank 0, or hangs
        began_s = time.monotonic()
        os.kill(process.pid, number)
        _wait(lambda: process.poll() is not None and not _members(process.pid), limit_s)
        took_s = time.monotonic() - began_s
    finally:
        if _members(process.pid):
            os.killpg(process.pid, signal.SIGKILL)
    text = (tmp_path / "out").read_text()
    assert took_s < limit_s, text
    assert "trained" not in text
    if (when, number) == ("train", signal.SIGTERM):
        assert process.returncode == 0, text  # as Lightning ends
        assert "Traceback" not in text
        assert "[rank: 1] SIGTERM: all ranks end after the batch at hand" in text


def _wait(done: Callable[[], bool], limit_s: float) -> None:
    deadline_s = time.monotonic() + limit_s
    while not done() and time.monotonic() < deadline_s:
        time.sleep(0.1)


def watches(pid: int) -> None:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    ParentWatch(Process(Process.own().machine, pid, fields[19]), poll_s=0.05).start()
    time.sleep(0.3)
    os.kill(pid, signal.SIGKILL)
    time.sleep(30)


def test_a_process_ends_with_the_one_that_started_it(ranks: WarmRanks) -> None:
    with subprocess.Popen(["sleep", "1000"]) as starter:
        began_s = time.monotonic()
        ((status, kind, message),) = ranks.run_outcomes(1, watches, starter.pid, process_group=False)
    assert (status, kind) == ("error", "RankDied")
    assert "exit code 1" in message
    assert time.monotonic() - began_s < 10
