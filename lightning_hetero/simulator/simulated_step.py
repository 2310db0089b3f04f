"""One simulated step of a plan: what each rank does, and what the whole step takes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from lightning_hetero.cluster import Cluster, Device
from lightning_hetero.simulator.calibration import DeviceConstants

COMPUTE, COMMUNICATION, BETWEEN, MESSAGES, REST = "compute", "communication", "between groups", "messages", "rest"
"""streams of a rank: its units; collectives of its shard group, or of pipelines; collectives between shard groups; each
"messages to rank 3" of a pipeline; the optimizer, and what takes time beside the model"""


@dataclass(frozen=True)
class StepSpan:
    """What a rank does from one moment to another.

    Attributes:
        rank: the rank.
        stream: which of its queues; spans of one do not overlap.
        name: of what it does ("backward blocks.3", "1F0").
        start_s: when it begins, from the step's start.
        end_s: when it ends.
    """

    rank: int
    stream: str
    name: str
    start_s: float
    end_s: float


@dataclass(frozen=True)
class SimulatedRank:
    """One rank in the step.

    Attributes:
        rank: the rank.
        device: its type.
        node: the machine that it sits in.
        samples: of the step; of a pipeline's ranks those of the whole pipeline.
        busy_s: seconds in forwards and backwards.
        exposed_s: seconds of communication that nothing hides.
        rest_s: seconds of the optimizer, and of what takes time beside the model.
        idle_s: the rest of the step: waiting for other ranks; in a pipeline its bubbles.
        peak_bytes: peak memory.
        capacity_bytes: memory that its device has.
        energy_j: joules in the step; ``None`` where the device's power is not known.
    """

    rank: int
    device: str
    node: str
    samples: int
    busy_s: float
    exposed_s: float
    rest_s: float
    idle_s: float
    peak_bytes: int
    capacity_bytes: int
    energy_j: float | None = None

    @property
    def fits(self) -> bool:
        """Whether its device has as much memory."""
        return self.peak_bytes <= self.capacity_bytes


@dataclass(frozen=True)
class SimulatedStep:
    """One step of a plan.

    Attributes:
        strategy: which strategy runs such a plan.
        global_batch_size: samples of the step.
        step_s: seconds of it.
        alone_samples_per_s: what the devices would do together if none ever waited, communicated or computed anything
            twice, whatever the plan: the ideal of unequal devices.
        ranks: all of them, in order.
        spans: who does what when; of alike ranks only the first may have any.
        assumed: what was assumed, one text each.
        no_energy: why there is no energy; empty where there is.
    """

    strategy: str
    global_batch_size: int
    step_s: float
    alone_samples_per_s: float
    ranks: tuple[SimulatedRank, ...]
    spans: tuple[StepSpan, ...] = field(default=(), repr=False)
    assumed: tuple[str, ...] = ()
    no_energy: str = ""

    @property
    def samples_per_s(self) -> float:
        """Throughput of all ranks together."""
        return self.global_batch_size / self.step_s if self.step_s > 0 else math.inf

    @property
    def share_of_alone(self) -> float:
        """Throughput over what the devices would do together if none ever waited or communicated."""
        return self.samples_per_s / self.alone_samples_per_s

    @property
    def bubble_share(self) -> float:
        """Share of the step in which a rank waits for others, in the mean over ranks."""
        return self._share("idle_s")

    @property
    def exposed_share(self) -> float:
        """Share of the step that is communication which nothing hides, in the mean over ranks."""
        return self._share("exposed_s")

    @property
    def busy_share(self) -> float:
        """Share of the step in which a rank computes, in the mean over ranks."""
        return self._share("busy_s")

    @property
    def fits(self) -> bool:
        """Whether every device has as much memory as its rank needs."""
        return all(rank.fits for rank in self.ranks)

    @property
    def fullest(self) -> SimulatedRank:
        """The rank whose device is nearest to its limit, or furthest beyond it."""
        return max(self.ranks, key=lambda rank: rank.peak_bytes / rank.capacity_bytes)

    @property
    def energy_j(self) -> float | None:
        """Joules of all devices; ``None`` with the reason in :attr:`no_energy`."""
        joules = [rank.energy_j for rank in self.ranks if rank.energy_j is not None]
        return math.fsum(joules) if len(joules) == len(self.ranks) else None

    def mean(self, name: str) -> float:
        """Mean over ranks of one of their seconds ("busy_s")."""
        return math.fsum(getattr(rank, name) for rank in self.ranks) / len(self.ranks)

    def _share(self, name: str) -> float:
        return self.mean(name) / self.step_s if self.step_s > 0 else 0.0


@dataclass(frozen=True)
class RankSeconds:
    """What one rank does before the optimizer's step.

    Attributes:
        samples: of the step.
        busy_s: seconds in forwards and backwards.
        exposed_s: seconds of communication that nothing hides.
        parameters: whose states it owns, and whose optimizer's step is still to come.
        peak_bytes: peak memory.
        rest_s: seconds of the optimizer where it has run already.
    """

    samples: int
    busy_s: float
    exposed_s: float
    parameters: float
    peak_bytes: int
    rest_s: float = 0.0


def whole_step(
    strategy: str,
    global_batch_size: int,
    alone_samples_per_s: float,
    cluster: Cluster,
    seconds: Sequence[RankSeconds],
    backward_end_s: float,
    spans: Sequence[StepSpan],
    constants: Mapping[str, DeviceConstants],
    assumed: Sequence[str] = (),
) -> SimulatedStep:
    """The step with what comes after its communication: the optimizer, and what takes time beside the model.

    Ranks meet in every step, so it lasts as long as the slowest of them takes for that.

    Args:
        strategy: which strategy runs such a plan.
        global_batch_size: samples of the step.
        alone_samples_per_s: what the devices would do together without waiting and communication.
        cluster: one device per rank.
        seconds: of each rank.
        backward_end_s: when the last backward and the last reduction have ended.
        spans: until then.
        constants: by type of device.
        assumed: what was assumed until then.
    """
    known = [constants.get(device.type, DeviceConstants()) for device in cluster.devices]
    tails = [own.tail_s(each.parameters) for own, each in zip(known, seconds, strict=True)]
    step_s = backward_end_s + max(tails)
    ranks = tuple(
        _rank(rank, device, each, own, step_s)
        for rank, (device, each, own) in enumerate(zip(cluster.devices, seconds, known, strict=True))
    )
    after = [
        StepSpan(
            rank,
            REST,
            "optimizer, input, Python" if each.parameters else "input, Python",
            backward_end_s,
            backward_end_s + tail_s,
        )
        for rank, (each, tail_s) in enumerate(zip(seconds, tails, strict=True))
        if tail_s
    ]
    unknown = sorted({rank.device for rank in ranks if rank.energy_j is None})
    why = f"watts of {', '.join(unknown)} are not known: calibrate with runs that had RankEnergy" if unknown else ""
    if not any(rank.rest_s for rank in ranks):
        assumed = [*assumed, "the optimizer's step, input and Python take no time: calibrate with measured runs"]
    return SimulatedStep(
        strategy, global_batch_size, step_s, alone_samples_per_s, ranks, (*spans, *after), tuple(assumed), why
    )


def _rank(rank: int, device: Device, seconds: RankSeconds, own: DeviceConstants, step_s: float) -> SimulatedRank:
    rest_s = seconds.rest_s + own.tail_s(seconds.parameters)
    energy_j = None
    if own.busy_power_w is not None and own.idle_power_w is not None:
        energy_j = own.busy_power_w * seconds.busy_s + own.idle_power_w * (step_s - seconds.busy_s)
    return SimulatedRank(
        rank,
        device.type,
        device.node,
        seconds.samples,
        seconds.busy_s,
        seconds.exposed_s,
        rest_s,
        # Rounding must not make a rank that is always busy wait for less than nothing.
        max(0.0, step_s - seconds.busy_s - seconds.exposed_s - rest_s),
        seconds.peak_bytes,
        device.memory_bytes,
        energy_j,
    )
