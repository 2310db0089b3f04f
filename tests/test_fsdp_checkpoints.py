"""Checkpoints do not depend on the plan: saved under one, resumed under another, on one device, and back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch.utils.data import DataLoader

from lightning_hetero.strategies import HeteroFSDPStrategy
from tests.fits import Classifier, Fit, Order, Recorder, cluster_for, dataset, plan_for, whole
from tests.harness import WarmRanks

SAVE_AT = 3  # in the middle of an epoch of 5 global batches


class EveryStep(pl.Callback):
    """Saves after every step, as ModelCheckpoint(every_n_train_steps=1) does but without its memory of folders."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        trainer.save_checkpoint(f"{self.folder}/step={trainer.global_step}.ckpt")


def fit_to(
    strategy: Any, fit: Fit, *, steps: int, folder: str, resume: str | None = None, **trainer_options: Any
) -> dict[str, Any]:
    """Train to ``steps``, keep every step's checkpoint in ``folder``; return parameters and losses."""
    torch.manual_seed(11)
    module = Classifier("mlp")
    loader: DataLoader[Any] = DataLoader(dataset(fit.samples, "64-true"), **trainer_options.pop("loader"))
    recorder = Recorder()
    trainer = pl.Trainer(
        strategy=strategy,
        accelerator="cpu",
        precision="64-true",
        max_steps=steps,
        logger=recorder,
        callbacks=[EveryStep(folder)],
        enable_checkpointing=False,
        log_every_n_steps=1,
        enable_progress_bar=False,
        enable_model_summary=False,
        **trainer_options,
    )
    trainer.fit(module, loader, ckpt_path=resume)
    return {
        "parameters": {name: whole(p) for name, p in module.named_parameters()},
        "losses": [step["only_step"] for step in recorder.logged if "only_step" in step],
        "global_batch_size": getattr(strategy, "global_batch_size", None),
    }


def hetero(fit: Fit, steps: int, folder: str, resume: str | None, sharded: bool, planned: bool = True) -> Any:
    strategy = HeteroFSDPStrategy(
        cluster=cluster_for(fit.ranks),
        plan=plan_for(fit) if planned else "auto",
        check_loss="off",
        summary=False,
        save_distributed_checkpoint=sharded,
    )
    loader = {"batch_size": 1, "shuffle": True}
    return fit_to(strategy, fit, steps=steps, folder=folder, resume=resume, devices=fit.ranks, loader=loader)


def one_device(fit: Fit, steps: int, folder: str, resume: str | None = None) -> Any:
    loader = {"batch_size": fit.global_batch, "sampler": Order(fit.samples)}
    return fit_to("auto", fit, steps=steps, folder=folder, resume=resume, devices=1, loader=loader)


FIT = Fit("mlp", shares=(3, 1), samples=18)
OTHER = FIT.on(shares=(1, 1, 2))


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor], tolerance: float = 1e-12) -> None:
    assert left.keys() == right.keys()
    for name in left:
        assert torch.allclose(left[name], right[name], rtol=0, atol=tolerance), name


@pytest.mark.parametrize("sharded", [pytest.param(False, marks=pytest.mark.slow), True])
def test_resume_under_another_plan_in_mid_epoch(ranks: WarmRanks, tmp_path: Path, sharded: bool) -> None:
    straight = one_device(FIT, 12, str(tmp_path / "one"))
    ranks.run(2, hetero, FIT, SAVE_AT, str(tmp_path / "a"), None, sharded)
    path = tmp_path / "a" / f"step={SAVE_AT}.ckpt"
    assert path.is_dir() == sharded
    assert not [p for p in path.parent.iterdir() if "tmp" in p.name or "old" in p.name]
    for result in ranks.run(3, hetero, OTHER, 12, str(tmp_path / "b"), str(path), sharded):
        same(result["parameters"], straight["parameters"])
        assert result["losses"] == pytest.approx(straight["losses"][SAVE_AT:], abs=1e-12)


GROUPS = FIT.on(shares=(1, 2, 1), groups=((1,), (0, 2)))
EQUAL = FIT.on(shares=(1, 1, 1, 1), groups=((0, 1), (2, 3)))


@pytest.mark.parametrize("sharded", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("saver", "loader"),
    [
        (GROUPS, EQUAL),
        *(pytest.param(*pair, marks=pytest.mark.slow) for pair in ((EQUAL, GROUPS), (OTHER, GROUPS), (GROUPS, FIT))),
    ],
    ids="abcd",
)
def test_resume_under_other_groups(ranks: WarmRanks, tmp_path: Path, sharded: bool, saver: Fit, loader: Fit) -> None:
    straight = one_device(FIT, 10, str(tmp_path / "one"))
    ranks.run(saver.ranks, hetero, saver, SAVE_AT, str(tmp_path / "a"), None, sharded)
    path = tmp_path / "a" / f"step={SAVE_AT}.ckpt"
    assert path.is_dir() == sharded
    for result in ranks.run(loader.ranks, hetero, loader, 10, str(tmp_path / "b"), str(path), sharded):
        same(result["parameters"], straight["parameters"])
        assert result["losses"] == pytest.approx(straight["losses"][SAVE_AT:], abs=1e-12)


def test_one_file_goes_to_one_device_and_back(ranks: WarmRanks, tmp_path: Path) -> None:
    straight = one_device(FIT, 10, str(tmp_path / "one"))
    # an epoch's end, since one device's plain loader cannot be resumed in the middle of one
    ranks.run(2, hetero, FIT, 5, str(tmp_path / "a"), None, False)
    path = str(tmp_path / "a" / "step=5.ckpt")
    module = Classifier.load_from_checkpoint(path, network="mlp")
    reference = torch.load(str(tmp_path / "one" / "step=5.ckpt"), weights_only=True)
    same({k: v.double() for k, v in module.state_dict().items()}, _close_to(reference["state_dict"], module))
    resumed = one_device(FIT, 10, str(tmp_path / "b"), path)
    # one device restores before precision="64-true" makes the module 64-bit: Lightning rounds its own files so, too
    same(resumed["parameters"], straight["parameters"], tolerance=1e-6)
    # and back: one device's checkpoint under a plan
    for result in ranks.run(2, hetero, FIT, 10, str(tmp_path / "c"), str(tmp_path / "one" / "step=5.ckpt"), False):
        same(result["parameters"], straight["parameters"])


def _close_to(state: dict[str, torch.Tensor], module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The state as 32-bit parameters would hold it: load_from_checkpoint builds the module in 32 bits."""
    return {name: state[name].to(value.dtype).double() for name, value in module.state_dict().items()}


def test_global_batch_of_a_checkpoint_is_kept_on_other_devices(ranks: WarmRanks, tmp_path: Path) -> None:
    """Without global_batch_size it is the loader's batch size x ranks, but a resumed run keeps the saved one."""
    ranks.run(2, hetero, FIT, SAVE_AT, str(tmp_path / "a"), None, False)  # global batch 4
    path = str(tmp_path / "a" / f"step={SAVE_AT}.ckpt")
    straight = one_device(FIT, 8, str(tmp_path / "one"))
    for result in ranks.run(3, hetero, OTHER, 8, str(tmp_path / "b"), path, False, False):  # 1 x 3 without it
        assert result["global_batch_size"] == 4
        assert result["losses"] == pytest.approx(straight["losses"][SAVE_AT:], abs=1e-12)


def test_a_save_that_fails_leaves_the_old_file_whole(tmp_path: Path) -> None:
    from lightning_hetero.checkpoint import write_file

    class Stubborn:
        def __reduce__(self) -> Any:
            raise OSError("disk full")

    path = tmp_path / "x.ckpt"
    write_file({"a": torch.ones(3)}, path)
    with pytest.raises(OSError, match="disk full"):
        write_file({"a": torch.zeros(3), "b": Stubborn()}, path)
    assert torch.equal(torch.load(path, weights_only=True)["a"], torch.ones(3))
    assert list(tmp_path.iterdir()) == [path]
