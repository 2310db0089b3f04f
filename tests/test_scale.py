"""The real set-up and step of one rank of 1,024, on a process group that goes nowhere: as computed without torch."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from benchmarks.scale import pipeline_rank, shard_rank
from benchmarks.scale.cases import PipelineCase, ShardCase, pipeline_cases, shard_cases
from benchmarks.scale.compare import PipelineSetUp, ShardSetUp, kinds_of_pipeline_ranks, kinds_of_shard_ranks
from lightning_hetero.models.gpt import GPT, GPTConfig
from lightning_hetero.models.inputs import preset_inputs
from lightning_hetero.models.presets import build_preset

SHARDS = {case.name: case for case in shard_cases()}
PIPELINES = {case.name: case for case in pipeline_cases()}


def small(tied: bool) -> GPT:
    with torch.device("meta"):
        return GPT(GPTConfig(vocabulary=100, context=8, width=24, depth=2, heads=2, tied_embedding=tied))


def check_shard_ranks(case: ShardCase, ranks: Sequence[int], tied: bool) -> None:
    model = small(tied)
    setup = ShardSetUp(case, shard_rank.parameters_of(model), shard_rank.costs_of(model))
    tokens = torch.zeros(1, 8, dtype=torch.int64, device="meta")
    for rank in ranks:
        real = shard_rank.run_shard_rank(case.plan, rank, model, tokens, with_values=True)
        assert setup.differences(rank, real) == []
        assert real.seen  # or everything would be equal


@pytest.mark.parametrize(
    ("name", "rank", "tied"),
    [
        ("one group", 1023, False),
        ("a group for each node", 13, True),
        ("groups of 8 and 16", 7, True),
        ("groups of 8 and 16", 1022, False),
        ("a copy on each rank", 1, True),
    ],
)
def test_a_shard_plans_rank_is_as_computed(name: str, rank: int, tied: bool) -> None:
    check_shard_ranks(SHARDS[name], [rank], tied)


@pytest.mark.slow
@pytest.mark.parametrize("name", SHARDS)
def test_every_kind_of_rank_of_a_shard_plan_is_as_computed(name: str) -> None:
    check_shard_ranks(SHARDS[name], kinds_of_shard_ranks(SHARDS[name]), tied=False)


@pytest.mark.slow
def test_a_vit_without_values_is_as_computed() -> None:
    case = shard_cases("vit_base", 2)[2]
    model = build_preset("vit_base", device="meta", depth=2)
    setup = ShardSetUp(case, shard_rank.parameters_of(model), shard_rank.costs_of(model))
    real = shard_rank.run_shard_rank(case.plan, 3, model, preset_inputs("vit_base")[0])
    assert setup.differences(3, real) == []


def check_pipeline_ranks(case: PipelineCase, ranks: Sequence[int]) -> None:
    parameters = pipeline_rank.parameters_of(case)
    setup = PipelineSetUp(case, parameters, pipeline_rank.costs_of(case, parameters))
    for rank in ranks:
        real = pipeline_rank.run_pipeline_rank(case, rank)
        assert setup.differences(rank, real) == []
        kinds = {part.kind for part in real.seen}
        idle = rank in case.plan.idle_ranks
        assert kinds == ({"all_reduce"} if idle else {"all_reduce", "send", "receive"})


@pytest.mark.parametrize(
    ("name", "rank"),
    [
        ("8 stages, two cuts", 1023),
        ("idle ranks, zero bubble", 1),
        ("idle ranks, zero bubble", 1016),
        ("2 stages a rank", 0),
        ("2 stages a rank", 519),
    ],
)
def test_a_pipeline_plans_rank_is_as_computed(name: str, rank: int) -> None:
    check_pipeline_ranks(PIPELINES[name], [rank])


@pytest.mark.slow
@pytest.mark.parametrize("name", PIPELINES)
def test_every_kind_of_rank_of_a_pipeline_plan_is_as_computed(name: str) -> None:
    check_pipeline_ranks(PIPELINES[name], kinds_of_pipeline_ranks(PIPELINES[name]))
