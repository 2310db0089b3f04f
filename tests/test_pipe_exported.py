"""A model that no chain is known for runs as a pipeline all the same, by exporting it."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import timm
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_hetero.cluster import Cluster, Device
from lightning_hetero.strategies import HeteroPipelineStrategy
from tests.harness import WarmRanks
from tests.pipe_fits import PipeFit, default_dtype, make_trainer, pictures

BATCH, SAMPLES = 6, 21


def mixer() -> nn.Module:
    model: nn.Module = timm.models.mlp_mixer.MlpMixer(
        img_size=8, patch_size=4, in_chans=1, num_classes=3, num_blocks=3, embed_dim=12
    )
    return model


class Mixed(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = mixer()

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.log("val_loss", F.cross_entropy(self.net(batch[0]), batch[1]), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def fit() -> tuple[dict[str, Tensor], float, list[int]]:
    pl.seed_everything(1, verbose=False)
    devices = tuple(Device("cpu", "n", 2**34, None) for _ in range(2))
    strategy = HeteroPipelineStrategy(
        Cluster("c", devices), pipelines=1, micro_batch_size=2, global_batch_size=BATCH, summary=False
    )
    trainer = make_trainer(PipeFit(), strategy=strategy, devices=2)
    module, loader = Mixed(), DataLoader(pictures(SAMPLES), BATCH, shuffle=True)
    trainer.fit(module, loader, DataLoader(pictures(SAMPLES), BATCH))
    assert strategy.plan is not None
    cut = [stage.units[1] - stage.units[0] for stage in strategy.plan.pipelines[0].stages]
    own = {name: value.detach() for name, value in module.named_parameters() if not value.is_meta}
    return own, float(trainer.callback_metrics["val_loss"]), cut


def one_device() -> tuple[dict[str, Tensor], float]:
    pl.seed_everything(1, verbose=False)
    module, data = Mixed().double(), pictures(SAMPLES)
    optimizer: Any = module.configure_optimizers()
    order = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(1)).tolist()
    with default_dtype(torch.float64):
        for start in range(0, SAMPLES, BATCH):
            rows = [data[i] for i in order[start : start + BATCH]]
            optimizer.zero_grad()
            module.training_step(tuple(map(torch.stack, zip(*rows, strict=True))), 0).backward()
            optimizer.step()
        with torch.no_grad():
            images, labels = (torch.stack(column) for column in zip(*(data[i] for i in range(SAMPLES)), strict=True))
            loss = float(F.cross_entropy(module.net(images), labels))
    return {name: value.detach() for name, value in module.named_parameters()}, loss


@pytest.mark.timeout(240)
def test_it_gives_what_one_device_gives(ranks: WarmRanks) -> None:
    ((expected, loss),) = ranks.run(1, one_device, process_group=False)
    seen = set()
    for own, val_loss, cut in ranks.run(2, fit, process_group=False, timeout=200):
        assert len(cut) == 2
        assert val_loss == pytest.approx(loss, rel=1e-10)
        for name, value in own.items():
            torch.testing.assert_close(value, expected[name], rtol=0, atol=1e-10)
        seen |= set(own)
    assert seen == set(expected)
