"""A step of the optimizer is timed on copies, and leaves the user's parameters and states as they were."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from lightning_hetero.strategies import optimizer_probe
from lightning_hetero.strategies.optimizer_probe import REPEATS, optimizer_s

CPU = torch.device("cpu")


def two_groups(make: Any = torch.optim.AdamW, **options: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    groups = [{"params": list(model[0].parameters()), "lr": 0.5}, {"params": list(model[1].parameters())}]
    return model, make(groups, lr=0.1, **options)


def timed(optimizer: torch.optim.Optimizer, free_bytes: float = 1e9, **options: Any) -> float | None:
    return optimizer_s([optimizer], free_bytes, contextlib.nullcontext, CPU, lambda: None, **options)


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (torch.optim.AdamW, {"fused": True}),
        (torch.optim.Adam, {"foreach": True, "amsgrad": True}),
        (torch.optim.SGD, {"momentum": 0.9}),
        (torch.optim.RMSprop, {}),
        (torch.optim.Adagrad, {}),
    ],
)
def test_nothing_of_the_users_changes(make: Any, options: dict[str, Any]) -> None:
    model, optimizer = two_groups(make, **options)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = {key: dict(value) for key, value in optimizer.state.items()}
    assert (timed(optimizer) or 0.0) > 0
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert optimizer.state.keys() == state.keys()


def test_steps_are_those_of_the_users_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    step = torch.optim.AdamW.step

    def noted(self: Any, *args: Any) -> Any:
        seen.append([(group["lr"], len(group["params"]), group["fused"]) for group in self.param_groups])
        return step(self, *args)

    _, optimizer = two_groups(fused=True)
    monkeypatch.setattr(torch.optim.AdamW, "step", noted)
    timed(optimizer)
    assert seen == [[(0.5, 2, True), (0.1, 2, True)]] * (1 + REPEATS)


def test_the_step_is_timed_where_the_shards_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """With CPU offload they are on the host, whatever this rank's device is."""
    seen: set[str] = set()
    step = torch.optim.AdamW.step

    def noted(self: Any, *args: Any) -> Any:
        seen.update(p.device.type for group in self.param_groups for p in (*group["params"], group["params"][0].grad))
        return step(self, *args)

    _, optimizer = two_groups()
    monkeypatch.setattr(torch.optim.AdamW, "step", noted)
    elsewhere = torch.device("meta")
    assert (optimizer_s([optimizer], 1e9, contextlib.nullcontext, elsewhere, lambda: None) or 0.0) > 0
    assert seen == {"cpu"}


def test_a_few_parameters_stand_for_all_by_their_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    def one_second_each(copies: Any, *_: Any) -> Iterator[float]:
        copied.append([tuple(p.shape) for copy in copies for group in copy.param_groups for p in group["params"]])
        yield 1.0

    copied: list[Any] = []
    monkeypatch.setattr(optimizer_probe, "_steps", one_second_each)
    _, optimizer = two_groups()
    # a weight of 256 bytes and a bias of 32, twice; half of the memory, for four copies of each
    assert timed(optimizer, free_bytes=(256 + 32) * 8) == 2.0
    assert timed(optimizer, free_bytes=0) == pytest.approx(576 / 256)
    # what another rank can copy is all that any copies
    assert timed(optimizer, agree=lambda count: min(count, 3)) == pytest.approx(576 / 544)
    assert copied == [[(8, 8), (8,)], [(8, 8)], [(8, 8), (8,), (8, 8)]]


def test_parameters_that_are_not_this_rank_s_to_step_are_left_out() -> None:
    model, optimizer = two_groups()
    for parameter in model[0].parameters():
        parameter.requires_grad_(False)
    model[1].to("meta")
    optimizer.param_groups[1]["params"] = list(model[1].to("meta").parameters())
    assert timed(optimizer) == 0.0


class Own(torch.optim.SGD):
    """Not torch's."""


@pytest.mark.parametrize("make", [Own, torch.optim.LBFGS])
def test_an_optimizer_that_might_do_more_is_not_measured(make: Any) -> None:
    assert timed(make(nn.Linear(2, 2).parameters(), lr=0.1)) is None
