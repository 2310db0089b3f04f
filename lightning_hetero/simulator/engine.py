"""An event engine: tasks that occupy resources and wait for one another.

A resource does one thing at a time: a device computes, one direction of a link carries a message, the network port
of a rank takes part in a collective. A task starts when all that it waits for has ended and all its resources are
free. A resource is either in order (it runs its tasks as they were added, as a rank runs a schedule) or serves first
what is ready first. There is no chance in it: of tasks that are ready at the same moment, the one added first goes.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from lightning_hetero.errors import HeteroError


class DeadlockError(HeteroError):
    """Tasks wait for one another for ever."""


@dataclass(frozen=True)
class Timeline:
    """When everything happened.

    Args:
        names: of each task.
        resources: of each task, indices into ``resource_names``.
        start_s: of each task, seconds from the beginning.
        end_s: of each task.
        resource_names: of each resource.
        busy_s: of each resource, the seconds in which it did something.
        makespan_s: when the last task ended.
    """

    names: tuple[object, ...]
    resources: tuple[tuple[int, ...], ...]
    start_s: tuple[float, ...]
    end_s: tuple[float, ...]
    resource_names: tuple[object, ...]
    busy_s: tuple[float, ...]
    makespan_s: float


class TaskGraph:
    """Tasks, what they occupy and what they wait for; :meth:`run` says when each one starts and ends."""

    def __init__(self) -> None:
        self._resource_names: list[object] = []
        self._last: list[int | None] = []  # per resource that is in order, the task added last
        self._in_order: list[bool] = []
        self._names: list[object] = []
        self._resources: list[tuple[int, ...]] = []
        self._seconds: list[float] = []
        self._waits: list[int] = []  # per task, how many it waits for
        self._followers: list[list[int]] = []

    def add_resource(self, name: object, *, in_order: bool = True) -> int:
        """Add a resource and return its index.

        Args:
            name: for messages and timelines; anything that prints.
            in_order: whether it runs its tasks in the order in which they are added; otherwise the first that
                is ready goes first. A task that waits for a second resource holds up those behind it.
        """
        self._resource_names.append(name)
        self._last.append(None)
        self._in_order.append(in_order)
        return len(self._resource_names) - 1

    def add_task(self, name: object, resources: int | Sequence[int], seconds: float, after: Sequence[int] = ()) -> int:
        """Add a task and return its index.

        Args:
            name: for messages and timelines; anything that prints.
            resources: the resource, or all resources, that it occupies while it runs; none for a mere delay.
            seconds: how long it runs, zero or more.
            after: tasks that must have ended before.
        """
        task = len(self._names)
        held = (resources,) if isinstance(resources, int) else tuple(resources)
        self._names.append(name)
        self._resources.append(held)
        self._seconds.append(seconds)
        self._waits.append(len(after))
        self._followers.append([])
        for before in after:
            self._followers[before].append(task)
        for resource in held:
            if self._in_order[resource]:
                last = self._last[resource]
                if last is not None:
                    self._followers[last].append(task)
                    self._waits[task] += 1
                self._last[resource] = task
        return task

    def add_dependency(self, task: int, before: int) -> None:
        """Let ``task`` wait for ``before`` too, which may have been added later."""
        self._followers[before].append(task)
        self._waits[task] += 1

    def last_task(self, resource: int) -> int | None:
        """The task that was added last to a resource that is in order; ``None`` where there is none."""
        return self._last[resource]

    def run(self) -> Timeline:
        """Run everything.

        Raises:
            HeteroError: if some task takes a negative time.
            DeadlockError: if tasks wait for one another for ever, naming what waits for what.
        """
        seconds, followers, resources = self._seconds, self._followers, self._resources
        if seconds and not min(seconds) >= 0:
            bad = next(task for task, taken in enumerate(seconds) if not taken >= 0)
            raise HeteroError(f"task {self._names[bad]} takes {seconds[bad]!r} s: give zero or more")
        waits = self._waits.copy()
        count = len(seconds)
        ready, start, end = [0.0] * count, [0.0] * count, [-1.0] * count
        free = [0.0] * len(self._in_order)
        # Tasks leave the heap by the moment at which they are ready. As no task takes a negative time, none that
        # comes in later can be ready earlier, so "first ready, first served" is this order.
        heap = [(0.0, task) for task in range(count) if not waits[task]]
        while heap:
            begin, task = heapq.heappop(heap)
            for resource in resources[task]:
                if free[resource] > begin:
                    begin = free[resource]
            stop = begin + seconds[task]
            for resource in resources[task]:
                free[resource] = stop
            start[task], end[task] = begin, stop
            for follower in followers[task]:
                if stop > ready[follower]:
                    ready[follower] = stop
                waits[follower] -= 1
                if not waits[follower]:
                    heapq.heappush(heap, (ready[follower], follower))
        if min(end, default=0.0) < 0:
            raise DeadlockError(self._deadlock(end))
        busy = [0.0] * len(free)
        for task, held in enumerate(resources):
            for resource in held:
                busy[resource] += seconds[task]
        return Timeline(
            tuple(self._names),
            tuple(resources),
            tuple(start),
            tuple(end),
            tuple(self._resource_names),
            tuple(busy),
            max(end, default=0.0),
        )

    def _deadlock(self, end: Sequence[float]) -> str:
        """One line per task that is next on its resources but waits for ever, and what for."""
        before: dict[int, list[int]] = {}
        for task, following in enumerate(self._followers):
            if end[task] < 0:
                for follower in following:
                    before.setdefault(follower, []).append(task)
        stuck = [task for task in range(len(end)) if end[task] < 0]
        next_ones = [
            task
            for task in stuck
            # What is merely behind another task of its own resource says nothing new.
            if not any(set(self._resources[task]) & set(self._resources[other]) for other in before.get(task, ()))
        ] or stuck
        lines = [
            f"  - {self._names[task]}{self._on(task)} waits for "
            + " and ".join(str(self._names[other]) for other in before.get(task, ()))
            for task in next_ones[:16]
        ]
        if len(next_ones) > 16:
            lines.append(f"  - and {len(next_ones) - 16} more")
        return "\n".join([f"{len(stuck)} of {len(end)} tasks wait for one another for ever:", *lines])

    def _on(self, task: int) -> str:
        names = ", ".join(str(self._resource_names[resource]) for resource in self._resources[task])
        return f" on {names}" if names else ""
