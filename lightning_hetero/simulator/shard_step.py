"""Seconds of one optimizer step of a shard plan.

::

    step        = slowest group + crossing
    group       = sum over its micro-batches of (forward + backward), in lock-step: each unit takes as long as the
                  slowest rank of the group needs for its samples
    forward     = gather(root) + gather(first) + sum over units u of max(compute(u), gather(u + 1))
    backward    = gather(last) + sum over units u of max(compute(u), gather(u - 1) + reduce(u + 1))
                  + reduce(first) + reduce(root)
    crossing    = all-reduce, over the groups, of the gradients that a rank owns, once a step

``gather`` is the all-gather of a unit's parameters over the group, ``reduce`` the reduce-scatter of its gradients; the
communication of the neighbouring units runs beside the compute of a unit, as FSDP2 prefetches one unit ahead, and
all-gather and reduce-scatter share the links. Units outside the blocks form the root group, which is gathered before
the first unit and reduced after the last. SHARD_GRAD_OP gathers nothing in backward. NO_SHARD gathers and reduces
nothing: its ranks meet at the crossing only, each a replica of its own. With activation checkpointing a block's
backward includes its forward. A rank without samples computes one all the same.

The crossing is by ownership of rows: a rank of a group of n owns 1/n of every parameter, and reduces it with the
owners of the same rows in the other groups, piece by piece where borders differ. The smallest group has most to
reduce, and sets the time. It is counted in full: nothing is assumed to run beside it.

The optimizer's step is taken for negligible: it touches each parameter once, backward touches it once per sample.
Communication costs are those of :mod:`~lightning_hetero.simulator.comm`. The overlap is that of
``torch/distributed/fsdp/_fully_shard`` (torch 2.14) on a device whose communication has a stream of its own.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from lightning_hetero.costs import ModelCosts, UnitTiming
from lightning_hetero.simulator.comm import Network, Spread
from lightning_hetero.simulator.memory import StateBytes

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Passes:
    """Seconds of every unit on one type of device: ``fixed + per_sample * samples``; arrays with one entry per unit."""

    forward_fixed_s: Floats
    forward_per_sample_s: Floats
    backward_fixed_s: Floats
    backward_per_sample_s: Floats

    @classmethod
    def of(cls, timings: Sequence[UnitTiming]) -> Passes:
        """From a unit's timings each. A negative fixed part, which a fit may give, counts as none."""
        rows = [
            (t.forward_fixed_s, t.forward_per_sample_s, t.backward_fixed_s, t.backward_per_sample_s) for t in timings
        ]
        return cls(*np.maximum(np.asarray(rows, dtype=np.float64).reshape(-1, 4).T, 0.0))

    def checkpointed(self, is_block: NDArray[np.bool_]) -> Passes:
        """With the forward of blocks run again in backward."""
        return Passes(
            self.forward_fixed_s,
            self.forward_per_sample_s,
            self.backward_fixed_s + np.where(is_block, self.forward_fixed_s, 0.0),
            self.backward_per_sample_s + np.where(is_block, self.forward_per_sample_s, 0.0),
        )

    @cached_property
    def fixed_s(self) -> float:
        """Seconds of forward and backward of all units whatever the samples."""
        return float(self.forward_fixed_s.sum() + self.backward_fixed_s.sum())

    @cached_property
    def per_sample_s(self) -> float:
        """Seconds of forward and backward of all units that each sample adds."""
        return float(self.forward_per_sample_s.sum() + self.backward_per_sample_s.sum())


@dataclass(frozen=True)
class Traffic:
    """Seconds of a group's communication: per unit (0 for those of the root group) and of the root group.

    Units that cost the same between neighbours that do take the same time, so each sort of them is summed once:
    ``alike`` has an index of each sort, and how many there are of it.
    """

    gather_s: Floats
    gather_again_s: Floats
    reduce_s: Floats
    root_s: float
    alike: tuple[NDArray[np.int64], NDArray[np.int64]]

    @classmethod
    def none(cls, units: int) -> Traffic:
        """Of ranks that send nothing to each other, for so many units."""
        nothing = np.zeros(units)
        return cls(nothing, nothing, nothing, 0.0, (np.arange(units), np.ones(units, dtype=np.int64)))

    @classmethod
    def of(cls, costs: ModelCosts, state: StateBytes, network: Network, spread: Spread, mode: str) -> Traffic:
        """Of a group whose ranks are spread over nodes like this, under one of the sharding modes."""
        units = costs.units
        alike = (np.array(costs.alike[0]), np.array(costs.alike[1]))
        if mode == "NO_SHARD" or sum(spread) == 1:
            return replace(cls.none(len(units)), alike=alike)
        known: dict[int, tuple[float, float]] = {}
        for parameters in {unit.parameters for unit in units if unit.is_block}:
            gather = network.all_gather_s(parameters * state.gathered, spread)
            known[parameters] = (gather, network.reduce_scatter_s(parameters * state.reduced, spread))
        pairs = [known[unit.parameters] if unit.is_block else (0.0, 0.0) for unit in units]
        gather_s = np.array([pair[0] for pair in pairs])
        root = sum(unit.parameters for unit in units if not unit.is_block)
        root_s = network.all_gather_s(root * state.gathered, spread)
        root_s += network.reduce_scatter_s(root * state.reduced, spread)
        again = gather_s if mode == "FULL_SHARD" else np.zeros(len(units))
        return cls(gather_s, again, np.array([pair[1] for pair in pairs]), root_s, alike)

    def micro_batch_s(self, forward_s: Floats, backward_s: Floats) -> Floats:
        """Seconds of one micro-batch from the compute of each unit, in lock-step.

        Args:
            forward_s: shape (..., sorts of units), of the slowest rank.
            backward_s: the same.

        Returns:
            Shape (...).
        """
        ahead, beside = self._neighbours_s
        seconds: Floats = (np.maximum(forward_s, ahead) + np.maximum(backward_s, beside)) @ self.alike[1]
        exposed = self.root_s + self.gather_s[0] + self.gather_again_s[-1] + self.reduce_s[0]
        seconds += exposed
        return seconds

    @cached_property
    def _neighbours_s(self) -> tuple[Floats, Floats]:
        """Communication that runs beside the forward and backward of each sort of units."""
        ahead = np.append(self.gather_s[1:], 0.0)
        beside = np.append(0.0, self.gather_again_s[:-1]) + np.append(self.reduce_s[1:], 0.0)
        return ahead[self.alike[0]], beside[self.alike[0]]


def lock_step_s(passes: Sequence[Passes], samples: NDArray[np.int64], traffic: Traffic) -> Floats:
    """Seconds of one micro-batch of a group in lock-step.

    Args:
        passes: of each kind of rank in the group.
        samples: shape (..., kinds), of each kind's micro-batch; 0 counts as 1.
        traffic: of the group.

    Returns:
        Shape (...).
    """
    counts, sorts = np.maximum(samples, 1)[..., np.newaxis], traffic.alike[0]
    forward = backward = None
    for kind, own in enumerate(passes):
        own_forward = own.forward_fixed_s[sorts] + own.forward_per_sample_s[sorts] * counts[..., kind, :]
        own_backward = own.backward_fixed_s[sorts] + own.backward_per_sample_s[sorts] * counts[..., kind, :]
        forward = own_forward if forward is None else np.maximum(forward, own_forward)
        backward = own_backward if backward is None else np.maximum(backward, own_backward)
    assert forward is not None
    assert backward is not None
    return traffic.micro_batch_s(forward, backward)


def group_s(passes: Sequence[Passes], shares: Sequence[int], micro_batches: int, traffic: Traffic, mode: str) -> float:
    """Seconds of a group's part of a step, without the crossing.

    Args:
        passes: of each rank (or of each kind of rank with equal shares).
        shares: samples of each in the step, split evenly into micro-batches, larger ones first.
        micro_batches: of the step, at least 1.
        traffic: of the group.
        mode: under NO_SHARD the ranks do not wait for each other within the step.
    """
    if mode == "NO_SHARD":
        return max(busy_s(own, share, micro_batches) for own, share in zip(passes, shares, strict=True))
    quotients = [share // micro_batches for share in shares]
    rests = [share % micro_batches for share in shares]
    # Between two borders all micro-batches are alike.
    borders = sorted({0, micro_batches, *rests})
    sizes = [[q + (start < rest) for q, rest in zip(quotients, rests, strict=True)] for start in borders[:-1]]
    lengths = np.diff(np.asarray(borders))
    return float(lock_step_s(passes, np.asarray(sizes, dtype=np.int64), traffic) @ lengths)


def busy_s(passes: Passes, share: int, micro_batches: int) -> float:
    """Seconds that a rank computes in a step; micro-batches without samples compute one."""
    return micro_batches * passes.fixed_s + passes.per_sample_s * max(share, micro_batches)


def crossing_s(
    parameters: int, state: StateBytes, network: Network, sizes: Collection[int], replica_spread: Spread
) -> float:
    """Seconds of reducing gradients over all replicas, once a step.

    Args:
        parameters: of the model.
        state: bytes per parameter; ``reduced`` is used.
        network: the links.
        sizes: numbers of ranks that share the rows of a replica, each number once.
        replica_spread: replicas per node; one that spans several is on a node of its own.
    """
    if sum(replica_spread) <= 1:
        return 0.0
    fewest = min(sizes)
    # Borders of larger groups within the rows of a rank of the smallest one.
    cuts = sum(-(-size // fewest) if size % fewest else size // fewest - 1 for size in set(sizes) - {fewest})
    pieces = 1 + cuts
    return pieces * network.all_reduce_s(parameters * state.reduced / fewest / pieces, replica_spread)
