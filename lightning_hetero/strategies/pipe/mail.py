"""Messages between the stages of a pipeline: receives are posted ahead, sends are not waited for.

A message holds the values that one stage has for another, of one micro-batch: forward the values themselves, backward
their gradients. What a message looks like (shapes, types, which values want a gradient) follows from the shapes of the
micro-batch; the first message for each shape says so in a header, and later ones need none::

    sender      header (first time only) | tensor | tensor ...          isend, kept until it is done
    receiver    header (first time only) | irecv of what is known       posted while the rank computes

What groups they go over, so that none waits for another that needs it, is :mod:`~.lines`'s affair. Between two ranks
messages of one direction are received in the order in which they are sent; one that is for a later action of
another stage of the receiver waits there.
"""

from __future__ import annotations

import pickle
import time
from collections import defaultdict, deque
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_hetero.errors import UnsupportedError
from lightning_hetero.models.chain import Values
from lightning_hetero.strategies.pipe.lines import Lines

_AHEAD = 1
"""messages of each sender whose receives are posted before they are asked for, besides the one at hand"""

WAITED_S = 2e-4
"""A wait for a message that took longer was one: the message was not there yet."""

_UNWAITED = 3
"""messages to one rank that may be under way before the oldest is waited for, where nothing comes back for them"""


@dataclass(frozen=True)
class TensorSpec:
    """What a tensor in a message looks like."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    @classmethod
    def of(cls, tensor: Tensor) -> TensorSpec:
        """The spec of ``tensor``."""
        return cls(tuple(tensor.shape), tensor.dtype, tensor.requires_grad)


Specs = Mapping[str, TensorSpec | None]


@dataclass(frozen=True)
class Letter:
    """One message.

    Args:
        source: stage that sends it.
        target: stage that it is for.
        micro_batch: index in the step.
        forward: whether it holds values; else their gradients.
    """

    source: int
    target: int
    micro_batch: int
    forward: bool = True

    @property
    def skips(self) -> bool:
        """Whether it goes past a stage."""
        return abs(self.target - self.source) != 1


@dataclass
class _Posted:
    letter: Letter
    specs: Specs
    values: Values
    works: list[Any]


@dataclass
class _Sent:
    letter: Letter
    works: list[Any]
    tensors: list[Tensor]  # until they have left

    def wait(self) -> None:
        for work in self.works:
            work.wait()


@dataclass
class _Inbox:
    """What comes from one rank in one direction, in order."""

    waiting: deque[Letter] = field(default_factory=deque)
    posted: deque[_Posted] = field(default_factory=deque)


class Mail:
    """A rank's post for one pipeline.

    Args:
        rank_of: the rank of each stage.
        rank: this rank.
        device: where received tensors go.
        lines: the process groups of the messages.
    """

    def __init__(self, rank_of: Sequence[int], rank: int, device: torch.device, lines: Lines) -> None:
        self._rank_of = tuple(rank_of)
        self._rank = rank
        self._device = device
        self._lines = lines
        self._known: dict[Hashable, Specs] = {}
        self._shapes: Sequence[Hashable] = ()
        self._inboxes: dict[tuple[int, bool], _Inbox] = {}
        self._sent: defaultdict[tuple[int, bool, bool], deque[_Sent]] = defaultdict(deque)
        self._answered = False
        self._at_home: dict[Letter, Values] = {}
        self._early: dict[Letter, _Posted] = {}
        self.received: list[Letter] = []
        self.arrived_s: float | None = None
        """when (``time.perf_counter``) the last letter came that had to be waited for; its reader sets it to None"""

    def begin(self, expected: Iterable[Letter], shapes: Sequence[Hashable], answered: bool) -> None:
        """Begin a step.

        Args:
            expected: all letters that come from other ranks, in the order in which each of these sends them.
            shapes: per micro-batch what the shapes of its values follow from.
            answered: whether gradients come back for the values that are sent.
        """
        self._shapes, self._answered = shapes, answered
        self._inboxes = {}
        self._early = {}
        self.received = []
        for letter in expected:
            key = self._rank_of[letter.source], letter.forward
            self._inboxes.setdefault(key, _Inbox()).waiting.append(letter)
        for (source, forward), inbox in self._inboxes.items():
            self._post_ahead(source, forward, inbox)

    def end(self) -> None:
        """Wait until everything is sent."""
        for outbox in self._sent.values():
            while outbox:
                outbox.popleft().wait()

    # -- sending -------------------------------------------------------------------------------------------------------

    def send(self, letter: Letter, values: Values) -> None:
        """Send; the tensors are kept until they have left, and nothing waits for that.

        Raises:
            UnsupportedError: if they look other than the last time with a micro-batch of these shapes.
        """
        to = self._rank_of[letter.target]
        if to == self._rank:
            self._at_home[letter] = values
            return
        tensors = self._header(letter, values) if letter.forward else []
        tensors += [value.detach().contiguous() for value in values.values() if value is not None]
        group, tag = self._lines.of(self._rank, to, letter.forward), self._tag(letter)
        works = [dist.isend(tensor, to, group=group, tag=tag) for tensor in tensors]
        outbox = self._sent[to, letter.forward, letter.skips]
        outbox.append(_Sent(letter, works, tensors))
        # what skips stages is read when those between have run, on this rank too where it has several
        if not (letter.forward and self._answered) and not letter.skips:
            while len(outbox) > _UNWAITED:
                outbox.popleft().wait()

    def _header(self, letter: Letter, values: Values) -> list[Tensor]:
        """What is sent before the values: nothing, where the receiver knows what they look like."""
        specs = {name: None if value is None else TensorSpec.of(value) for name, value in values.items()}
        key = self._key(letter)
        if key not in self._known:
            self._known[key] = specs
            content = torch.frombuffer(bytearray(pickle.dumps(specs)), dtype=torch.uint8).to(self._device)
            return [torch.tensor([len(content)], device=self._device), content]
        if self._known[key] != specs:
            changed = [name for name in specs if specs[name] != self._known[key].get(name)]
            raise UnsupportedError(
                f"stage {letter.source} sends {', '.join(f'{n} {_shown(specs[n])}' for n in changed)}, and sent "
                f"{', '.join(_shown(self._known[key].get(n)) for n in changed)} for another micro-batch of the same "
                "shapes: what a model is called with may change its shape only where the batch does. Resize in the "
                "dataset, or keep one size in training_step"
            )
        return []

    # -- receiving -----------------------------------------------------------------------------------------------------

    def take(self, letter: Letter) -> Values:
        """Wait for a letter and return its values: those that want a gradient as leaves that require one."""
        if letter in self._at_home:
            return {name: _leaf(value, letter) for name, value in self._at_home.pop(letter).items()}
        source = self._rank_of[letter.source]
        posted = self._early.pop(letter, None) or self._next(source, letter)
        self.received.append(letter)
        if not letter.forward:
            self._drop_answered(source, letter)
        if letter.forward:
            for name, spec in posted.specs.items():
                value = posted.values[name]
                if value is not None and spec is not None and spec.requires_grad:
                    value.requires_grad_()
        return posted.values

    def _next(self, source: int, letter: Letter) -> _Posted:
        """Receive from a rank up to a letter; what comes before it is for another stage of this rank, and is kept."""
        inbox = self._inboxes[source, letter.forward]
        while True:
            if not inbox.posted:
                if not inbox.waiting:
                    raise RuntimeError(f"{letter} was asked for and does not come: the schedule's order is broken")
                self._post(source, letter.forward, inbox)
            posted = inbox.posted.popleft()
            self._post_ahead(source, letter.forward, inbox)
            self._wait(posted.works)
            if posted.letter == letter:
                return posted
            self._early[posted.letter] = posted

    def _wait(self, works: list[Any]) -> None:
        began_s = time.perf_counter()
        for work in works:
            work.wait()
        ended_s = time.perf_counter()
        if ended_s - began_s > WAITED_S:
            self.arrived_s = ended_s

    def _drop_answered(self, source: int, answer: Letter) -> None:
        """Let go of the values whose gradients have come: they have left (gloo does not say so without a wait)."""
        outbox = self._sent[source, True, answer.skips]
        for sent in outbox:
            same = (sent.letter.target, sent.letter.source, sent.letter.micro_batch)
            if same == (answer.source, answer.target, answer.micro_batch):
                outbox.remove(sent)
                sent.wait()
                return

    def _post_ahead(self, source: int, forward: bool, inbox: _Inbox) -> None:
        while inbox.waiting and len(inbox.posted) < _AHEAD:
            specs = self._specs(inbox.waiting[0])
            if specs is None:
                return
            self._post(source, forward, inbox)

    def _post(self, source: int, forward: bool, inbox: _Inbox) -> None:
        letter = inbox.waiting.popleft()
        specs = self._specs(letter)
        if specs is None:
            specs = self._known[self._key(letter)] = self._receive_header(letter, source)
        group, tag = self._lines.of(source, self._rank, forward), self._tag(letter)
        values: Values = {}
        works = []
        for name, spec in specs.items():
            values[name] = None
            if spec is None or not (forward or spec.requires_grad):
                continue
            buffer = torch.empty(spec.shape, dtype=spec.dtype, device=self._device)
            works.append(dist.irecv(buffer, source, group=group, tag=tag))
            values[name] = buffer
        inbox.posted.append(_Posted(letter, specs, values, works))

    def _receive_header(self, letter: Letter, source: int) -> Specs:
        size = torch.zeros(1, dtype=torch.int64, device=self._device)
        group, tag = self._lines.of(source, self._rank, True), self._tag(letter)
        self._wait([dist.irecv(size, source, group=group, tag=tag)])
        content = torch.empty(int(size.item()), dtype=torch.uint8, device=self._device)
        self._wait([dist.irecv(content, source, group=group, tag=tag)])
        specs: Specs = pickle.loads(content.cpu().numpy().tobytes())
        return specs

    def _specs(self, letter: Letter) -> Specs | None:
        """What a letter looks like, if that is known: gradients look like the values that went the other way."""
        return self._known.get(self._key(letter))

    def _key(self, letter: Letter) -> Hashable:
        stages = (letter.source, letter.target) if letter.forward else (letter.target, letter.source)
        return (*stages, self._shapes[letter.micro_batch])

    def _tag(self, letter: Letter) -> int:
        stages = len(self._rank_of)
        return ((letter.micro_batch * stages + letter.source) * stages + letter.target) * 2 + letter.forward


def _leaf(value: Tensor | None, letter: Letter) -> Tensor | None:
    if value is None or not letter.forward:
        return value
    return value.detach().requires_grad_(value.requires_grad)


def _shown(spec: TensorSpec | None) -> str:
    return "nothing" if spec is None else f"{list(spec.shape)} ({str(spec.dtype).removeprefix('torch.')})"
