"""Runs a rank's row of a schedule: stages, and the messages between them.

The order of the row is the order of what is done, whatever arrives when: a rank that has to wait waits for the message
that its next action needs. Sends are not waited for, and the next receive is posted before a rank computes.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor

from lightning_hetero.models.chain import UnitChain, Values
from lightning_hetero.schedule import BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD, Action, Schedule
from lightning_hetero.strategies.pipe.mail import Letter, Mail
from lightning_hetero.strategies.pipe.randomness import Draws
from lightning_hetero.strategies.pipe.routes import Routes
from lightning_hetero.strategies.pipe.stage import Stage


class StepWork(Protocol):
    """What a step does at its two ends, and around what is computed."""

    def begin(self, micro_batch: int) -> Values:
        """Return the model's inputs for a micro-batch; asked on the first stage."""

    def finish(self, micro_batch: int, output: Any) -> Tensor | None:
        """Take the model's output; return the weighted loss, in training. Asked on the last stage."""

    def draws(self, micro_batch: int) -> Draws:
        """Return the random states of a micro-batch."""

    def computing(
        self, micro_batch: int, received: Sequence[Tensor | None], kind: str = FORWARD
    ) -> AbstractContextManager[Any]:
        """Return a context around what an action of ``kind`` computes; ``received`` came from elsewhere."""

    def inputs_came(self, at_s: float | None) -> None:
        """Hear until when this rank waited for the next action's inputs; None where a run begins."""

    def forward_context(self) -> AbstractContextManager[Any]:
        """Return a context around forwards (autocast)."""

    def stage_is_done(self, stage: int) -> None:
        """Hear that a stage has run its last backward of the step: its gradients are complete."""


class PipelineRuntime:
    """One rank of one pipeline.

    Args:
        chain: the model.
        routes: of its cut.
        stages: this rank's stages, by index.
        rank_of: the rank of each stage.
        rank: this rank.
        mail: to and from the other ranks.
    """

    def __init__(
        self,
        chain: UnitChain,
        routes: Routes,
        stages: Mapping[int, Stage],
        rank_of: Sequence[int],
        rank: int,
        mail: Mail,
    ) -> None:
        self._chain, self._routes = chain, routes
        self.stages = dict(stages)
        self._rank_of, self._rank = tuple(rank_of), rank
        self.mail = mail
        self.at: Action | None = None
        self.executed: list[Action] = []
        self._letters: dict[int, tuple[Schedule, tuple[Letter, ...]]] = {}

    def run(self, schedule: Schedule, work: StepWork, shapes: Sequence[Hashable]) -> None:
        """Run this rank's row of ``schedule``.

        Args:
            schedule: of the whole pipeline, one row per rank, in the order of the stages' ranks.
            work: the step.
            shapes: per micro-batch, what the shapes of all that travels follow from.
        """
        ranks = list(dict.fromkeys(self._rank_of))
        row = schedule.rows[ranks.index(self._rank)]
        last_of_stage = {action.stage: index for index, action in enumerate(row)}
        self.executed = []
        answered = any(action.kind != FORWARD for action in row)
        work.inputs_came(None)
        self.mail.begin(self._expected(schedule), shapes, answered=answered)
        try:
            for index, action in enumerate(row):
                self.at = action
                self._run(action, work)
                self.executed.append(action)
                if index == last_of_stage[action.stage] and action.kind != FORWARD:
                    work.stage_is_done(action.stage)
            self.mail.end()
        except BaseException:
            for stage in self.stages.values():
                stage.forget()
            raise  # with self.at left, for the message
        self.at = None

    def _expected(self, schedule: Schedule) -> tuple[Letter, ...]:
        """Letters to this rank, each sender's in the order in which it sends them; found once for each schedule."""
        if id(schedule) not in self._letters:
            self._letters[id(schedule)] = schedule, tuple(self._letters_of(schedule))
        return self._letters[id(schedule)][1]

    def _letters_of(self, schedule: Schedule) -> Iterator[Letter]:
        for row in schedule.rows:
            for action in row:
                stage, k = action.stage, action.micro_batch
                if self._rank_of[stage] == self._rank:
                    continue
                if action.kind == FORWARD:
                    letters = [Letter(stage, target, k) for target in self._routes.targets(stage)]
                elif action.kind in (BACKWARD, BACKWARD_INPUT):
                    letters = [Letter(stage, source, k, forward=False) for source in self._routes.sources(stage)]
                else:
                    continue
                yield from (letter for letter in letters if self._rank_of[letter.target] == self._rank)

    def _run(self, action: Action, work: StepWork) -> None:
        if action.kind == FORWARD:
            self._forward(action.stage, action.micro_batch, work)
        elif action.kind == BACKWARD_WEIGHT:
            with work.computing(action.micro_batch, (), action.kind):
                self.stages[action.stage].backward_weights(action.micro_batch)
        else:
            self._backward(action, work)

    def _forward(self, stage: int, k: int, work: StepWork) -> None:
        received: Values = {}
        for source in self._routes.sources(stage):
            received |= self.mail.take(Letter(source, stage, k))
        self._tell_of_waits(work)
        with work.computing(k, list(received.values())):
            if stage == 0:
                received = work.begin(k)
            with work.forward_context():
                values = self.stages[stage].forward(k, received, work.draws(k))
            if stage == len(self._rank_of) - 1:
                self._end(stage, k, values, work)
        for target in self._routes.targets(stage):
            names = self._routes.between(stage, target)
            self.mail.send(Letter(stage, target, k), {name: values[name] for name in names})

    def _tell_of_waits(self, work: StepWork) -> None:
        if self.mail.arrived_s is not None:
            work.inputs_came(self.mail.arrived_s)
            self.mail.arrived_s = None

    def _end(self, stage: int, k: int, values: Values, work: StepWork) -> None:
        with work.forward_context():
            output = self._chain.end({name: values[name] for name in self._chain.outputs})
        loss = work.finish(k, output)
        if torch.is_grad_enabled() and loss is not None:
            self.stages[stage].end_with(k, loss)

    def _backward(self, action: Action, work: StepWork) -> None:
        stage, k = action.stage, action.micro_batch
        gradients: dict[str, list[Tensor]] = {}
        for target in reversed(self._routes.targets(stage)):
            for name, gradient in self.mail.take(Letter(target, stage, k, forward=False)).items():
                if gradient is not None:
                    gradients.setdefault(name, []).append(gradient)
        self._tell_of_waits(work)
        with work.computing(k, [part for parts in gradients.values() for part in parts], action.kind):
            own = self.stages[stage]
            found = (own.backward if action.kind == BACKWARD else own.backward_inputs)(k, gradients)
        for source in self._routes.sources(stage):
            names = [name for name in self._routes.between(source, stage) if name in found]
            self.mail.send(Letter(stage, source, k, forward=False), {name: found[name] for name in names})
