"""Seconds and bytes of every stage that a model can be cut into, for one micro-batch size, as matrices.

``matrix[a, b]`` is about units a, ..., b - 1. Bytes are those of
:func:`~lightning_hetero.simulator.pipeline_memory.stage_memory`, which a test holds them to.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_hetero.costs import ModelCosts, UnitTiming
from lightning_hetero.simulator.memory import StateBytes
from lightning_hetero.simulator.pipeline import StageSeconds

Matrix = NDArray[np.float64]

# Bytes of matrices that a table keeps.
_KEPT_BYTES = 12 * 2**20


class StageTable:
    """All stages of a model, for micro-batches of one size.

    Args:
        costs: of the model.
        timings: per device type, the timing of every unit (``planner.seconds.unit_timings``).
        state: bytes per parameter.
        samples: of a micro-batch.
    """

    def __init__(
        self, costs: ModelCosts, timings: Mapping[str, Sequence[UnitTiming]], state: StateBytes, samples: int
    ) -> None:
        self.units, self.samples, self.state = len(costs.units), samples, state
        self._forward = {kind: _prefix(t.forward_s(samples) for t in row) for kind, row in timings.items()}
        self._backward = {kind: _prefix(t.backward_s(samples) for t in row) for kind, row in timings.items()}
        output = np.array([unit.output_bytes for unit in costs.units], dtype=np.float64)
        self.output_bytes = output
        before = np.concatenate([[0.0], output[:-1]])
        kept = np.array([unit.kept_activation_bytes for unit in costs.units], dtype=np.float64)
        gradient = output.copy()
        if costs.loss_bytes:
            gradient[-1] = 0.0  # in what the loss keeps
        end = np.concatenate([[0.0], output])
        end[-1] = costs.loss_bytes
        received = np.concatenate([before, [0.0]])[:, None] + np.concatenate([[0.0], output[:-1], [0.0]])[None, :]
        self._received, self._end = received, end
        self._kept = {False: _prefix(kept), True: _prefix(before)}
        inner = np.array([unit.inner_gradient_bytes for unit in costs.units], dtype=np.float64)
        self._largest_parameter = np.array([unit.largest_parameter for unit in costs.units], dtype=np.float64)
        at_work = np.maximum(before, inner) + gradient
        self._at_work = {False: at_work, True: at_work + kept}
        own = _prefix(unit.parameters for unit in costs.units)
        copies = _prefix(unit.shared_parameters for unit in costs.units)
        # Row a: the running sum of parameters for a stage that begins at a; copies of tied ones except at 0.
        self._parameters = np.where(np.arange(self.units + 1)[:, None] > 0, own + copies, own)
        self._cache: dict[Any, Matrix] = {}
        self._most_kept = max(16, _KEPT_BYTES // (8 * (self.units + 1) ** 2))
        self._found_parts: dict[bool, dict[str, Matrix]] = {}

    def both(self, kind: str) -> Matrix:
        """Seconds of forward and backward on a device type; infinite where there is no unit."""
        return self._cached(("both", kind), lambda: self._between(self._forward[kind] + self._backward[kind]))

    def forward(self, kind: str) -> Matrix:
        """Seconds of forward on a device type."""
        return self._cached(("forward", kind), lambda: self._between(self._forward[kind]))

    def seconds(self, kind: str, start: int, stop: int, checkpointing: bool) -> StageSeconds:
        """Seconds of one stage; with checkpointing, backward runs its forward again."""
        forward = float(self._forward[kind][stop] - self._forward[kind][start])
        backward = float(self._backward[kind][stop] - self._backward[kind][start])
        return StageSeconds(forward, backward + (forward if checkpointing else 0.0))

    def bytes(self, in_flight: int, all_at_once: bool, checkpointing: bool) -> Matrix:
        """Peak bytes with so many micro-batches in flight.

        Args:
            in_flight: micro-batches in flight at most.
            all_at_once: whether these are all of the step, so that no gradient is there before the first backward.
            checkpointing: whether only inputs of units are kept.
        """
        peak: Matrix = self._peak(self._parts(checkpointing), in_flight, all_at_once)
        return self._stages(peak)

    def peak_bytes(self, start: int, stop: int, in_flight: int, all_at_once: bool, checkpointing: bool) -> float:
        """The same of one stage, without the matrix."""
        parts = {name: part[start, stop] for name, part in self._parts(checkpointing).items()}
        return float(self._peak(parts, in_flight, all_at_once))

    def choice(self, kind: str, capacity: float, in_flight: int, all_at_once: bool, may_recompute: bool) -> Matrix:
        """Seconds of forward and backward: without checkpointing where that fits, else with; infinite if neither."""

        def make() -> Matrix:
            plain, both = self.bytes(in_flight, all_at_once, False) <= capacity, self.both(kind)
            again = np.full_like(both, np.inf)
            if may_recompute:
                fits = self.bytes(in_flight, all_at_once, True) <= capacity
                again = np.where(fits, both + self.forward(kind), np.inf)
            return np.where(plain, both, again)

        return self._cached(("choice", kind, capacity, in_flight, all_at_once, may_recompute), make)

    def _cached(self, key: Any, make: Any) -> Matrix:
        if key not in self._cache:
            if len(self._cache) >= self._most_kept:
                # The oldest goes: with many units these are large, and deep pipelines ask for many.
                del self._cache[next(iter(self._cache))]
            self._cache[key] = make()
        return self._cache[key]

    def _between(self, prefix: Matrix) -> Matrix:
        matrix = prefix[None, :] - prefix[:, None]
        return np.where(np.tri(self.units + 1, dtype=np.bool_), np.inf, matrix)

    def _parts(self, checkpointing: bool) -> dict[str, Matrix]:
        """What the peaks of all stages are made of, apart from how many micro-batches are in flight."""
        if checkpointing not in self._found_parts:
            kept, state, samples = self._kept[checkpointing], self.state, self.samples
            work = kept[1:] + self._at_work[checkpointing]
            end = self._end[None, :] - kept[:, None]
            parameters = self._parameters - np.diagonal(self._parameters)[:, None]
            states = parameters * (state.parameter + state.optimizer)
            fixed = np.ceil(states + parameters * state.gradient)
            largest = self._largest(np.broadcast_to(self._largest_parameter, (self.units + 1, self.units)))
            temporary = np.maximum(parameters * state.step_temporary, 2 * state.parameter * largest)
            # While the first backward has come down to unit i, gradients are there of the units from i on.
            rising = samples * work[None, :] - state.gradient * self._parameters[:, :-1]
            self._found_parts[checkpointing] = {
                "waiting": kept[None, :] + end,
                "at_work": self._largest(np.broadcast_to(work, (self.units + 1, self.units))) + end,
                "received": self._received,
                "states": np.ceil(states),
                "fixed": fixed,
                "fixed_in_backward": np.ceil(states + parameters * state.gradient + largest * state.gradient),
                "step": np.ceil(fixed + temporary),
                "first": states + state.gradient * self._parameters + self._largest(rising) + samples * end,
            }
        return self._found_parts[checkpointing]

    def _peak(self, parts: Mapping[str, Any], in_flight: int, all_at_once: bool) -> Any:
        """The formula of ``simulator.pipeline_memory``, for matrices or for the numbers of one stage."""
        samples, waiting, at_work, fixed = self.samples, parts["waiting"], parts["at_work"], parts["fixed"]
        adding = parts["fixed_in_backward"]
        others = (in_flight - 1) * waiting + parts["received"]
        if not all_at_once:
            running = np.maximum(fixed + samples * (others + waiting), adding + samples * (others + at_work))
            return np.maximum(running, parts["step"])
        peak = np.maximum(parts["states"] + samples * (others + waiting), np.ceil(parts["first"]) + samples * others)
        if in_flight > 1:
            one_less = (in_flight - 2) * waiting + parts["received"]
            peak = np.maximum(peak, adding + samples * (one_less + at_work))
        return np.maximum(peak, parts["step"])

    def _largest(self, values: Matrix) -> Matrix:
        """``[a, b]``: the largest of ``values[a, a:b]``; shape (units + 1, units) to (units + 1, units + 1)."""
        rows, columns = values.shape
        masked = np.where(np.arange(columns)[None, :] >= np.arange(rows)[:, None], values, -np.inf)
        largest = np.maximum.accumulate(masked, axis=1)
        return np.concatenate([np.full((rows, 1), -np.inf), largest], axis=1)

    def _stages(self, matrix: Matrix) -> Matrix:
        return np.where(np.tri(self.units + 1, dtype=np.bool_), np.inf, matrix)


def _prefix(values: Any) -> Matrix:
    return np.concatenate([[0.0], np.cumsum(np.fromiter(values, dtype=np.float64))])
