"""Messages between stages as NCCL runs them: what goes over one group on a rank runs in the order of its calls.

No GPU is needed for that: real ``Mail`` says what is called in which order, and a model of streams runs it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightning_hetero.schedule import Schedule, build_schedule, warmup_depths
from lightning_hetero.strategies.pipe import mail
from lightning_hetero.strategies.pipe.lines import Lines
from lightning_hetero.strategies.pipe.mail import Letter, Mail, TensorSpec
from lightning_hetero.strategies.pipe.routes import Route, Routes

HIDDEN = TensorSpec((1,), torch.float32, requires_grad=True)


@dataclass
class Call:
    """What a rank's host calls: "send" or "recv" of a message over a group, "wait" for a call, or "compute"."""

    kind: str
    group: Any = None
    message: tuple[int, int, int] | None = None
    of: int = -1


class Calls:
    """In place of ``torch.distributed``: notes what is called."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.made: list[Call] = []

    def _note(self, call: Call) -> Any:
        self.made.append(call)
        index = len(self.made) - 1
        return SimpleNamespace(wait=lambda: self.made.append(Call("wait", of=index)))

    def isend(self, tensor: Any, to: int, group: Any, tag: int) -> Any:
        return self._note(Call("send", group, (self.rank, to, tag)))

    def irecv(self, buffer: Any, source: int, group: Any, tag: int) -> Any:
        return self._note(Call("recv", group, (source, self.rank, tag)))


def letters(schedule: Schedule, routes: Routes, rank_of: Sequence[int], rank: int) -> Iterator[Letter]:
    """What comes to a rank, each sender's in its order."""
    for action in (action for row in schedule.rows for action in row):
        stage, k = action.stage, action.micro_batch
        found: list[Letter] = []
        if action.kind == "F":
            found = [Letter(stage, target, k) for target in routes.targets(stage)]
        elif action.kind in "BI":
            found = [Letter(stage, source, k, forward=False) for source in routes.sources(stage)]
        yield from (each for each in found if rank_of[stage] != rank and rank_of[each.target] == rank)


def calls_of(
    rank: int,
    schedule: Schedule,
    routes: Routes,
    rank_of: Sequence[int],
    micro_batches: int,
    device: str,
    monkeypatch: pytest.MonkeyPatch,
) -> list[Call]:
    """What a rank's host calls in a step, when all know what messages look like."""
    numbers = iter(range(1000))
    pairs = [(rank_of[way.source], rank_of[way.target]) for way in routes.all]
    lines = Lines(sorted(set(rank_of)), pairs, torch.device(device), lambda ranks: next(numbers))
    own = Mail(rank_of, rank, torch.device("cpu"), lines)
    calls = Calls(rank)
    monkeypatch.setattr(mail, "dist", calls)
    own._known = {(way.source, way.target, "shape"): {"hidden": HIDDEN} for way in routes.all}
    row = next(row for row in schedule.rows if row and rank_of[row[0].stage] == rank)
    answered = any(action.kind != "F" for action in row)
    own.begin(letters(schedule, routes, rank_of, rank), ["shape"] * micro_batches, answered=answered)
    values = {"hidden": torch.zeros(1, requires_grad=True)}
    for action in row:
        stage, k, forward = action.stage, action.micro_batch, action.kind == "F"
        if action.kind != "W":
            before, after = routes.sources(stage), routes.targets(stage)
            for source in before if forward else reversed(after):
                own.take(Letter(source, stage, k, forward))
        calls.made.append(Call("compute"))
        if action.kind != "W":
            for target in after if forward else before:
                own.send(Letter(stage, target, k, forward), dict(values))
    own.end()
    return calls.made


def stuck(programs: dict[int, list[Call]]) -> list[tuple[int, Call]]:
    """What never ends: a send and its receive end together, each when what its rank called before over its group, and
    what it computed before, has ended.
    """
    before: dict[tuple[int, int], list[int]] = {}
    where: dict[tuple[str, Any], tuple[int, int]] = {}
    for rank, calls in programs.items():
        last: dict[Any, int] = {}
        for index, call in enumerate(calls):
            stream = call.group if call.kind in ("send", "recv") else "compute"
            before[rank, index] = [last[each] for each in {stream, "compute"} if each in last]
            last[stream] = index
            if call.message is not None:
                where[call.kind, call.message] = rank, index
    done: set[tuple[int, int]] = set()

    def may_run(rank: int, index: int) -> bool:
        call = programs[rank][index]
        waits = [*before[rank, index], *([call.of] if call.kind == "wait" else [])]
        return all((rank, each) in done for each in waits)

    todo = set(before)
    while True:
        ready = {each for each in todo if may_run(*each)}
        for rank, index in list(ready):
            call = programs[rank][index]
            if call.message is not None:
                other = where["recv" if call.kind == "send" else "send", call.message]
                if other not in ready:
                    ready.discard((rank, index))
        if not ready:
            return [(rank, programs[rank][index]) for rank, index in sorted(todo)]
        done |= ready
        todo -= ready


def a_step(
    name: str, ranks: int, micro_batches: int, device: str, monkeypatch: pytest.MonkeyPatch, **options: Any
) -> list[tuple[int, Call]]:
    schedule = build_schedule(name, ranks, micro_batches, **options)
    stages = schedule.stages
    rank_of = [stage % ranks for stage in range(stages)]
    ways = [Route("hidden", stage - 1, stage) for stage in range(1, stages)]
    if stages > 2:
        ways.append(Route("hidden", 0, stages - 1))  # skips stages
    routes = Routes(tuple(sorted(ways, key=lambda way: (way.target, way.source))))
    programs = {
        rank: calls_of(rank, schedule, routes, rank_of, micro_batches, device, monkeypatch) for rank in range(ranks)
    }
    for calls in programs.values():
        assert {call.kind for call in calls} >= {"send", "recv", "wait", "compute"}
    return stuck(programs)


@pytest.mark.parametrize("micro_batches", [1, 4, 9])
@pytest.mark.parametrize("ranks", [2, 3, 4, 5])
@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zero_bubble", "interleaved_1f1b"])
def test_on_nccl_no_message_waits_for_itself(
    name: str, ranks: int, micro_batches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {}
    if name == "interleaved_1f1b":
        options, micro_batches = {"stages_per_rank": 2}, ranks * min(micro_batches, 3)
    assert a_step(name, ranks, micro_batches, "cuda", monkeypatch, **options) == []
    if name == "1f1b":
        deeper = warmup_depths(ranks, micro_batches, extra=1)
        assert a_step(name, ranks, micro_batches, "cuda", monkeypatch, warmup=deeper) == []


@pytest.mark.parametrize(
    ("name", "options"), [("1f1b", {}), ("zero_bubble", {}), ("interleaved_1f1b", {"stages_per_rank": 2})]
)
def test_over_one_group_they_would(name: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """So the model can tell; gloo, whose messages these are, knows no such order."""
    assert a_step(name, 4, 12, "cpu", monkeypatch, **options)


def test_every_line_has_one_sender_and_one_receiver() -> None:
    made: list[tuple[int, ...]] = []

    def make_group(ranks: tuple[int, ...]) -> int:
        made.append(tuple(ranks))
        return len(made) - 1

    lines = Lines((3, 4, 5), [(3, 4), (4, 5), (3, 5), (4, 4)], torch.device("cuda", 1), make_group)
    ways = [(*way, True) for way in ((3, 4), (4, 5), (3, 5))] + [(*way, False) for way in ((4, 3), (5, 4), (5, 3))]
    assert sorted(lines.of(*way) for way in ways) == list(range(6)) == list(lines.groups)
    assert all(set(made[lines.of(*way)]) == set(way[:2]) for way in ways)
    del made[:]
    lines = Lines((3, 4, 5), [(3, 4), (4, 5)], torch.device("cpu"), make_group)
    assert (made, lines.of(3, 4, True), lines.of(5, 4, False)) == ([(3, 4, 5)] * 2, 0, 1)
    assert Lines((3,), [], torch.device("cpu"), make_group).groups == ()
