"""Where the time of a training step goes: every moment belongs to one part, so that the parts are the step.

::

    input | blocked | compute | blocked | compute ... | rest (loss) | compute | blocked ... | optimizer | rest
          ^ batch starts       ^ between units         ^ first backward         ^ backward ends

Between units a rank that shards its model waits for others and for what they send; on one device there is nothing but
Python there, and it is rest. On CPU the host's clock says when; on CUDA events on the current stream do, so that what
a queue of kernels hides takes no time here: a fetch beside kernels that are still running is not seen.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields

import torch

COMPUTE, BLOCKED, MESSAGES, INPUT, OPTIMIZER, REST = "compute", "blocked", "messages", "input", "optimizer", "rest"

Stamp = float | torch.cuda.Event


@dataclass(frozen=True)
class StepParts:
    """Seconds of one step of one rank; their sum is the step.

    Attributes:
        compute_s: in the forwards and backwards of its units.
        blocked_s: in collectives, and between units where ranks meet there.
        messages_s: in which a pipeline's stage had nothing to run, since what it needs had not come.
        input_s: from asking for a batch until it is on the device.
        optimizer_s: from the last backward to the optimizer's end, clipping included.
        rest_s: all else: the loss, hooks, loggers, Python.
    """

    compute_s: float = 0.0
    blocked_s: float = 0.0
    messages_s: float = 0.0
    input_s: float = 0.0
    optimizer_s: float = 0.0
    rest_s: float = 0.0

    @property
    def step_s(self) -> float:
        """Seconds of the step."""
        return float(sum(getattr(self, each.name) for each in fields(self)))

    @property
    def idle_share(self) -> float:
        """Share of the step in which none of the rank's units ran."""
        step_s = self.step_s
        return 1.0 - self.compute_s / step_s if step_s > 0 else 0.0

    def with_hidden(self, hidden_s: float) -> StepParts:
        """The parts where units ran for ``hidden_s`` longer than their host saw, in what looked like something else."""
        left = hidden_s
        moved = {}
        for name in ("rest_s", "messages_s", "blocked_s"):
            taken = min(left, getattr(self, name))
            moved[name] = getattr(self, name) - taken
            left -= taken
        return StepParts(self.compute_s + hidden_s - left, input_s=self.input_s, optimizer_s=self.optimizer_s, **moved)


class StepTimeline:
    """Says of every moment to which part of the step it belongs. A listener of unit marks.

    Args:
        device: where the units run.
        between: what the time between two units counts as, ``BLOCKED`` where parameters are gathered there.
        after_backward: what the time from the last unit's backward to the backward's end counts as.
    """

    def __init__(self, device: torch.device, between: str = REST, after_backward: str = REST) -> None:
        self._cuda = device.type == "cuda"
        self.between, self.after_backward = between, after_backward
        self._part: str | None = None  # None while paused
        self._spans: list[tuple[str | None, Stamp]] = []
        self._interrupted: list[str | None] = []
        self._units: list[tuple[int, str]] = []
        self._gap: str | None = None  # of which phase the unit was that ended last, where nothing has come since
        self._spare: list[torch.cuda.Event] = []
        self._closed: deque[tuple[list[tuple[str | None, Stamp]], Stamp]] = deque()

    # -- what the trainer does -----------------------------------------------------------------------------------------

    def enter(self, part: str) -> None:
        """From now on it is this part, also after a pause."""
        self._gap = None
        self._switch(part)

    def end_backward(self) -> None:
        """The backward has ended: since its last unit, the rank waited for its gradients."""
        if self._gap == "backward":
            self._rename(self.after_backward)
        self.enter(REST)

    def pause(self) -> None:
        """What comes is no step's, until :meth:`enter`."""
        self._gap = None
        self._switch(None)

    @property
    def paused(self) -> bool:
        """Whether the moment belongs to no step."""
        return self._part is None

    def push(self, part: str) -> None:
        """Meanwhile it is this part, until :meth:`pop`; nothing changes in a pause."""
        self._interrupted.append(self._part)
        if self._part is not None:
            self._switch(part)

    def pop(self) -> None:
        """Go on with what was before."""
        before = self._interrupted.pop()
        if self._part is not None and before is not None:
            self._switch(before)

    @contextmanager
    def within(self, part: str) -> Iterator[None]:
        """Meanwhile it is this part."""
        self.push(part)
        try:
            yield
        finally:
            self.pop()

    # -- what the marks say --------------------------------------------------------------------------------------------

    def begin(self, unit_index: int, phase: str) -> None:
        """A unit begins ``phase``."""
        if not self._units and self._part is not None:
            if self._gap == phase:
                self._rename(self.between)
            elif self._gap == "backward":  # of a micro-batch, and the next one begins
                self._rename(self.after_backward)
            self._gap = None
            self._switch(COMPUTE)
        self._units.append((unit_index, phase))

    def end(self, unit_index: int, phase: str) -> None:
        """It ends; a unit within another counts with that one."""
        if (unit_index, phase) in self._units:
            del self._units[self._units.index((unit_index, phase)) :]
        if not self._units and self._part == COMPUTE:
            self._switch(REST)
            self._gap = phase

    def begin_action(self) -> None:
        """A stage begins to run something: what is no unit of it is rest."""
        if self._part == MESSAGES:
            self.enter(REST)

    def end_action(self) -> None:
        """It waits for the next."""
        if self._part is not None:
            self.enter(MESSAGES)

    # -- steps ---------------------------------------------------------------------------------------------------------

    def close_step(self) -> None:
        """The step ends here, and the next one begins."""
        now = self._now()
        self._closed.append((self._spans, now))
        self._part = self._part and REST
        self._gap = None
        self._spans = [(self._part, now)]
        self._units.clear()

    def take_steps(self, *, wait: int = 0) -> Iterator[StepParts]:
        """Yield what closed steps took, oldest first, as far as the device has run them.

        Args:
            wait: for how many of them to wait, at least.
        """
        taken = 0
        while self._closed:
            spans, end = self._closed[0]
            if isinstance(end, torch.cuda.Event) and not end.query():  # type: ignore[no-untyped-call]
                if taken >= wait:
                    return
                end.synchronize()
            self._closed.popleft()
            taken += 1
            yield self._read(spans, end)

    @property
    def closed_steps(self) -> int:
        """How many closed steps were not taken yet."""
        return len(self._closed)

    def _read(self, spans: list[tuple[str | None, Stamp]], end: Stamp) -> StepParts:
        seconds: dict[str, float] = {}
        stops = [stamp for _, stamp in spans[1:]] + [end]
        for (part, start), stop in zip(spans, stops, strict=True):
            if part is None:
                continue
            if isinstance(start, torch.cuda.Event):
                assert isinstance(stop, torch.cuda.Event)
                took_s = start.elapsed_time(stop) / 1e3
            else:
                assert isinstance(stop, float)
                took_s = stop - start
            seconds[f"{part}_s"] = seconds.get(f"{part}_s", 0.0) + took_s
        self._spare += [stamp for _, stamp in spans if isinstance(stamp, torch.cuda.Event)]
        return StepParts(**seconds)

    def _switch(self, part: str | None) -> None:
        if part != self._part or not self._spans:
            self._part = part
            self._spans.append((part, self._now()))

    def _rename(self, part: str) -> None:
        """What has been since the last switch was this part."""
        self._part = part
        self._spans[-1] = (part, self._spans[-1][1])

    def _now(self) -> Stamp:
        if not self._cuda:
            return time.perf_counter()
        event = self._spare.pop() if self._spare else torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event
