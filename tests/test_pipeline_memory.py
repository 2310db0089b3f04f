"""Bytes of a pipeline stage: by hand, and against an account kept action by action."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_hetero.costs import ModelCosts, UnitCost
from lightning_hetero.errors import HeteroError
from lightning_hetero.schedule import gpipe, interleaved_1f1b, one_f_one_b, peaks_in_flight, warmup_depths, zero_bubble
from lightning_hetero.simulator.memory import StateBytes
from lightning_hetero.simulator.pipeline_memory import StageUnits, rank_memory, stage_memory


def unit(name, parameters, kept, output, shared=0):
    return UnitCost(name, parameters, 0, 0, kept, output, shared_parameters=shared)


COSTS = ModelCosts(
    "m",
    (unit("embed", 1000, 50, 10), unit("b0", 100, 300, 10), unit("b1", 100, 300, 10), unit("head", 40, 20, 5, 1000)),
    loss_bytes=15,
)
ADAMW = 16  # bytes per parameter: parameter, gradient, two moments


def test_a_middle_stage_by_hand():
    memory = stage_memory(COSTS, StageUnits(1, 3), 2, 8)
    # Two in flight with 300 + 300 kept and the output of 10; gradient of output and input; an input and a gradient
    # received ahead.
    assert memory.peak_bytes(1) == 200 * ADAMW + 2 * 610 + 20 + 20
    assert memory.peak_bytes(5) == 200 * ADAMW + 5 * (2 * 610 + 20 + 20)
    assert (memory.peak(1).phase, memory.peak(1).place) == ("backward", "b1")


def test_checkpointing_keeps_inputs_and_one_unit():
    memory = stage_memory(COSTS, StageUnits(1, 3, True), 2, 8)
    assert memory.peak_bytes(1) == 200 * ADAMW + 2 * (20 + 10) + 300 + 20 + 20


def test_first_and_last_stage_by_hand():
    first = stage_memory(COSTS, StageUnits(0, 1), 3, 8)
    assert first.peak_bytes(1) == 1000 * ADAMW + 3 * (50 + 10) + 10 + 10
    last = stage_memory(COSTS, StageUnits(3, 4), 1, 8)
    # The tied weights are there once more; what the loss keeps has the gradient of the output in it.
    assert last.peak_bytes(1) == 1040 * ADAMW + 20 + 15 + 10 + 10
    whole = stage_memory(COSTS, StageUnits(0, 4), 1, 8)
    assert whole.peak_bytes(1) == 1240 * ADAMW + 670 + 15 + 10


def test_one_step_of_gpipe_has_no_gradients_before_backward():
    state = StateBytes(4, 4, 8)
    memory = stage_memory(COSTS, StageUnits(1, 3), 2, 2, state=state)
    forward = memory.points[0]
    assert (forward.phase, forward.fixed_bytes, forward.bytes_per_sample) == ("forward", 200 * 12, 2 * 610 + 20)
    assert memory.points[2].fixed_bytes == 200 * 12 + 100 * 4  # backward of b1 has only its own
    assert memory.points[1].fixed_bytes == 200 * 16
    # With few samples the gradients of the second backward weigh more than the activations of the first.
    assert memory.peak_bytes(0) == 200 * 16


def test_step_temporaries():
    memory = stage_memory(COSTS, StageUnits(1, 3), 1, 1, state=StateBytes(step_temporary=400))
    assert memory.peak(1).phase == "step"
    assert memory.peak_bytes(1) == 200 * 416


def account(costs, row, stages, state, samples):
    """The most bytes over a row of actions, adding and freeing one thing after the other."""
    units = costs.units
    last = len(units)
    held, gradients, most = 0, set(), 0

    def shape(stage):
        part = stages[stage]
        ins = [units[u - 1].output_bytes if u else 0 for u in range(part.start, part.stop)]
        kept = [units[u].kept_activation_bytes for u in range(part.start, part.stop)]
        end = costs.loss_bytes if part.stop == last else units[part.stop - 1].output_bytes
        return part, ins, kept, (ins if part.activation_checkpointing else kept), end

    def size(u, part):
        return units[u].parameters + (units[u].shared_parameters if part.start else 0)

    states = sum(
        size(u, p) * (state.parameter + state.optimizer) for p in stages.values() for u in range(p.start, p.stop)
    )
    buffers = sum(shape(s)[1][0] + (0 if p.stop == last else units[p.stop - 1].output_bytes) for s, p in stages.items())
    grads = {u: size(u, p) * state.gradient for p in stages.values() for u in range(p.start, p.stop)}

    def note(extra=0):
        nonlocal most
        most = max(most, states + sum(grads[u] for u in gradients) + samples * (held + buffers + extra))

    for action in row:
        part, ins, kept, stays, end = shape(action.stage)
        if action.kind == "F":
            held += sum(stays) + end
            note()
        elif action.kind in "BI":
            freed = 0
            for u in reversed(range(part.start, part.stop)):
                i = u - part.start
                out = 0 if u == last - 1 and costs.loss_bytes else units[u].output_bytes
                gradients.add(u)
                note(out + ins[i] + (kept[i] if part.activation_checkpointing else 0) - freed)
                freed += stays[i]
            if action.kind == "B":
                held -= sum(stays) + end
        else:
            held -= sum(stays) + end
    return most


MODELS = st.lists(
    st.tuples(st.integers(0, 500), st.integers(0, 300), st.integers(0, 50), st.sampled_from([0, 0, 70])),
    min_size=4,
    max_size=7,
)


def drawn(parts, loss):
    return ModelCosts("m", tuple(unit(f"u{i}", *part) for i, part in enumerate(parts)), loss_bytes=loss)


@given(MODELS, st.integers(0, 90), st.integers(1, 6), st.integers(0, 2), st.booleans(), st.integers(1, 5), st.data())
def test_against_an_account(parts, loss, micro_batches, extra, recompute, samples, data):
    costs, state = drawn(parts, loss), StateBytes()
    cut = data.draw(st.integers(1, len(parts) - 2))
    stages = [StageUnits(0, cut, recompute), StageUnits(cut, cut + 1), StageUnits(cut + 1, len(parts), recompute)]
    for schedule in (
        gpipe(3, micro_batches),
        one_f_one_b(3, micro_batches, warmup_depths(3, micro_batches, extra)),
    ):
        for stage, row in enumerate(schedule.rows):
            memory = rank_memory(costs, {stage: stages[stage]}, peaks_in_flight(row), micro_batches, state=state)
            assert memory.peak_bytes(samples) == account(costs, row, {stage: stages[stage]}, state, samples)


@given(MODELS, st.integers(0, 90), st.integers(1, 4), st.integers(1, 5))
def test_several_stages_on_a_rank_against_an_account(parts, loss, rounds, samples):
    """Not below the account, and not far above it: gradients are counted as there from the beginning."""
    costs, state = drawn(parts, loss), StateBytes()
    ends = [0, 1, 2, 3, len(parts)]
    schedule = interleaved_1f1b(2, 2, 2 * rounds)
    for rank, row in enumerate(schedule.rows):
        stages = {s: StageUnits(ends[s], ends[s + 1]) for s in (rank, rank + 2)}
        peak = rank_memory(costs, stages, peaks_in_flight(row), 2 * rounds, state=state).peak_bytes(samples)
        counted = account(costs, row, stages, state, samples)
        gradients = sum(costs.units[u].parameters + 70 for s in stages.values() for u in range(s.start, s.stop)) * 4
        assert counted <= peak <= counted + gradients


def test_zero_bubble_holds_until_parameters_have_their_gradients():
    row = zero_bubble(3, 6).rows[2]
    assert peaks_in_flight(row) == [{2: 3}]
    memory = rank_memory(COSTS, {2: StageUnits(3, 4)}, peaks_in_flight(row), 6)
    assert memory == stage_memory(COSTS, StageUnits(3, 4), 3, 6)


def test_what_is_refused():
    with pytest.raises(HeteroError) as caught:
        stage_memory(COSTS, StageUnits(2, 5), 3, 2)
    assert "units 2 to 4 are not in a model of 4 units" in str(caught.value)
    assert "in_flight is 3" in str(caught.value)
