"""On CUDA seconds are the device's, by events that nobody waits for: with events that tick where the test says.

What only a GPU can show, that events on the current stream are where the kernels are, is not shown here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

from lightning_hetero.callbacks import span_recorder
from lightning_hetero.callbacks.span_recorder import SpanRecorder
from lightning_hetero.models.units import Unit
from lightning_hetero.profiler import memory_source, step_timeline, timer
from lightning_hetero.profiler.memory import LiveStorages
from lightning_hetero.profiler.memory_source import AllocatorMemory, CountedMemory, SampledMemory
from lightning_hetero.profiler.shared_peak import SharedPeak
from lightning_hetero.profiler.step_timeline import INPUT, OPTIMIZER, REST, StepParts, StepTimeline
from lightning_hetero.profiler.timer import UnitTimer
from lightning_hetero.strategies import first_batch, instruments
from lightning_hetero.strategies.first_batch import FirstBatch
from lightning_hetero.strategies.pipe import message_probe

CUDA = torch.device("cuda", 0)


class Device:
    """A queue of work: what is recorded gets its time when the device comes to it."""

    def __init__(self) -> None:
        self.queue: deque[Event | float] = deque()
        self.now_s = 50.0
        self.waits = self.made = 0

    def work(self, seconds: float) -> None:
        self.queue.append(seconds)

    def run(self, until: Event | None = None) -> None:
        while self.queue:
            item = self.queue.popleft()
            if isinstance(item, float):
                self.now_s += item
                continue
            item.at_s = self.now_s
            if item is until:
                return


class Event:
    """In place of torch.cuda.Event."""

    device: Device

    def __init__(self, enable_timing: bool = False) -> None:
        assert enable_timing
        self.device.made += 1
        self.at_s: float | None = None

    def record(self) -> None:
        self.at_s = None
        self.device.queue.append(self)

    def query(self) -> bool:
        return self.at_s is not None

    def synchronize(self) -> None:
        self.device.waits += 1
        if self.at_s is None:
            self.device.run(self)

    def elapsed_time(self, end: Event) -> float:
        assert self.at_s is not None
        assert end.at_s is not None
        return 1e3 * (end.at_s - self.at_s)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    class NoClock:
        def perf_counter(self) -> float:
            raise AssertionError("the host's clock")

        monotonic = time = perf_counter

    Event.device = device = Device()
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: device.run())
    for module in (step_timeline, timer, span_recorder):
        monkeypatch.setattr(module, "time", NoClock())
    return device


def step(timeline: StepTimeline, device: Device, scale: float = 1.0) -> None:
    timeline.enter(INPUT)
    device.work(1.0 * scale)
    timeline.enter(REST)
    for phase, seconds in (("forward", 2.0), ("backward", 4.0)):
        timeline.begin(0, phase)
        device.work(seconds * scale)
        timeline.end(0, phase)
    timeline.end_backward()
    timeline.enter(OPTIMIZER)
    device.work(8.0 * scale)
    timeline.enter(REST)
    timeline.close_step()


def test_parts_of_a_step_are_the_devices_seconds_and_nothing_waits_for_them(device: Device) -> None:
    timeline = StepTimeline(CUDA)
    step(timeline, device)
    assert list(timeline.take_steps()) == []  # the device has not come to it
    step(timeline, device, 2.0)
    assert (timeline.closed_steps, device.waits) == (2, 0)
    # to wait for one step is not to wait for the other
    assert list(timeline.take_steps(wait=1)) == [StepParts(compute_s=6, input_s=1, optimizer_s=8)]
    assert (timeline.closed_steps, device.waits) == (1, 1)
    device.run()
    assert list(timeline.take_steps()) == [StepParts(compute_s=12, input_s=2, optimizer_s=16)]
    assert device.waits == 1
    made = device.made
    for _ in range(3):  # events are used again
        step(timeline, device)
        device.run()
        assert list(timeline.take_steps()) == [StepParts(compute_s=6, input_s=1, optimizer_s=8)]
    assert device.made == made


def test_busy_seconds_are_the_devices(device: Device) -> None:
    busy = UnitTimer(CUDA)
    for phase in ("forward", "backward"):
        busy.begin(0, phase)
        device.work(3.0)
        busy.end(0, phase)
        device.work(1.0)
    assert busy.take_s() == pytest.approx(6.0)
    assert busy.take_s() == 0.0


def test_spans_of_a_traced_step_are_the_devices(device: Device) -> None:
    recorder = SpanRecorder(CUDA, lambda: "0F0")
    device.work(7.0)  # of the step before
    recorder.start()
    assert device.now_s == 57.0  # it has done that: what is profiled from here on is the step's
    recorder.begin_action()
    device.work(1.0)
    recorder.begin(0, "forward")
    device.work(2.0)
    recorder.end(0, "forward")
    recorder.end_action()
    recorder.stop()
    assert recorder.unit_spans(["a"]) == [("a", "forward", pytest.approx(1.0), pytest.approx(3.0))]
    assert recorder.actions == [("0F0", 0.0, pytest.approx(3.0))]
    assert recorder.step_s == pytest.approx(3.0)


class HostClock:
    """A host that does nothing but wait for the device."""

    def __init__(self, device: Device) -> None:
        self._device = device

    def perf_counter(self) -> float:
        return self._device.now_s


def test_a_message_takes_until_it_is_there(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL's wait() has the stream wait, not the host."""
    monkeypatch.setattr(message_probe, "time", HostClock(device))
    monkeypatch.setattr(message_probe, "torch", SimpleNamespace(zeros=lambda *_, **__: device.work(5.0)))
    monkeypatch.setattr(message_probe, "_there_and_back", lambda *_: device.work(3.0))
    # through three stages and back: four messages
    assert message_probe._seconds(None, 0, (0, 1, 2), 1024, CUDA) == pytest.approx(0.75)  # type: ignore[arg-type]


class OneUnit(pl.LightningModule):
    def __init__(self, device: Device) -> None:
        super().__init__()
        self.net = torch.nn.Linear(2, 2)
        self.queue = device

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self.net(batch).sum()


class LastReduction:
    """The root's reduce-scatter, after the last unit's backward."""

    crosses = False

    def __init__(self, device: Device) -> None:
        self._device = device

    def begin_forward(self) -> None:
        pass

    @contextmanager
    def backward(self, is_last: bool) -> Iterator[None]:
        yield
        self._device.work(4.0)


def test_a_measured_step_ends_when_its_last_reduction_does(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(first_batch, "time", HostClock(device))
    monkeypatch.setattr(instruments, "cuda_peak", lambda _: SharedPeak(lambda: 0, lambda: None))
    module = OneUnit(device)
    own = instruments.Instruments(module, [Unit("net", module.net, True)], CUDA, 0)
    module.net.register_forward_hook(lambda *_: device.work(2.0), prepend=True)
    reduction: Any = LastReduction(device)
    first = FirstBatch(module, None, 0, to_device=id, context=nullcontext, instruments=own, reduction=reduction)

    def batch(samples: int) -> torch.Tensor:
        device.work(9.0)  # copied to the device
        return torch.ones(samples, 2)

    monkeypatch.setattr(first, "batch", batch)
    found = first.measure_step(2)
    own.close()
    assert (found.busy_s, found.wall_s) == (pytest.approx(2.0), pytest.approx(6.0))


# -- memory ------------------------------------------------------------------------------------------------------------


def test_memory_is_what_torchs_allocator_says(monkeypatch: pytest.MonkeyPatch) -> None:
    now = {"allocated_bytes": 10, "reserved_bytes": 64, "active_bytes": 16}
    most = [10]

    def reset() -> None:
        most[0] = now["allocated_bytes"]

    def use(size: int) -> None:
        now["allocated_bytes"] = size
        most[0] = max(most[0], size)

    stats: Any = {}
    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", lambda device: stats)
    monkeypatch.setattr(memory_source, "cuda_peak", lambda device: SharedPeak(lambda: most[0], reset))
    source = AllocatorMemory(CUDA)
    use(40)
    use(10)
    source.open(torch.nn.Identity(), [], None)  # what was between two batches is no step's
    use(20)
    use(5)
    assert source.take_peak_bytes() == 20
    use(7)
    assert source.take_peak_bytes() == 7  # of the next phase
    stats |= {name: {"all": {"current": size, "peak": 99}, "small_pool": {"current": 1}} for name, size in now.items()}
    assert source.now() == {"current": 7, "reserved": 64, "active": 16}


def test_counted_memory_begins_anew_with_each_batch_and_phase() -> None:
    sizes = [5]
    shared = SharedPeak(lambda: max(sizes), lambda: sizes.__delitem__(slice(0, -1)))
    source = CountedMemory(LiveStorages(), shared)
    sizes += [40, 10]
    source.open(torch.nn.Identity(), [], None)
    sizes += [20, 5]
    assert source.take_peak_bytes() == 20
    sizes += [7]
    assert source.take_peak_bytes() == 7


def test_sampled_memory_begins_anew_with_each_phase() -> None:
    source, module = SampledMemory(), torch.nn.Linear(4, 4)
    source.open(module, [], None)
    large = torch.zeros(2**20)
    model_bytes = 4 * (16 + 4)
    del large
    assert source.take_peak_bytes() == model_bytes + 4 * 2**20
    small = torch.zeros(2**10)
    assert source.take_peak_bytes() == model_bytes + small.nbytes
    source.close()
