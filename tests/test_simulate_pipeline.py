"""The simulated pipeline: known answers, bounds, and a slow reference on tiny cases."""

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_hetero.cluster import Link
from lightning_hetero.errors import HeteroError
from lightning_hetero.schedule import (
    Schedule,
    gpipe,
    interleaved_1f1b,
    needs,
    one_f_one_b,
    warmup_depths,
    zero_bubble,
)
from lightning_hetero.simulator.engine import DeadlockError, TaskGraph
from lightning_hetero.simulator.flow import stage_ends_s
from lightning_hetero.simulator.pipeline import StageSeconds, simulate_pipeline
from lightning_hetero.simulator.reductions import Reduction, simulate_reductions

SIZES = st.tuples(st.integers(1, 5), st.integers(1, 9))
TIMES = st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=4)


def stages_of(times):
    return [StageSeconds(*each) for each in times]


@given(SIZES)
def test_equal_stages_and_free_messages(sizes):
    p, m = sizes
    stages = [StageSeconds(2, 3)] * p
    for schedule in (gpipe(p, m), one_f_one_b(p, m), one_f_one_b(p, m, warmup_depths(p, m, 1))):
        result = simulate_pipeline(schedule, stages)
        assert result.step_s == (p - 1 + m) * 5
        assert result.busy_s == (5 * m,) * p
        assert result.bubble == pytest.approx((p - 1) / (p - 1 + m))
        assert result.idle_shares() == pytest.approx([(p - 1) / (p - 1 + m)] * p)


@given(TIMES, st.integers(1, 9), st.integers(0, 3))
def test_gpipe_is_two_flow_shops(times, m, hop):
    """sum(f) + (m - 1) max(f), and the same backward; messages add to the way, or are what is slowest."""
    stages = stages_of(times)
    hops = [hop] * (len(times) - 1)
    forward, backward = zip(*times, strict=True)
    expected = sum(
        sum(phase) + sum(hops) + (m - 1) * max(max(phase), hop if hops else 0) for phase in (forward, backward)
    )
    assert simulate_pipeline(gpipe(len(times), m), stages, hops).step_s == expected


@given(st.lists(st.integers(1, 9), min_size=1, max_size=4), st.integers(1, 9))
def test_the_bound_of_the_design(forward, m):
    """With backward = 2 x forward GPipe takes sum(t) + (m - 1) max(t)."""
    stages = [StageSeconds(f, 2 * f) for f in forward]
    total = [3 * f for f in forward]
    assert simulate_pipeline(gpipe(len(forward), m), stages).step_s == sum(total) + (m - 1) * max(total)


@given(TIMES, st.integers(1, 9), st.integers(0, 3), st.integers(0, 3))
def test_no_schedule_beats_what_each_stage_must_wait_for(times, m, hop, extra):
    """Before stage i works, and after it, there is the way to it and back; and one micro-batch goes all the way."""
    p, stages, hops = len(times), stages_of(times), [hop] * (len(times) - 1)
    total = [f + b for f, b in times]
    whole = sum(total) + 2 * sum(hops)
    bound = max(sum(total[:i]) + 2 * sum(hops[:i]) + m * total[i] for i in range(p))
    slowest = max(*(max(each) for each in times), *hops, 0)
    bound = max(bound, whole + (m - 1) * slowest)
    depths = warmup_depths(p, m, extra)
    for schedule in (gpipe(p, m), one_f_one_b(p, m, depths)):
        assert simulate_pipeline(schedule, stages, hops).step_s >= bound


def test_a_slow_first_stage_can_beat_the_usual_bound():
    """While later stages work on the last micro-batch but one, the first one still has enough to do."""
    stages = [StageSeconds(4, 4), StageSeconds(1, 1)]
    assert simulate_pipeline(one_f_one_b(2, 4), stages).step_s == 32 < 10 + 3 * 8
    assert simulate_pipeline(gpipe(2, 4), stages).step_s == 34


def earliest(schedule, seconds, hops):
    """End of the step by relaxing all starts until nothing moves; messages one by one in the order they leave."""
    split = {a.stage for row in schedule.rows for a in row if a.kind == "I"}
    end = {action: 0 for row in schedule.rows for action in row}
    sent = {}
    while True:
        before = dict(end), dict(sent)
        for row in schedule.rows:
            for up in (1, -1):
                free = 0
                for action in row:
                    target = action.stage + up
                    if action.kind == ("F" if up == 1 else "I" if action.stage in split else "B"):
                        if not 0 <= target < schedule.stages:
                            continue
                        hop = hops[min(action.stage, target)]
                        free = sent[action, target] = max(free, end[action]) + hop
            free = 0
            for action in row:
                start = free
                for need in needs(action, schedule.stages, action.stage + 1 in split):
                    start = max(start, end[need] if need.stage == action.stage else sent.get((need, action.stage), 0))
                free = end[action] = start + seconds(action)
        if (end, sent) == before:
            return max(end.values())


@settings(deadline=None, max_examples=60)
@given(TIMES, st.integers(1, 5), st.integers(0, 4), st.sampled_from(["gpipe", "1f1b", "deep", "zero"]))
def test_against_relaxation(times, m, hop, name):
    p, stages = len(times), stages_of(times)
    schedule = {
        "gpipe": gpipe(p, m),
        "1f1b": one_f_one_b(p, m),
        "deep": one_f_one_b(p, m, warmup_depths(p, m, 1)),
        "zero": zero_bubble(p, m),
    }[name]
    hops = [hop + s for s in range(p - 1)]
    expected = earliest(schedule, lambda a: stages[a.stage].of(a.kind), hops)
    assert simulate_pipeline(schedule, stages, hops).step_s == expected


@settings(deadline=None, max_examples=25)
@given(st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 3), st.integers(1, 3)), st.integers(0, 2))
def test_gpipe_and_1f1b_against_every_order(times, hop):
    """Two stages, two micro-batches: no order of the actions is faster than the best named schedule, none missed."""
    stages = [StageSeconds(times[0], times[1]), StageSeconds(times[2], times[3])]
    rows = [[f"{s}F0", f"{s}F1", f"{s}B0", f"{s}B1"] for s in (0, 1)]
    found = []
    for first, second in itertools.product(*(itertools.permutations(row) for row in rows)):
        schedule = Schedule.parse(",".join(first) + "\n" + ",".join(second))
        try:
            found.append(simulate_pipeline(schedule, stages, [hop]).step_s)
        except DeadlockError:
            continue
    deep = simulate_pipeline(one_f_one_b(2, 2), stages, [hop]).step_s
    # 1F1B with two warm-up micro-batches on stage 0 is best here: nothing else can be put before.
    assert min(found) == min(deep, simulate_pipeline(gpipe(2, 2), stages, [hop]).step_s)


def test_deep_warm_up_hides_messages():
    stages = [StageSeconds(1, 1)] * 4
    hop = Link(1e9, 1e-6).seconds(0.5e9)
    usual = simulate_pipeline(one_f_one_b(4, 32), stages, [hop] * 3).step_s
    deep = simulate_pipeline(one_f_one_b(4, 32, warmup_depths(4, 32, 1)), stages, [hop] * 3).step_s
    assert deep == pytest.approx((3 + 32) * 2 + 6 * hop)
    assert deep < 0.8 * usual


@given(SIZES)
def test_zero_bubble_is_not_slower(sizes):
    p, m = sizes
    stages = [StageSeconds(1, 2)] * p
    plain = simulate_pipeline(one_f_one_b(p, m), stages)
    filled = simulate_pipeline(zero_bubble(p, m), stages)
    assert filled.step_s <= plain.step_s
    if m >= p:
        # ZB-H1 leaves (p - 1) (f + i - w) of the bubble (p - 1) (f + b).
        assert filled.step_s == 3 * m + (p - 1)


def test_interleaving_shrinks_the_bubble():
    plain = simulate_pipeline(one_f_one_b(4, 8), [StageSeconds(2, 4)] * 4)
    interleaved = simulate_pipeline(interleaved_1f1b(4, 2, 8), [StageSeconds(1, 2)] * 8)
    assert plain.step_s == (3 + 8) * 6
    assert interleaved.step_s == 8 * 6 + 3 * 6 / 2
    assert interleaved.busy_s == plain.busy_s


def test_stages_of_one_rank_need_no_message():
    interleaved = simulate_pipeline(interleaved_1f1b(1, 2, 2), [StageSeconds(1, 1)] * 2, [100])
    assert interleaved.step_s == 8


def test_deadlock_and_wrong_sizes():
    with pytest.raises(DeadlockError, match="0B0 on rank 0 waits for 1B0"):
        simulate_pipeline(Schedule.parse("0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1"), [StageSeconds(1, 1)] * 2)
    with pytest.raises(HeteroError, match="1F0 needs 0F0, which is not in the schedule"):
        simulate_pipeline(Schedule.parse("0F1,0B1\n1F0,1B0,1F1,1B1"), [StageSeconds(1, 1)] * 2)
    with pytest.raises(HeteroError) as caught:
        simulate_pipeline(gpipe(2, 1), [StageSeconds(1, 1)], [1, 2])
    assert "stages has 1 entries for 2 stages" in str(caught.value)
    assert "hop_s has 2 entries" in str(caught.value)


def test_reductions_wait_for_all_owners_and_go_one_by_one():
    ends = [[10.0, 8.0], [7.0]]
    # Units of stage 1 first: ready at 8; those of stage 0 at 10, and rank 0 of pipeline 1 is in both.
    both = [Reduction(3.0, ((0, 1), (1, 0))), Reduction(4.0, ((0, 0), (1, 0)))]
    result = simulate_reductions(ends, both)
    assert (result.step_s, result.order) == (8 + 3 + 4, (0, 1))
    assert simulate_reductions(ends, both[1:]).step_s == 14
    assert simulate_reductions(ends, []).step_s == 10
    # Two stages on one rank share its port.
    assert simulate_reductions([[4.0, 4.0]] * 2, [Reduction(1, ((0, s), (1, s))) for s in (1, 0)], [1, 1]).step_s == 6


def test_reductions_of_different_ranks_run_side_by_side():
    """Cuts that differ make a chain of reductions that share ranks; every second one can run at once."""
    first = [Reduction(1.0, ((0, s), (1, t))) for s, t in ((0, 0), (0, 1), (1, 1), (1, 2), (2, 2))]
    result = simulate_reductions([[0.0] * 3, [0.0] * 3], first)
    assert result.step_s == 2
    assert sorted(result.order[:3]) == [0, 2, 4]


@settings(deadline=None)
@given(st.integers(0, 10**9))
def test_the_order_of_reductions_runs_as_said(seed):
    """All ranks walk through the reductions in the order that is given, and it takes as long as was said."""
    dice = random.Random(seed)
    ends = [[float(dice.randint(0, 5)) for _ in range(dice.randint(1, 4))] for _ in range(dice.randint(1, 3))]
    owners = [(p, s) for p, stages in enumerate(ends) for s in range(len(stages))]
    reductions = [
        Reduction(float(dice.randint(1, 5)), tuple(dice.sample(owners, dice.randint(1, len(owners)))))
        for _ in range(dice.randint(0, 6))
    ]
    result = simulate_reductions(ends, reductions)
    graph = TaskGraph()
    ports = {owner: graph.add_resource(owner) for owner in owners}
    done = {(p, s): graph.add_task("done", (), ends[p][s]) for p, s in owners}
    for index in result.order:
        each = reductions[index]
        held = [ports[owner] for owner in each.owners]
        graph.add_task(index, held, each.seconds, [done[owner] for owner in each.owners])
    assert graph.run().makespan_s == result.step_s
    assert sorted(result.order) == list(range(len(reductions)))


@settings(deadline=None)
@given(TIMES, st.integers(1, 9), st.integers(0, 4), st.integers(0, 3), st.booleans())
def test_the_short_way_to_the_end_is_the_same(times, m, hop, extra, all_first):
    p, stages = len(times), stages_of(times)
    hops = [hop * (s + 1) for s in range(p - 1)]
    depths = (m,) * p if all_first else warmup_depths(p, m, extra)
    whole = simulate_pipeline(gpipe(p, m) if all_first else one_f_one_b(p, m, depths), stages, hops)
    assert stage_ends_s(depths, m, stages, hops) == whole.stage_end_s


def test_the_short_way_sees_deadlocks():
    with pytest.raises(HeteroError, match="wait for ever"):
        stage_ends_s((1, 2), 3, [StageSeconds(1, 1)] * 2, [0.0])
