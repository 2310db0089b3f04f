"""Bad input to hetero_pipe: every error names the value and the next step, and every rank ends within seconds."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric

from lightning_hetero.costs import ModelCosts, UnitCost, UnitTiming
from lightning_hetero.errors import HeteroError, PlanError
from lightning_hetero.plan import Pipeline, PipelinePlan, ShardPlan, Stage
from lightning_hetero.strategies import HeteroPipelineStrategy
from tests.harness import WarmRanks
from tests.pipe_runs import ONE, Layout, Small, cluster_of, points, seeded, trainer_of

SECONDS = 30.0
"""until every rank has ended; most of it is for a machine that does other things as well"""

THREE = Layout(cuts=((1, 2, 2),), counts=(3,))


def says(message: str, words: list[str]) -> None:
    for word in words:
        assert word in message, message


# -- before any process is started -------------------------------------------------------------------------------------


def test_bad_arguments_are_listed_together() -> None:
    with pytest.raises(HeteroError) as caught:
        HeteroPipelineStrategy(
            cluster_of(2),
            module="",
            micro_batch_size=0,
            schedule="zigzag",
            pipelines=True,
            activation_checkpointing="yes",
            global_batch_size=2.5,  # type: ignore[arg-type]
            loss_weight=3,  # type: ignore[arg-type]
        )
    words = ["micro_batch_size=0", "schedule='zigzag'", "1f1b", "pipelines=True", "activation_checkpointing='yes'"]
    says(str(caught.value), [*words, "module=''", "global_batch_size=2.5", "loss_weight=3"])


def test_a_plan_says_what_other_arguments_would() -> None:
    with pytest.raises(HeteroError) as caught:
        HeteroPipelineStrategy(cluster_of(2), plan=ONE.plan(), micro_batch_size=2, schedule="gpipe", pipelines=1)
    says(str(caught.value), ["micro_batch_size=2", "schedule='gpipe'", "pipelines=1", "leave one out"])


def test_a_plan_of_another_kind_is_refused(tmp_path: Path) -> None:
    ShardPlan(4, (2, 2), ((0, 1),), ("cpu", "cpu")).save(tmp_path / "plan.json")
    with pytest.raises(PlanError) as caught:
        HeteroPipelineStrategy(cluster_of(2), plan=tmp_path / "plan.json")
    says(str(caught.value), ["plan.json", "shard", "hetero_pipe"])
    with pytest.raises(PlanError, match="is a int"):
        HeteroPipelineStrategy(cluster_of(2), plan=3)  # type: ignore[arg-type]
    with pytest.raises(HeteroError, match=r"no\.json"):
        HeteroPipelineStrategy(cluster_of(2), plan=tmp_path / "no.json")


# -- on all ranks ------------------------------------------------------------------------------------------------------


class Twice(Small):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return F.cross_entropy(self.model(batch[0]) + self.model(-batch[0]), batch[1])


class Never(Small):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return batch[0].sum()


class Part(Small):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return F.cross_entropy(self.model[-1](self.model[:-1](batch[0])), batch[1])


class BothSides(Small):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return F.cross_entropy(self.model(batch[0] * self.scale) * self.scale, batch[1])


class Turned(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.T


class Flipped(Small):
    def __init__(self) -> None:
        super().__init__()
        self.model[3] = nn.Sequential(nn.Tanh())
        self.model = nn.Sequential(*self.model[:3], nn.Linear(8, 3), Turned())

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return F.cross_entropy(self.model(batch[0]).T, batch[1])


class Nothing(Small):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.model(batch[0])


class Rows(Small):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return F.cross_entropy(self.model(batch[0]), batch[1], reduction="none")


class Manual(Small):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class TwoOptimizers(Small):
    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(self.parameters(), 0.1), torch.optim.SGD(self.parameters(), 0.1)]


class NoChain(Small):
    def __init__(self) -> None:
        super().__init__()
        self.model = nn.GRU(6, 3)  # type: ignore[assignment]


class NoChild(Small):
    def __init__(self) -> None:
        super().__init__()
        del self.model
        self.weight = nn.Parameter(torch.ones(6))


class Resized(Small):
    """Every micro-batch of another length, from batches of one shape."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.calls += 1
        repeated = batch[0][:, None].expand(-1, self.calls, -1)
        return F.cross_entropy(self.model(repeated).mean(1), batch[1])


class Collective(Small):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return F.cross_entropy(self.model(batch[0]), batch[1]) + self.all_gather(batch[0].sum()).sum()


class Computing(Small):
    def __init__(self) -> None:
        super().__init__()
        self.mean = MeanMetric()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = F.cross_entropy(self.model(batch[0]), batch[1])
        self.mean.update(loss)
        self.log("so_far", self.mean.compute())
        return loss


class Full(Small):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters())


def fit(kind: Any, layout: Layout, options: dict[str, Any], plan: PipelinePlan | None = None) -> None:
    options = dict(options)
    given = {"plan": plan or layout.plan()} if "plan" not in options else {}
    memory = options.pop("memory", 2**34)
    batch = options.pop("batch", layout.batch)
    strategy = HeteroPipelineStrategy(cluster_of(layout.world, memory), summary=False, **given, **options)
    trainer = trainer_of(layout, strategy)
    trainer.fit(seeded(kind), DataLoader(points(24), batch_size=batch))


def refused(ranks: WarmRanks, world: int, *args: Any, kind: str, words: list[str], everywhere: bool = True) -> None:
    began = time.monotonic()
    outcomes = ranks.run_outcomes(world, fit, *args, process_group=False, timeout=2 * SECONDS)
    assert time.monotonic() - began < SECONDS
    for status, *rest in outcomes:
        assert status == "error", outcomes
        assert rest[0] in (kind, "RankFailedError"), outcomes
        if everywhere or rest[0] == kind:
            says(rest[1], words)
    assert any(outcome[1] == kind for outcome in outcomes), outcomes


@pytest.mark.parametrize(
    ("module", "words"),
    [
        (Twice, ["training_step", "self.model(...)", "twice", "torch.cat"]),
        (Never, ["training_step", "never calls self.model(...)", 'module="..."']),
        (Part, ["training_step", "call it as a whole"]),
        (BothSides, ["scale", "both before and after", "ranks 0 and 2", "two parameters"]),
        (Flipped, ["[3, 2]", "micro-batch of 2 samples", "first dimension"]),
        (Nothing, ["training_step returned NoneType", "micro-batch 0", "times 0 skips it"]),
        (Rows, ["loss of shape [2]", "its mean"]),
        (Manual, ["manual optimization", "automatic_optimization = True", "hetero_fsdp"]),
        (TwoOptimizers, ["several optimizers", "parameter groups"]),
        (NoChain, ["GRU", "nn.Sequential"]),
        (NoChild, ["NoChild has no submodule"]),
        (Resized, ["stage 0 sends hidden", "another micro-batch of the same shapes", "Resize in the dataset"]),
        (Collective, ["all_gather", "on_train_epoch_end"]),
        (Computing, ["a metric's compute()", "the torchmetrics object itself"]),
        (Full, ["LBFGS"]),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else "",
)
def test_modules(ranks: WarmRanks, module: Any, words: list[str]) -> None:
    refused(ranks, 3, module, THREE, {}, kind="UnsupportedError", words=words)


def plans() -> dict[str, tuple[PipelinePlan, list[str]]]:
    good = THREE.plan()
    pipeline = good.pipelines[0]

    def cut(*borders: tuple[int, int]) -> PipelinePlan:
        return replace(good, pipelines=(replace(pipeline, stages=tuple(Stage(b, 1) for b in borders)),))

    return {
        "gap": (cut((0, 1), (2, 3), (3, 5)), ["pipelines[0]", "unit 1"]),
        "overlap": (cut((0, 2), (1, 3), (3, 5)), ["pipelines[0]", "unit 1"]),
        "too few units": (cut((0, 1), (1, 3), (3, 4)), ["pipelines[0]", "4"]),
        "empty stage": (cut((0, 1), (1, 1), (1, 5)), ["pipelines[0]", "stage"]),
        "other units": (replace(good, unit_names=("0", "1", "2", "3", "5")), ["'5'", "Sequential", 'plan="auto"']),
        "other cluster": (replace(good, device_types=("cpu", "gpu", "cpu")), ["gpu"]),
        "other world": (ONE.plan(), ["2", "3"]),
        "fewer micro-batches than the warm-up": (
            replace(good, pipelines=(replace(pipeline, stages=(Stage((0, 1), 4), Stage((1, 5), 1)), ranks=(0, 1)),)),
            ["warm", "3"],
        ),
        "micro-batches that cannot interleave": (
            replace(
                good,
                schedule="interleaved_1f1b",
                global_batch_size=10,
                pipelines=(Pipeline((0, 1, 2), tuple(Stage((i, i + 1), 1) for i in range(5)), 5),),
            ),
            ["pipelines[0]", "5"],
        ),
        "batch": (replace(good, global_batch_size=40), ["40"]),
    }


@pytest.mark.parametrize("what", list(plans()))
def test_plans(ranks: WarmRanks, what: str) -> None:
    plan, words = plans()[what]
    refused(ranks, 3, Small, THREE, {}, plan, kind="PlanError", words=words)


@pytest.mark.parametrize(
    ("layout", "options", "kind", "words"),
    [
        (THREE, {"module": "nope"}, "UnsupportedError", ["module='nope'", "its children are model"]),
        (THREE, {"module": "model.1"}, "UnsupportedError", ["Tanh"]),
        (THREE, {"global_batch_size": 8}, "DataError", ["global_batch_size=8", "6"]),
    ],
    ids=["no such module", "a module that has no units", "another global batch than the plan's"],
)
def test_arguments_that_do_not_fit(
    ranks: WarmRanks, layout: Layout, options: dict[str, Any], kind: str, words: list[str]
) -> None:
    refused(ranks, layout.world, Small, layout, options, kind=kind, words=words)


# -- what cannot be planned --------------------------------------------------------------------------------------------


class Tiny(Small):
    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(nn.Linear(6, 3), nn.Tanh())


def costs_of(parameters: int) -> ModelCosts:
    timing = UnitTiming(0.0, 1e-3, 0.0, 2e-3)
    units = tuple(
        UnitCost(f"model.{i}", parameters if i == 2 else 0, 100, 200, 100, 64, {"cpu": timing}) for i in range(5)
    )
    return ModelCosts("Sequential", units, "float64", devices={"cpu": "test"})


def test_more_stages_than_units(ranks: WarmRanks) -> None:
    layout = Layout(cuts=((1, 1, 1),), counts=(3,))
    options = {"plan": "auto", "pipelines": 1, "micro_batch_size": 2, "batch": 2}
    outcomes = ranks.run_outcomes(3, fit, Tiny, layout, options, process_group=False, timeout=2 * SECONDS)
    # two units: one rank stays idle
    assert [outcome[0] for outcome in outcomes] == ["ok"] * 3, outcomes


def test_a_stage_that_fits_no_device(ranks: WarmRanks) -> None:
    options = {"plan": "auto", "memory": 2**20, "costs": costs_of(2**20), "batch": 3}
    refused(
        ranks,
        2,
        Small,
        ONE,
        options,
        kind="InfeasibleError",
        words=["rank 0 (cpu on n) needs", "has 1 MiB", "use devices with"],
    )
