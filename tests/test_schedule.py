"""Schedules: text form, what each builder orders, and that every kind of fault is found."""

import dataclasses
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_hetero.errors import HeteroError, PlanError
from lightning_hetero.schedule import (
    Action,
    Schedule,
    build_schedule,
    find_faults,
    format_grid,
    gpipe,
    interleaved_1f1b,
    interleaving_problems,
    one_f_one_b,
    peaks_in_flight,
    validate_schedule,
    warmup_depths,
    zero_bubble,
)

SMALL = st.integers(1, 6)


def texts(schedule):
    return [fault.text for fault in find_faults(schedule)]


@given(st.integers(0, 99), st.sampled_from("FBIW"), st.integers(0, 99))
def test_actions_parse_back(stage, kind, micro_batch):
    action = Action(stage, kind, micro_batch)
    assert Action.parse(str(action)) == action


@pytest.mark.parametrize("text", ["", "F", "2F", "F0", "2X0", "-1F0", "2F0x", "2 F0"])
def test_other_texts_are_refused(text):
    with pytest.raises(HeteroError, match="is no action"):
        Action.parse(text)


def test_a_schedule_parses_back_and_lists_every_bad_word():
    schedule = one_f_one_b(3, 4)
    assert Schedule.parse(str(schedule), "1f1b") == schedule
    with pytest.raises(HeteroError) as caught:
        Schedule.parse("0F0,x\n1F0,1Q0")
    assert "rank 0, action 1: 'x'" in str(caught.value)
    assert "rank 1, action 1: '1Q0'" in str(caught.value)


def test_known_orders():
    assert str(gpipe(2, 2)) == "0F0,0F1,0B0,0B1\n1F0,1F1,1B0,1B1"
    assert str(one_f_one_b(2, 3)) == "0F0,0F1,0B0,0F2,0B1,0B2\n1F0,1B0,1F1,1B1,1F2,1B2"
    assert str(one_f_one_b(2, 3, (3, 1))) == "0F0,0F1,0F2,0B0,0B1,0B2\n1F0,1B0,1F1,1B1,1F2,1B2"
    assert str(zero_bubble(2, 2)) == "0F0,0F1,0I0,0W0,0I1,0W1\n1F0,1I0,1F1,1I1,1W0,1W1"
    # Megatron's order: one round through the first stage of a rank, then through its second.
    assert str(interleaved_1f1b(2, 2, 2)).splitlines()[0] == "0F0,0F1,2F0,2F1,2B0,2B1,0B0,0B1"


def test_warmup_depths():
    assert warmup_depths(4, 8) == (4, 3, 2, 1)
    assert warmup_depths(4, 8, 1) == (7, 5, 3, 1)
    assert warmup_depths(4, 5, 1) == (5, 5, 3, 1)
    assert warmup_depths(1, 5, 3) == (1,)


@given(SMALL, st.integers(1, 12), st.integers(0, 3))
def test_what_is_built_has_no_fault(stages, micro_batches, extra):
    depths = warmup_depths(stages, micro_batches, extra)
    schedule = one_f_one_b(stages, micro_batches, depths)
    assert find_faults(schedule) == []
    assert [peaks_in_flight(row) for row in schedule.rows] == [[{s: depth}] for s, depth in enumerate(depths)]
    for other, most in ((gpipe, micro_batches), (zero_bubble, min(stages, micro_batches))):
        assert find_faults(other(stages, micro_batches)) == []
        held = [peaks_in_flight(row)[0][s] for s, row in enumerate(other(stages, micro_batches).rows)]
        assert max(held) <= most


@given(SMALL, st.integers(1, 3), st.integers(1, 12))
def test_interleaved_has_no_fault(ranks, per_rank, micro_batches):
    if interleaving_problems(ranks, micro_batches):
        with pytest.raises(HeteroError, match="do not fill"):
            interleaved_1f1b(ranks, per_rank, micro_batches)
    else:
        schedule = interleaved_1f1b(ranks, per_rank, micro_batches)
        assert find_faults(schedule) == []
        assert {a.stage % ranks for a in schedule.rows[-1]} == {ranks - 1}


@given(SMALL, st.integers(1, 5), st.data())
def test_any_broken_schedule_is_found(stages, micro_batches, data):
    """Take an action away, double it, or move a backward to the front of its row."""
    schedule = one_f_one_b(stages, micro_batches)
    rank = data.draw(st.integers(0, stages - 1))
    row = list(schedule.rows[rank])
    index = data.draw(st.integers(0, len(row) - 1))
    how = data.draw(st.sampled_from(["remove", "double", "front"]))
    action = row.pop(index)
    if how == "double":
        row += [action, action]
    elif how == "front":
        row.insert(0, action)
    rows = list(schedule.rows)
    rows[rank] = tuple(row)
    broken = dataclasses.replace(schedule, rows=tuple(rows))
    if how == "front" and action.kind == "F":
        return
    assert any(str(action) in text for text in texts(broken))


@given(st.lists(st.integers(1, 5), min_size=2, max_size=4))
def test_depths_that_rise_deadlock_and_others_do_not(depths):
    """The rule that the builder checks is the one that the validator finds by running."""
    rows = []
    for stage, depth in enumerate(depths):
        order = [Action(stage, "F", k) for k in range(depth)]
        for k in range(5):
            order.append(Action(stage, "B", k))
            if k + depth < 5:
                order.append(Action(stage, "F", k + depth))
        rows.append(tuple(order))
    falls = all(a >= b for a, b in pairwise(depths))
    assert (find_faults(Schedule(tuple(rows), len(depths), 5)) == []) == falls
    if not falls:
        with pytest.raises(HeteroError, match="wait for ever"):
            one_f_one_b(len(depths), 5, depths)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0F0,0B0,0F1\n1F0,1B0,1F1,1B1", ["0B1 is missing"]),
        ("0F0,0B0,0B0\n1F0,1B0", ["rank 0, action 2: 0B0 is there already"]),
        ("0B0,0F0\n1F0,1B0", ["0B0 comes before 0F0", "rank 1, action 0: 1F0 waits for ever for 0F0 of rank 0"]),
        ("0F0,1B0,0B0\n1F0", ["1F0 is of a stage that rank 0 has"]),
        ("0F0,0I0\n1F0,1B0", ["0W0 is missing"]),
        ("0F0,0W0,0I0", ["0W0 comes before 0I0"]),
        ("0F0,0B0,0I0,0W0", ["0B0 and 0I0 and 0W0 are both there"]),
        ("0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1", ["0B0 waits for ever for 1B0 of rank 1", "1F1 waits for ever for 0F1"]),
    ],
)
def test_faults_are_named(text, expected):
    found = texts(Schedule.parse(text))
    for part in expected:
        assert any(part in each for each in found), found


def test_out_of_range():
    schedule = dataclasses.replace(one_f_one_b(2, 2), stages=1, micro_batches=1)
    found = texts(schedule)
    assert any("1F0 names a stage outside 0 to 0" in text for text in found)
    assert any("0F1 names a micro-batch outside 0 to 0" in text for text in found)


def test_grid_marks_the_fault():
    grid = format_grid(gpipe(2, 1))
    assert grid.splitlines() == [
        "         0   1   2   3",
        "rank 0 0F0         0B0",
        "rank 1     1F0 1B0",
    ]
    broken = Schedule.parse("0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1")
    assert format_grid(broken).splitlines()[1:] == [
        "rank 0  0F0 0B0! 0F1? 0B1?",
        "rank 1       1F0 1F1! 1B0? 1B1?",
    ]
    with pytest.raises(PlanError) as caught:
        validate_schedule(broken)
    assert "has 2 faults" in str(caught.value)
    assert "0B0!" in str(caught.value)


def test_what_the_builders_refuse():
    for arguments, expected in (
        (("gpipe", 0, 1), "stages is 0"),
        (("other", 2, 2), "give one of gpipe"),
    ):
        with pytest.raises(HeteroError, match=expected):
            build_schedule(*arguments)
    with pytest.raises(HeteroError, match="only 1f1b takes it"):
        build_schedule("gpipe", 2, 2, warmup=(1, 1))
    with pytest.raises(HeteroError, match="stages_per_rank is 2 with 1f1b"):
        build_schedule("1f1b", 2, 2, stages_per_rank=2)
    with pytest.raises(HeteroError) as caught:
        one_f_one_b(3, 2, (3, 0))
    for part in ("2 depths for 3 stages", "stage 0 is 3", "stage 1 is 0"):
        assert part in str(caught.value)
    assert build_schedule("interleaved_1f1b", 2, 4, stages_per_rank=2) == interleaved_1f1b(2, 2, 4)
    assert build_schedule("zero_bubble", 3, 4) == zero_bubble(3, 4)
