"""An emulated rank takes the time and has the memory of its device."""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from lightning_hetero.cluster import Device
from lightning_hetero.costs import ModelCosts, UnitCost, UnitTiming
from lightning_hetero.emulation import OUTSIDE, Emulation
from lightning_hetero.emulation_report import EmulationReport
from lightning_hetero.errors import ClusterError, HeteroError
from lightning_hetero.models.units import find_units
from lightning_hetero.profiler.marks import Phase

GIB = 1 << 30
SAMPLES, WIDTH = 64, 128
# Two layers, forward and backward: 2 m k n, twice that with both gradients, the first layer's input needing
# none.
FORWARD = 2 * SAMPLES * WIDTH * WIDTH
STEP = 2 * FORWARD + FORWARD + 2 * FORWARD


def device(speed: float | None, true_speed: float | None = None, memory_bytes: int = GIB) -> Device:
    return Device("fast", "a", memory_bytes, speed, true_speed)


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))


def run(emulation: Emulation, net: nn.Module, steps: int = 3) -> list[float]:
    """Seconds of each step."""
    batch = torch.ones(SAMPLES, WIDTH)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    seconds = []
    emulation.start(net, [optimizer])
    for _ in range(steps):
        began_s = time.perf_counter()
        with emulation.step(batch):
            net(batch).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        seconds.append(time.perf_counter() - began_s)
    emulation.stop()
    return seconds


def assert_faithful(report: EmulationReport, steps: int) -> None:
    """What was not late was on time, but for the last wake-up of each step: true on a busy machine as well."""
    assert report.taken_s >= 0.98 * report.target_s
    assert report.taken_s - report.late_s <= 1.02 * report.target_s + 0.02 * steps


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("with_fsdp", [False, True])
def test_a_step_takes_its_flops_over_the_speed(with_fsdp: bool, one_rank: None) -> None:
    speed = STEP / 0.25  # 250 ms a step
    net = model()
    if with_fsdp:
        for layer in (net[0], net[2]):
            fully_shard(layer)
        fully_shard(net)
    emulation = Emulation(device(speed), 0, find_units(net))
    seconds = run(emulation, net)
    assert min(seconds) >= 0.25
    assert min(seconds) < 0.35
    report = emulation.report()
    assert report.target_s == pytest.approx(3 * 0.25)
    assert_faithful(report, steps=3)
    for phase in report.phases:
        assert phase.median_taken_s == pytest.approx(phase.median_target_s, rel=0.2)
    targets = {(p.unit, p.phase): p.target_s / p.runs for p in report.phases}
    assert targets == pytest.approx(
        {("0", "forward"): 0.05, ("2", "forward"): 0.05, ("2", "backward"): 0.1, ("0", "backward"): 0.05}
    )
    assert report.units_run == 12


def test_the_true_speed_counts() -> None:
    emulation = Emulation(device(STEP / 0.01, true_speed=STEP / 0.06), 0, find_units(net := model()))
    assert min(run(emulation, net, steps=2)) >= 0.06
    assert emulation.report().speed_flops_per_s == pytest.approx(STEP / 0.06)


def test_the_speed_may_change_from_unit_to_unit() -> None:
    class Warming(Emulation):
        def speed_flops_per_s(self) -> float:
            return FORWARD / 0.03 if self.report().units_run else FORWARD / 0.001

    emulation = Warming(device(1.0), 0, find_units(net := model()))
    run(emulation, net, steps=1)
    targets = [phase.target_s for phase in emulation.report().phases]
    assert targets == pytest.approx([0.001, 0.03, 0.06, 0.03])


def test_sleeping_costs_no_cpu() -> None:
    emulation = Emulation(device(STEP / 0.3), 0, find_units(net := model()))
    before_s = time.process_time()
    run(emulation, net, steps=2)
    assert time.process_time() - before_s < 0.2  # of 0.6 s


class Clock:
    """Stands for the module ``time``: passes only when told, and wakes sleepers late."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.late_s = 0.0

    def perf_counter(self) -> float:
        self.now_s += 1e-6  # a wait that looks at the clock ends
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds + self.late_s


class Paced:
    """Units with targets of so many ms, driven by hand on such a clock."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *targets_ms: float) -> None:
        self.clock = Clock()
        monkeypatch.setattr("lightning_hetero.emulation.time", self.clock)
        net = nn.Sequential(*[nn.Linear(1, 1) for _ in targets_ms])
        timings = [UnitTiming(ms / 1e3, 0.0, 0.0, 0.0) for ms in targets_ms]
        units = [UnitCost(str(i), 1, 1.0, 1.0, 1, 1, {"fast": t}) for i, t in enumerate(timings)]
        costs = ModelCosts("m", tuple(units))
        self.emulation = Emulation(device(None), 0, find_units(net), costs)

    def unit(self, index: int, compute_ms: float) -> float:
        """Milliseconds that it took."""
        began_s = self.clock.now_s
        self.emulation.begin(index, "forward")
        self.clock.now_s += compute_ms / 1e3
        self.emulation.end(index, "forward")
        return 1e3 * (self.clock.now_s - began_s)

    def late(self) -> list[int]:
        return [phase.late for phase in self.emulation.report().phases]


def test_late_wake_ups_do_not_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    paced = Paced(monkeypatch, *[20] * 10)
    paced.clock.late_s = 0.005
    with paced.emulation.step(samples=1):
        taken = [paced.unit(i, 3) for i in range(10)]
    assert taken[0] == pytest.approx(25, abs=0.1)
    assert taken[1:] == pytest.approx([20] * 9, abs=0.1)
    assert paced.late() == [0] * 10


def test_what_was_overslept_is_made_up_for_across_several_units(monkeypatch: pytest.MonkeyPatch) -> None:
    paced = Paced(monkeypatch, 20, 20, 20, 20)
    with paced.emulation.step(samples=1):
        paced.clock.late_s = 0.03
        assert paced.unit(0, 3) == pytest.approx(50, abs=0.1)
        paced.clock.late_s = 0.0
        # never less than the compute, and only what was overslept
        assert [paced.unit(i, 3) for i in (1, 2, 3)] == pytest.approx([3, 7, 20], abs=0.1)
    assert paced.late() == [0] * 4


def test_a_wait_between_units_is_never_made_up_for(monkeypatch: pytest.MonkeyPatch) -> None:
    paced = Paced(monkeypatch, 20, 20)
    with paced.emulation.step(samples=1):
        assert paced.unit(0, 3) == pytest.approx(20, abs=0.1)
        paced.clock.now_s += 1.0  # as a collective would
        assert paced.unit(1, 3) == pytest.approx(20, abs=0.1)


def test_a_late_unit_is_counted_with_by_how_much_and_not_made_up_for(monkeypatch: pytest.MonkeyPatch) -> None:
    paced = Paced(monkeypatch, 20, 20)
    with paced.emulation.step(samples=1):
        assert paced.unit(0, 27) == pytest.approx(27, abs=0.1)
        assert paced.unit(1, 3) == pytest.approx(20, abs=0.1)
    report = paced.emulation.report()
    assert paced.late() == [1, 0]
    assert report.late_s == pytest.approx(0.007, abs=1e-4)
    assert report.late_share == 0.5


def test_short_units_are_made_up_for_by_a_hundredth_of_those_that_follow(monkeypatch: pytest.MonkeyPatch) -> None:
    paced = Paced(monkeypatch, 0, 0.5, 100, 200)
    with paced.emulation.step(samples=1):
        assert paced.unit(0, 1) == pytest.approx(1, abs=0.1)
        assert paced.unit(1, 2) == pytest.approx(2, abs=0.1)
        assert paced.unit(2, 50) == pytest.approx(99, abs=0.1)
        assert paced.unit(3, 50) == pytest.approx(198.5, abs=0.1)
    report = paced.emulation.report()
    assert paced.late() == [0, 0, 0, 0]
    assert report.taken_s == pytest.approx(report.target_s, abs=2e-4)
    assert report.units_run == 3  # one had no target


def test_short_units_that_nothing_makes_up_for_are_late(monkeypatch: pytest.MonkeyPatch) -> None:
    paced = Paced(monkeypatch, 0.5, 0.5, 0.5)
    for _ in range(2):
        with paced.emulation.step(samples=1):
            for i in range(3):
                paced.unit(i, 2)
    assert paced.late() == [2, 2, 2]
    assert paced.emulation.report().late_s == pytest.approx(2 * 3 * 1.5e-3, rel=0.05)


@pytest.mark.parametrize(("compute_ms", "late"), [(0.15, 1), (0.07, 0)])
def test_a_step_whose_target_is_a_moment_is_late_by_more_than_that(
    compute_ms: float, late: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    paced = Paced(monkeypatch, 0.05, 0.05)
    with paced.emulation.step(samples=1):
        paced.unit(0, compute_ms)
        paced.unit(1, compute_ms)
    # 0.1 ms of targets; 0.2 ms or 0.04 ms more than that
    assert paced.late() == [late, late]


def test_a_step_owes_nothing_to_the_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    paced = Paced(monkeypatch, 20)
    paced.clock.late_s = 0.005
    for _ in range(2):
        with paced.emulation.step(samples=1):
            assert paced.unit(0, 3) == pytest.approx(25, abs=0.1)


class Slow(nn.Linear):
    """Really takes 20 ms."""

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(0.02)
        return super().forward(x)


def test_a_unit_that_is_really_slower_is_counted_late() -> None:
    net = nn.Sequential(Slow(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    emulation = Emulation(device(FORWARD / 0.01), 3, find_units(net))
    run(emulation, net, steps=2)
    report = emulation.report()
    (slow,) = [p for p in report.phases if (p.unit, p.phase) == ("0", "forward")]
    assert (slow.runs, slow.late) == (2, 2)
    assert 2 * 0.01 <= slow.late_s < 2 * 0.01 + 0.05
    assert report.units_late >= 2
    assert report.late_s >= slow.late_s


def costs(*names: str, kind: str = "fast") -> ModelCosts:
    timing = UnitTiming(0.01, 0.02 / SAMPLES, 0.02, 0.04 / SAMPLES)
    return ModelCosts("m", tuple(UnitCost(n, 1, 1.0, 2.0, 1, 1, {kind: timing}) for n in names))


def test_costs_give_the_seconds_in_place_of_flops() -> None:
    emulation = Emulation(device(None), 0, find_units(net := model()), costs("0", "2"))
    seconds = run(emulation, net, steps=2)
    assert min(seconds) >= 2 * (0.03 + 0.06)
    targets = {(p.unit, p.phase): p.target_s / p.runs for p in emulation.report().phases}
    assert targets == pytest.approx(
        {("0", "forward"): 0.03, ("2", "forward"): 0.03, ("2", "backward"): 0.06, ("0", "backward"): 0.06}
    )


def test_costs_that_lack_units_or_the_device_type_are_refused_with_all_of_them() -> None:
    units = find_units(model())
    with pytest.raises(HeteroError, match=r"'0' has no costs[\s\S]*'2' has no costs"):
        Emulation(device(1e9), 0, units, costs("other"))
    with pytest.raises(HeteroError, match=r"no timing for device type 'fast' \(has: slow\)"):
        Emulation(device(1e9), 0, units, costs("0", "2", kind="slow"))


def test_a_device_without_speed_is_refused() -> None:
    with pytest.raises(ClusterError, match=r"rank 5 \(fast\) has no speed"):
        Emulation(device(None), 5, find_units(model()))


def test_products_outside_units_take_their_time_too() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return self.first(x) @ self.first.weight

    net = Tied()
    emulation = Emulation(device(FORWARD / 0.01), 0, find_units(net))
    seconds = run(emulation, net, steps=1)
    assert seconds[0] >= 0.01 * (1 + 1 + 1 + 2)
    (outside,) = [p for p in emulation.report().phases if p.unit == OUTSIDE]
    assert outside.target_s == pytest.approx(0.03)


def test_outside_of_steps_nothing_is_emulated() -> None:
    net = model()
    emulation = Emulation(device(STEP / 10), 0, find_units(net))
    emulation.start(net)
    began_s = time.perf_counter()
    net(torch.ones(SAMPLES, WIDTH)).sum().backward()
    assert time.perf_counter() - began_s < 2
    assert emulation.report().phases == ()


def test_gradients_are_bitwise_those_without_emulation() -> None:
    found = []
    for emulated in (False, True):
        net = model()
        emulation = Emulation(device(STEP / 0.001), 0, find_units(net))
        emulation.start(net)
        batch = torch.linspace(-1, 1, SAMPLES * WIDTH).reshape(SAMPLES, WIDTH)
        if emulated:
            with emulation.step(batch):
                net(batch).square().sum().backward()
        else:
            net(batch).square().sum().backward()
        found.append([p.grad for p in net.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_listeners_stand_around_the_sleep() -> None:
    times: list[float] = []

    class Timer:
        def begin(self, unit_index: int, phase: Phase) -> None:
            times.append(-time.perf_counter())

        def end(self, unit_index: int, phase: Phase) -> None:
            times[-1] += time.perf_counter()

    net = model()
    run(Emulation(device(STEP / 0.1), 0, find_units(net), listeners=[Timer()]), net, steps=1)
    # a unit that overslept is made up for by the next one, so that sums are what is kept, and not each unit's time
    kept = zip(accumulate(times), accumulate([0.02, 0.02, 0.04, 0.02]), strict=True)
    assert all(taken_s > 0.9 * target_s for taken_s, target_s in kept)


def test_steps_do_not_nest_and_an_error_leaves_nothing_active() -> None:
    net = model()
    emulation = Emulation(device(STEP / 0.001), 0, find_units(net))
    emulation.start(net)
    with emulation.step(), pytest.raises(RuntimeError, match="do not nest"), emulation.step():
        pass
    with pytest.raises(ArithmeticError), emulation.step():
        raise ArithmeticError
    assert active_modes() == []
    with emulation.step(torch.ones(1)):
        net(torch.ones(SAMPLES, WIDTH)).sum().backward()
    assert emulation.report().units_run == 4


def active_modes() -> list[Any]:
    return list(_get_current_dispatch_mode_stack())


# memory
