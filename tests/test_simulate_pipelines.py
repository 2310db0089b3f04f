"""A whole plan's step: sends that block, links that are shared, reductions, optimizer."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_hetero.errors import HeteroError
from lightning_hetero.schedule import Action, gpipe, interleaved_1f1b, one_f_one_b, zero_bubble
from lightning_hetero.simulator.pipeline import Hop, PointToPoint, StageSeconds, simulate_pipeline
from lightning_hetero.simulator.pipelines import PipelineLoad, simulate_pipelines
from lightning_hetero.simulator.reductions import Reduction

ONE = StageSeconds(1, 1)
BLOCKING, GRADIENT_FIRST = PointToPoint(blocking=True), PointToPoint(gradient_first=True)
TIMES = st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=4)


def load(times, m, hop=0, schedule=one_f_one_b, **how):
    stages = tuple(StageSeconds(*each) for each in times)
    return PipelineLoad(schedule(len(times), m), stages, (Hop(hop),) * (len(times) - 1), **how)


def test_a_blocking_send_holds_its_device():
    """Two stages of 1 s, two micro-batches, messages of 1 s: each send is one second more on its rank."""
    assert simulate_pipeline(gpipe(2, 2), [ONE] * 2, [1]).step_s == 8
    assert simulate_pipeline(gpipe(2, 2), [ONE] * 2, [1], BLOCKING).step_s == 10
    assert simulate_pipeline(gpipe(2, 2), [ONE] * 2, [1], BLOCKING).busy_s == (4, 4)


@settings(deadline=None, max_examples=60)
@given(TIMES, st.integers(1, 9), st.integers(0, 4), st.sampled_from([gpipe, one_f_one_b, zero_bubble]))
def test_blocking_is_never_faster(times, m, hop, schedule):
    stages, hops = [StageSeconds(*each) for each in times], [hop] * (len(times) - 1)
    free = simulate_pipeline(schedule(len(times), m), stages, hops)
    held = simulate_pipeline(schedule(len(times), m), stages, hops, BLOCKING)
    assert held.step_s >= free.step_s
    if not hop:
        assert held.stage_end_s == free.stage_end_s
    # Each rank computes, and sends all that it sends, one after the other.
    sends = [m * ((rank > 0) + (rank + 1 < len(times))) for rank in range(len(times))]
    for busy, count in zip(held.busy_s, sends, strict=True):
        assert held.step_s >= busy + count * hop


@pytest.mark.parametrize(
    ("times", "hop", "each"),
    [
        ([(1, 2), (4, 5)], 3, 2 * 3 + 4 + 5),  # the later stage, and its messages there and back
        ([(8, 9), (4, 5)], 3, 8 + 9),  # the earlier stage is slower than all that
        ([(1, 2), (4, 5)], 0, 4 + 5),
    ],
)
def test_gradient_first_makes_messages_part_of_each_micro_batch(times, hop, each):
    stages = [StageSeconds(*one) for one in times]
    steps = [simulate_pipeline(one_f_one_b(2, m), stages, [hop], GRADIENT_FIRST).step_s for m in (20, 21)]
    assert steps[1] - steps[0] == each


@settings(deadline=None, max_examples=60)
@given(TIMES, st.integers(1, 9), st.integers(0, 4), st.booleans())
def test_gradient_first_is_never_faster(times, m, hop, blocking):
    stages, hops = [StageSeconds(*each) for each in times], [hop] * (len(times) - 1)
    plain = simulate_pipeline(one_f_one_b(len(times), m), stages, hops, PointToPoint(blocking))
    first = simulate_pipeline(one_f_one_b(len(times), m), stages, hops, PointToPoint(blocking, True))
    assert first.step_s >= plain.step_s


def deepspeed_instructions(stage, stages, m):
    """What DeepSpeed's pipeline engine does in a step, as its documentation of TrainSchedule has it.

    In turn a forward and a backward, in which stages next to one another do the opposite; first of all messages.
    """
    found, before = [], None
    for moment in range(2 * (m + stages - 1)):
        is_forward = moment % 2 == stage % 2
        k = (moment - stage) // 2 if is_forward else (moment + stage + 1 - 2 * stages) // 2
        current = k if 0 <= k < m else None
        if is_forward:
            found += [("send", before, stage - 1)] if before is not None and stage else []
            found += [("receive", current, stage - 1)] if current is not None and stage else []
        elif stage + 1 < stages:
            found += [("receive", current, stage + 1)] if current is not None else []
            found += [("send", before, stage + 1)] if before is not None else []
        found += [("F" if is_forward else "B", current, stage)] if current is not None else []
        before = current
    return found


def run_instructions(times, hop, m):
    """When each stage ends, by doing what can be done until nothing is left; sends are not waited for."""
    count = len(times)
    lists = [deepspeed_instructions(stage, count, m) for stage in range(count)]
    now, links, arrived, done = [0] * count, {}, {}, [0] * count
    moved = True
    while moved:
        moved = False
        for stage, instructions in enumerate(lists):
            while done[stage] < len(instructions):
                what, k, other = instructions[done[stage]]
                if what == "receive":
                    if (other, stage, k) not in arrived:
                        break
                    now[stage] = max(now[stage], arrived[other, stage, k])
                elif what == "send":
                    free = max(links.get((stage, other), 0), now[stage]) + hop
                    links[stage, other] = arrived[stage, other, k] = free
                else:
                    now[stage] += times[stage][what == "B"]
                done[stage] += 1
                moved = True
    assert done == list(map(len, lists))
    return tuple(now)


@settings(deadline=None, max_examples=80)
@given(TIMES, st.integers(1, 9), st.integers(0, 6))
def test_gradient_first_is_what_deepspeeds_instructions_give(times, m, hop):
    stages, hops = [StageSeconds(*each) for each in times], [hop] * (len(times) - 1)
    result = simulate_pipeline(one_f_one_b(len(times), m), stages, hops, GRADIENT_FIRST)
    assert result.stage_end_s == run_instructions(times, hop, m)


def test_outputs_that_the_later_stage_needs_first_leave_at_once():
    """In GPipe all of them, and in 1F1B where there are fewer micro-batches than stages."""
    for schedule in (gpipe(3, 4), one_f_one_b(3, 1)):
        plain = simulate_pipeline(schedule, [ONE] * 3, [2, 2])
        assert simulate_pipeline(schedule, [ONE] * 3, [2, 2], GRADIENT_FIRST).stage_end_s == plain.stage_end_s


@settings(deadline=None)
@given(TIMES, st.integers(1, 9), st.integers(0, 4), st.booleans())
def test_one_pipeline_is_what_it_is_alone(times, m, hop, blocking):
    sending = PointToPoint(blocking)
    alone = simulate_pipeline(
        one_f_one_b(len(times), m), [StageSeconds(*t) for t in times], [hop] * (len(times) - 1), sending
    )
    several = simulate_pipelines([load(times, m, hop), load(times, m + 1, hop)], sending=sending)
    assert several.stage_end_s[0] == alone.stage_end_s
    assert several.busy_s[0] == alone.busy_s
    assert several.step_s == max(several.stage_end_s[1]) >= alone.step_s


def test_a_shared_link_carries_one_message_at_a_time():
    """Messages of 5 s are slowest: two pipelines on one link take twice as long per micro-batch."""

    def step(m, up, down):
        pipeline = PipelineLoad(one_f_one_b(2, m), (ONE,) * 2, (Hop(5, up, down),))
        return simulate_pipelines([pipeline] * 2).step_s

    def per_micro_batch(*names):
        return (step(41, *names) - step(1, *names)) / 40

    own, shared = per_micro_batch(None, None), per_micro_batch("a to b", "b to a")
    # A round trip is 1 + 5 + 2 + 5 + 1 = 14 s for the two micro-batches in flight.
    assert own == pytest.approx(7, rel=0.05)
    assert shared == pytest.approx(10, rel=0.05)
    # One name for both directions: a half-duplex link.
    assert per_micro_batch("a", "a") == pytest.approx(20, rel=0.05)


def test_reductions_and_optimizers_come_last():
    """Stages end at 4 and 5 s, and 4 and 3 s."""
    pipelines = [load([(1, 1), (1, 1)], 2, optimizer_s=(0.5, 0.25)), load([(1, 1), (1, 1)], 1, optimizer_s=(0.5, 0.25))]
    reductions = [Reduction(2, ((0, 1), (1, 1))), Reduction(3, ((0, 0), (1, 0)))]
    result = simulate_pipelines(pipelines, reductions)
    assert result.stage_end_s == ((6, 5), (4, 3))
    assert result.reduction_end_s == (7, 9)
    assert result.step_s == 9.5
    assert result.exposed_communication_s == 3
    assert result.busy_s == ((4.5, 4.25), (2.5, 2.25))
    assert result.bubble == pytest.approx(1 - 13.5 / 38)
    # Both over one link: the second waits for the first.
    over = [Reduction(each.seconds, each.owners, ("a to b",)) for each in reductions]
    assert simulate_pipelines(pipelines, over).reduction_end_s == (7, 10)


def test_free_communication_exposes_nothing():
    result = simulate_pipelines([load([(1, 2), (2, 1)], 4)] * 2)
    assert result.exposed_communication_s == 0
    assert simulate_pipelines([load([(1, 2), (2, 1)], 4, hop=1)] * 2).exposed_communication_s > 0


@settings(deadline=None, max_examples=40)
@given(TIMES, st.integers(1, 6), st.integers(0, 3), st.booleans(), st.booleans())
def test_spans_show_each_rank_doing_one_thing_at_a_time(times, m, hop, blocking, gradient_first):
    count = len(times)
    pipelines = [load(times, m, hop, optimizer_s=(1.0,) * count), load(times[::-1], m, hop)]
    reductions = [Reduction(2.0, ((0, stage), (1, stage))) for stage in range(count)]
    result = simulate_pipelines(pipelines, reductions, PointToPoint(blocking, gradient_first))
    ranks = {}
    for span in sorted(result.spans, key=lambda span: (span.start_s, span.end_s)):
        ranks.setdefault(span.rank, []).append(span)
    assert sorted(ranks) == list(range(2 * count))
    for spans in ranks.values():
        assert all(one.end_s <= two.start_s for one, two in itertools.pairwise(spans))
    busy = [sum(s.end_s - s.start_s for s in ranks[r] if s.kind in ("F", "B", "optimizer")) for r in sorted(ranks)]
    assert busy == pytest.approx([*result.busy_s[0], *result.busy_s[1]])
    assert result.step_s == max(span.end_s for span in result.spans)


def test_stages_of_one_rank_share_its_optimizer_and_reductions():
    pipeline = PipelineLoad(interleaved_1f1b(2, 2, 2), (ONE,) * 4, (Hop(0),) * 3, (1.0,) * 4)
    result = simulate_pipelines([pipeline] * 2, [Reduction(1.0, ((0, s), (1, s))) for s in range(4)])
    assert [len(each) for each in result.busy_s] == [2, 2]
    assert result.busy_s[0] == (8 + 2, 8 + 2)
    # Stage 0 is last, on rank 0: then its reduction, then two optimizers.
    assert result.step_s == result.stage_end_s[0][0] + 1 + 2


def test_the_order_of_actions_is_the_schedule():
    result = simulate_pipelines([load([(1, 1), (1, 1)], 3)])
    for rank, row in enumerate(one_f_one_b(2, 3).rows):
        assert [Action.parse(span.name) for span in result.spans if span.rank == rank] == list(row)


def test_what_does_not_fit_is_listed():
    with pytest.raises(HeteroError) as caught:
        simulate_pipelines(
            [PipelineLoad(one_f_one_b(2, 1), (ONE,), (), (1.0, 1.0, 1.0))], [Reduction(1, ((0, 5), (3, 0)))]
        )
    for text in (
        "pipeline 0: stages has 1 entries for 2 stages",
        "pipeline 0: hop_s has 0 entries for 2 stages",
        "pipeline 0: optimizer_s has 3 entries for 1 stages",
        "reduction 0: pipeline 0 has no stage 5",
        "reduction 0: pipeline 3 has no stage 0",
    ):
        assert text in str(caught.value)
    with pytest.raises(HeteroError, match="there is no pipeline"):
        simulate_pipelines([])
