"""Bytes per rank of a sharded model, moment by moment through one optimizer step.

One rank of a shard group of G holds, with p parameters in a unit, S = ceil(p / G) per unit of each state::

    always               parameters + optimizer state            S of every unit
    forward              gradients of the step before            S of every unit (Lightning frees them after forward)
      gather of unit i   what the all-gather brought, and its copy laid out as parameters
      compute            unit i, and the next unit, gathered ahead
                         activations kept by units up to i       x samples
    loss                 all activations, and what the loss keeps
    backward             gradients                               S of the units that are done
      gather of unit i   as in forward
      inside             unit i, the previous unit, gathered ahead
                         activations kept by units up to i, gradients of the output of unit i and of what is inside it
      compute            the same, and unit i's whole gradient
                         activations kept by units up to i, gradients of the output and input of unit i
      reduce of unit i   its gradient and the copy of it that is sent, in place of its parameters
                         activations kept by units up to i - 1, gradient of its input
                         gradients that were sent and whose reduction is not over (:class:`ReduceBuffers`)
    step                 parameters + gradients + optimizer state, S of every unit
                         temporaries of the optimizer

FULL_SHARD is this. Under SHARD_GRAD_OP every unit stays gathered from its forward to its backward. Units of the root
group (what is outside the blocks) are gathered throughout, and so are their gradients in backward: FSDP2 does not
free the root's parameters after forward, and reduces its gradients last. Under NO_SHARD S is p, and there is nothing
to gather; gradients are sent unit by unit, as above.

With activation checkpointing a block keeps its input only (the output of the unit before), and all that it otherwise
keeps comes back while its backward runs. With more than one micro-batch, gradients of all units are there from the
first backward on, beside what a reduction has just brought.

Not counted: temporaries inside a unit that are neither kept nor passed on, the batch itself, the padding of dim 0 to
whole rows (below G rows per parameter), allocator fragmentation, and the communication library's own buffers. What a
unit keeps and its whole gradient are counted together, though the one goes while the other comes.
The order of events is that of ``torch/distributed/fsdp/_fully_shard`` (torch 2.14); tests/test_memory_check.py
compares with counted storages.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from lightning_hetero.cluster import Cluster
from lightning_hetero.costs import UnitCost
from lightning_hetero.errors import HeteroError, raise_all
from lightning_hetero.plan.shard import MODES
from lightning_hetero.simulator.memory import MemoryPoint, RankMemory, StateBytes


@dataclass(frozen=True)
class ReduceBuffers:
    """How many units' gradients are on their way, each as large as the unit.

    Args:
        computing: sent and still held while another unit computes.
        reducing: sent before and still held while another one is sent.
        copies: made by the communication library as a reduction ends.
    """

    computing: int
    reducing: int
    copies: int

    @classmethod
    def of(cls, cluster: Cluster) -> ReduceBuffers:
        """What ranks of this cluster hold: emulated devices are CPU ranks, which reduce over gloo."""
        return GLOO_BUFFERS if cluster.emulate else FSDP2_BUFFERS


FSDP2_BUFFERS = ReduceBuffers(computing=1, reducing=0, copies=0)
"""FSDP2 waits for a reduction before it sends the next one."""

GLOO_BUFFERS = ReduceBuffers(computing=2, reducing=2, copies=1)
"""hetero_fsdp on gloo keeps two on their way (strategies/overlap.py); gloo splits a copy of what it reduced."""


_EDGE = 2
"""units at each end of a row of alike ones whose neighbours matter"""


def shard_memory(
    units: Sequence[UnitCost],
    group_size: int,
    *,
    state: StateBytes | None = None,
    root: Collection[str] = (),
    reshard_after_forward: bool = True,
    prefetch: bool = True,
    mode: str | None = None,
    checkpointing: bool = False,
    loss_bytes: int = 0,
    accumulates: bool = False,
    buffers: ReduceBuffers = FSDP2_BUFFERS,
) -> RankMemory:
    """Memory of a rank in a shard group, by the formula at the head of this file.

    Args:
        units: the model's units in the order of forward; ``parameters``, ``kept_activation_bytes`` and
            ``output_bytes`` are used.
        group_size: ranks that shard the model together, at least 1.
        state: bytes per parameter; by default 32-bit AdamW.
        root: names of the units that belong to the root group and not to a block of their own.
        reshard_after_forward: whether blocks are freed after forward and gathered again for backward.
        prefetch: whether the next block is gathered while one is at work.
        mode: "FULL_SHARD", "SHARD_GRAD_OP" or "NO_SHARD"; by default what ``reshard_after_forward`` says.
        checkpointing: whether blocks keep only their input and run their forward again in backward.
        loss_bytes: bytes per sample that the loss keeps beside the last output.
        accumulates: whether a step has more than one micro-batch. Samples are then those of a micro-batch.
        buffers: gradients on their way.

    Returns:
        The moments that may be the peak: up to two per unit in forward and four in backward, the loss, the
        reduction of the root's gradients, and the optimizer's step. Between units that are alike, bytes grow evenly
        from one to the next, so that only the ends of a row of them can be the peak: the others are left out.

    Raises:
        HeteroError: if there is no unit, a name in ``root`` is not a unit's, ``group_size`` is below 1, or
            ``mode`` is not one of the three.
    """
    problems = [] if units else ["there is no unit: give at least one"]
    if group_size < 1:
        problems.append(f"group_size is {group_size}: give at least 1 rank")
    if mode is not None and mode not in MODES:
        problems.append(f"mode is {mode!r}: give one of {', '.join(MODES)}")
    names = {unit.name for unit in units}
    problems += [f"root names {name!r}, which is no unit: remove it" for name in root if name not in names]
    raise_all(HeteroError, "memory cannot be predicted", problems)
    step = _Step(
        units,
        group_size,
        state or StateBytes(),
        frozenset(root),
        mode or ("FULL_SHARD" if reshard_after_forward else "SHARD_GRAD_OP"),
        prefetch,
        checkpointing,
        accumulates,
        buffers,
    )
    points = [*step.forward(), *step.loss(loss_bytes), *step.backward(), *step.root_reduction(), step.optimizer()]
    return RankMemory(tuple(points))


class _Step:
    """The sums that the points of one step have in common. Parameters are counted, then turned into bytes."""

    def __init__(
        self,
        units: Sequence[UnitCost],
        group_size: int,
        state: StateBytes,
        root: frozenset[str],
        mode: str,
        prefetch: bool,
        checkpointing: bool,
        accumulates: bool,
        buffers: ReduceBuffers,
    ) -> None:
        self.units, self.state, self.buffers = units, state, buffers
        whole = mode == "NO_SHARD"
        self.shards = [unit.parameters if whole else -(-unit.parameters // group_size) for unit in units]
        # A unit of the root group is gathered for good, so it is not gathered again when its turn comes.
        self.sent = [0 if unit.name in root else unit.parameters for unit in units]
        self.blocks = [0 if whole else block for block in self.sent]
        self.root = sum(unit.parameters for unit in units if unit.name in root)
        self.gathered_root = 0 if whole else self.root
        self.whole = whole
        self.ahead_forward = _next_blocks(self.blocks) if prefetch else [0] * len(units)
        self.ahead_backward = _next_blocks(self.blocks[::-1])[::-1] if prefetch else [0] * len(units)
        self.gathers, self.stays_gathered = mode == "FULL_SHARD", mode == "SHARD_GRAD_OP"
        self.accumulates = accumulates
        self.all_shards = sum(self.shards)
        self.states = self.all_shards * (state.parameter + state.optimizer)
        self.inputs = [0, *(unit.output_bytes for unit in units)]
        self.kept, self.kept_in_backward = self._kept(root, checkpointing)
        self.inside = _inside(units, root, _EDGE + max(buffers.computing, buffers.reducing))

    def _kept(self, root: frozenset[str], checkpointing: bool) -> tuple[list[int], list[int]]:
        """Bytes per sample kept by units up to each one, after its forward and while its backward runs."""
        kept, while_backward, total = [], [], 0
        for index, unit in enumerate(self.units):
            again = checkpointing and unit.name not in root
            while_backward.append(total + unit.kept_activation_bytes)
            # A block that keeps less than its input (an embedding: whole numbers) gains nothing.
            total += min(self.inputs[index], unit.kept_activation_bytes) if again else unit.kept_activation_bytes
            if again:
                while_backward[-1] = max(while_backward[-1], total)
            kept.append(total)
        return kept, while_backward

    def forward(self) -> Iterator[MemoryPoint]:
        # Lightning frees gradients between forward and backward.
        base = self.states + self.all_shards * self.state.gradient + self.gathered_root * self.state.gathered
        before = 0
        for index, (unit, block) in enumerate(zip(self.units, self.blocks, strict=True)):
            if self.inside[index]:
                before += block if self.stays_gathered else 0
                continue
            if block:
                fixed = base + (before + 2 * block) * self.state.gathered
                kept = self.kept[index - 1] if index else 0
                yield MemoryPoint("gather in forward", unit.name, math.ceil(fixed), kept)
            fixed = base + (before + block + self.ahead_forward[index]) * self.state.gathered
            if self.stays_gathered:
                before += block
            yield MemoryPoint("forward", unit.name, math.ceil(fixed), self.kept[index])

    def loss(self, loss_bytes: int) -> Iterator[MemoryPoint]:
        if loss_bytes:
            gathered = self.gathered_root + (sum(self.blocks) if self.stays_gathered else 0)
            fixed = self.states + self.all_shards * self.state.gradient + gathered * self.state.gathered
            yield MemoryPoint("loss", "", math.ceil(fixed), self.kept[-1] + loss_bytes)

    def backward(self) -> Iterator[MemoryPoint]:
        state = self.state
        waiting, done = sum(self.blocks) if self.stays_gathered else 0, 0
        sent: list[int] = []  # of units that are done, the last one first
        for index in reversed(range(len(self.units))):
            unit, block = self.units[index], self.blocks[index]
            if self.inside[index]:
                waiting -= block if self.stays_gathered else 0
                done += self.shards[index] if self.sent[index] or self.whole else 0
                if self.sent[index]:
                    sent.insert(0, self.sent[index])
                continue
            kept_before = self.kept[index - 1] if index else 0
            into, out = self.inputs[index], unit.output_bytes
            base = self.states + 2 * self.gathered_root * state.gathered
            base += (self.all_shards if self.accumulates else done) * state.gradient
            held = sum(sent[: self.buffers.computing]) * state.reduced
            if block and self.gathers:
                fixed = base + 2 * block * state.gathered + held
                yield MemoryPoint("gather in backward", unit.name, math.ceil(fixed), self.kept[index] + out)
            if self.stays_gathered:
                waiting -= block
            else:
                waiting = self.ahead_backward[index]
            fixed = base + (waiting + block) * state.gathered + held
            if unit.inner_gradient_bytes > into:
                inside = self.kept_in_backward[index] + out + unit.inner_gradient_bytes
                yield MemoryPoint("inside backward", unit.name, math.ceil(fixed), inside)
            fixed += self.sent[index] * state.gathered
            passed = self.kept_in_backward[index] + out + into
            yield MemoryPoint("backward", unit.name, math.ceil(fixed), passed)
            done += self.shards[index] if self.sent[index] or self.whole else 0
            if self.sent[index]:
                fixed = base + waiting * state.gathered + self.shards[index] * state.gradient
                fixed += self._sending(self.sent[index], sent)
                sent.insert(0, self.sent[index])
                yield MemoryPoint("reduce", unit.name, math.ceil(fixed), kept_before + into)

    def _sending(self, unit: int, sent: Sequence[int]) -> float:
        """Bytes of gradients while one unit's are copied and sent beside those on their way."""
        state, buffers = self.state, self.buffers
        held = sum(sent[: buffers.reducing]) * state.reduced
        copied = sum(sent[max(0, buffers.reducing - buffers.copies) : buffers.reducing]) * state.reduced
        # A gradient that is whole stays what it is; others go once they are copied.
        own = unit * (0 if self.whole else state.gathered)
        full = len(sent) >= buffers.reducing
        return held + unit * state.reduced + max(own, copied if full else 0)

    def root_reduction(self) -> Iterator[MemoryPoint]:
        if self.root:
            state = self.state
            held = sum(sorted(self.sent)[-self.buffers.reducing :]) if self.buffers.reducing else 0
            fixed = self.states + self.all_shards * state.gradient
            fixed += self.root * (state.gathered + state.reduced) + held * state.reduced
            yield MemoryPoint("reduce", "root", math.ceil(fixed))

    def optimizer(self) -> MemoryPoint:
        per_parameter = self.state.gradient + self.state.step_temporary
        return MemoryPoint("step", "", math.ceil(self.states + self.all_shards * per_parameter))


def _inside(units: Sequence[UnitCost], root: frozenset[str], edge: int) -> list[bool]:
    """Whether each unit is within a row of units that are alike, at least ``edge`` units from both ends of it."""
    looks = [
        (u.parameters, u.kept_activation_bytes, u.output_bytes, u.inner_gradient_bytes, u.name in root) for u in units
    ]
    inside, start = [False] * len(units), 0
    for stop in range(1, len(units) + 1):
        if stop == len(units) or looks[stop] != looks[start]:
            for index in range(start + edge, stop - edge):
                inside[index] = True
            start = stop
    return inside


def _next_blocks(blocks: Sequence[int]) -> list[int]:
    """For each unit the parameters of the next one that is gathered; 0 where there is none."""
    following, found = 0, []
    for block in reversed(blocks):
        found.append(following)
        following = block or following
    return found[::-1]
