"""The event engine: known answers, a slow reference, deadlocks, speed."""

import random
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_hetero.errors import HeteroError
from lightning_hetero.simulator.engine import DeadlockError, TaskGraph


def test_one_thing_at_a_time_in_order():
    graph = TaskGraph()
    device = graph.add_resource("device")
    other = graph.add_resource("other")
    late = graph.add_task("late", other, 5)
    first = graph.add_task("first", device, 1, [late])
    second = graph.add_task("second", device, 2)
    timeline = graph.run()
    # In order: the second waits for the first, though it could have run.
    assert (timeline.start_s[first], timeline.end_s[first]) == (5, 6)
    assert (timeline.start_s[second], timeline.end_s[second]) == (6, 8)
    assert timeline.busy_s == (3, 5)
    assert timeline.makespan_s == 8
    assert timeline.names == ("late", "first", "second")


def test_first_ready_first_served():
    graph = TaskGraph()
    link = graph.add_resource("link", in_order=False)
    slow = graph.add_task("slow", (), 5)
    graph.add_task("a", link, 1, [slow])
    graph.add_task("b", link, 7)
    graph.add_task("c", link, 1)
    assert graph.run().start_s == (0, 8, 0, 7)


def test_a_task_on_two_resources_waits_for_both():
    graph = TaskGraph()
    a, b = graph.add_resource("a"), graph.add_resource("b")
    graph.add_task("x", a, 1)
    graph.add_task("y", b, 4)
    both = graph.add_task("both", (a, b), 2)
    timeline = graph.run()
    assert (timeline.start_s[both], timeline.busy_s) == (4, (3, 6))


def test_dependencies_may_come_later():
    graph = TaskGraph()
    a, b = graph.add_resource("a"), graph.add_resource("b")
    x = graph.add_task("x", a, 1)
    y = graph.add_task("y", b, 2)
    graph.add_dependency(x, y)
    assert graph.run().start_s == (2, 0)


def test_nothing_takes_no_time():
    assert TaskGraph().run().makespan_s == 0


def test_deadlock_names_what_waits_for_what():
    graph = TaskGraph()
    a, b = graph.add_resource("rank 0"), graph.add_resource("rank 1")
    graph.add_task("fine", a, 1)
    x = graph.add_task("0B0", a, 1)
    y = graph.add_task("1F1", b, 1, [graph.add_task("0F1", a, 1)])
    z = graph.add_task("1B0", b, 1)
    graph.add_dependency(x, z)
    with pytest.raises(DeadlockError) as caught:
        graph.run()
    assert str(caught.value).splitlines() == [
        "4 of 5 tasks wait for one another for ever:",
        "  - 0B0 on rank 0 waits for 1B0",
        "  - 1F1 on rank 1 waits for 0F1",
    ]
    assert y != z


@pytest.mark.parametrize("seconds", [-1.0, float("nan")])
def test_negative_seconds(seconds):
    graph = TaskGraph()
    graph.add_task("x", graph.add_resource("a"), seconds)
    with pytest.raises(HeteroError, match="task x takes"):
        graph.run()


def by_ticks(tasks, in_order):
    """A second opinion in whole seconds: every second, start what can start, by (ready, index)."""
    count, start, end = len(tasks), {}, {}
    order = {r: [t for t in range(count) if tasks[t][0] == r] for r in range(len(in_order))}
    now = 0
    while len(end) < count:
        moved = True
        while moved:
            moved = False
            for r in range(len(in_order)):
                if any(tasks[t][0] == r and start[t] <= now < end[t] for t in start):
                    continue
                waiting = [t for t in order[r] if t not in start]
                waiting = waiting[:1] if in_order[r] else waiting
                fit = [t for t in waiting if all(end.get(b, now + 1) <= now for b in tasks[t][2])]
                fit.sort(key=lambda t: (max([0, *(end[b] for b in tasks[t][2])]), t))
                if fit:
                    start[fit[0]], end[fit[0]], moved = now, now + tasks[fit[0]][1], True
        now += 1
    return [start[t] for t in range(count)]


@settings(deadline=None)
@given(st.integers(0, 10**9))
def test_against_a_clock_that_ticks(seed):
    dice = random.Random(seed)
    in_order = [dice.random() < 0.5 for _ in range(3)]
    tasks = [
        (dice.randrange(3), dice.randint(1, 4), sorted(dice.sample(range(t), min(t, dice.randint(0, 2)))))
        for t in range(dice.randint(1, 9))
    ]
    graph = TaskGraph()
    resources = [graph.add_resource(r, in_order=each) for r, each in enumerate(in_order)]
    for t, (resource, seconds, after) in enumerate(tasks):
        graph.add_task(t, resources[resource], seconds, after)
    assert list(graph.run().start_s) == by_ticks(tasks, in_order)


def test_a_hundred_thousand_tasks_are_quick():
    graph = TaskGraph()
    resources = [graph.add_resource(r, in_order=r % 2 == 0) for r in range(64)]
    for task in range(100_000):
        graph.add_task(task, resources[task % 64], 1.0, (task - 65, task - 3) if task >= 65 else ())
    begin = time.perf_counter()
    assert graph.run().makespan_s > 0
    assert time.perf_counter() - begin < 5  # 0.3 s where it was written
