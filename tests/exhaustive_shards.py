"""Every shard plan of a small cluster, and random small clusters to compare on."""

from __future__ import annotations

import math
import random
from collections import Counter
from functools import cache
from itertools import combinations, product

import numpy as np

from lightning_hetero.cluster import Cluster, Device, Link
from lightning_hetero.costs import ModelCosts, UnitCost, UnitTiming
from lightning_hetero.planner.seconds import unit_timings
from lightning_hetero.planner.training import Training
from lightning_hetero.simulator.comm import Network, spread_of
from lightning_hetero.simulator.shard_prediction import group_memory
from lightning_hetero.simulator.shard_step import Passes, Traffic, crossing_s, lock_step_s
from lightning_hetero.simulator.sharded_memory import ReduceBuffers


def random_model(rng: random.Random, types: list[str]) -> ModelCosts:
    """A few blocks between a first and a last unit; seconds measured per type, or FLOPs only."""
    measured = rng.random() < 0.6
    speeds = {kind: rng.uniform(1, 6) * 1e12 for kind in types}
    block = rng.randint(10**6, 10**8)
    units = []
    for index in range(rng.randint(2, 5)):
        is_block = index > 0 or rng.random() < 0.5
        parameters = block if is_block else rng.randint(10**5, 10**7)
        flops = parameters * rng.uniform(50, 500)
        kept, output = rng.randint(10**6, 2 * 10**8), rng.randint(10**4, 2 * 10**7)
        timings = {}
        for kind in types if measured else ():
            # Types differ in what they are good at, unit by unit.
            each_s = flops / speeds[kind] * rng.uniform(0.7, 1.4)
            fixed_s = each_s * rng.choice([0, 0, rng.uniform(0, 2)])
            timings[kind] = UnitTiming(fixed_s, each_s, 2 * fixed_s, each_s * rng.uniform(1.7, 2.4))
        units.append(UnitCost(f"u{index}", parameters, flops, 2 * flops, max(kept, output), output, timings, is_block))
    return ModelCosts("random", tuple(units), loss_bytes=rng.choice([0, 10**6]))


def random_link(rng: random.Random) -> Link | None:
    if rng.random() < 0.15:
        return None
    return Link(10 ** rng.uniform(8.5, 11), 10 ** rng.uniform(-6, -3))


def random_case(seed: int, most_samples: int = 8) -> tuple[Cluster, ModelCosts, Training]:
    """A cluster of up to four devices of up to four types on up to three nodes, a model, a batch."""
    rng = random.Random(seed)
    types = [f"t{index}" for index in range(rng.randint(1, 4))]
    costs = random_model(rng, types)
    count = rng.randint(1, 4)
    batch = rng.randint(count, most_samples)
    kept = sum(unit.kept_activation_bytes for unit in costs.units)
    speeds = {kind: rng.uniform(1, 6) * 1e12 for kind in types}
    scale = 10 ** rng.uniform(-0.5, 0.6)
    devices = []
    for node in sorted(rng.randrange(3) for _ in range(count)):
        kind = rng.choice(types)
        memory = (22 * costs.parameters / count + kept * batch / count) * scale * rng.uniform(0.6, 2.5)
        devices.append(Device(kind, f"n{node}", int(memory), speeds[kind]))
    cluster = Cluster("random", tuple(devices), random_link(rng), random_link(rng))
    return cluster, costs, Training(batch)


class Exhaustive:
    """The fastest step over all partitions, modes, checkpointing, micro-batches and shares."""

    def __init__(self, cluster: Cluster, costs: ModelCosts, training: Training) -> None:
        self.cluster, self.costs, self.state = cluster, costs, training.state
        self.batch = training.global_batch_size
        self.network = Network.of(cluster)
        is_block = np.array([unit.is_block for unit in costs.units])
        timings = unit_timings(costs, cluster)
        self.passes = {}
        for rank, device in enumerate(cluster.devices):
            plain = Passes.of(timings[device.type])
            self.passes[rank] = (plain, plain.checkpointed(is_block))
        self.limits: dict[tuple[object, ...], int] = {}

    def best_s(self) -> float:
        """Seconds of the fastest step; infinite if nothing fits."""
        ranks = tuple(range(self.cluster.world_size))
        tables = {
            group: (self._table(group, ("FULL_SHARD", "SHARD_GRAD_OP")), self._table(group, ("NO_SHARD",)))
            for size in range(1, len(ranks) + 1)
            for group in combinations(ranks, size)
        }
        best = math.inf
        for partition in partitions(ranks):
            for whole in product((False, True), repeat=len(partition)):
                slowest = np.full(self.batch + 1, math.inf)
                slowest[0] = 0.0
                for group, is_whole in zip(partition, whole, strict=True):
                    table = tables[group][is_whole]
                    # least maximum over all ways to have so many samples in the groups so far
                    slowest = np.array(
                        [
                            min(max(slowest[total - own], table[own]) for own in range(total + 1))
                            for total in range(self.batch + 1)
                        ]
                    )
                sizes: set[int] = set()
                homes: Counter[object] = Counter()
                for group, is_whole in zip(partition, whole, strict=True):
                    sizes.add(1 if is_whole else len(group))
                    for replica in [(rank,) for rank in group] if is_whole else [group]:
                        nodes = {self.cluster.devices[rank].node for rank in replica}
                        homes[nodes.pop() if len(nodes) == 1 else replica] += 1
                spread = tuple(sorted(homes.values(), reverse=True))
                crossing = crossing_s(self.costs.parameters, self.state, self.network, sizes, spread)
                best = min(best, float(slowest[self.batch]) + crossing)
        return best

    def _table(self, group: tuple[int, ...], modes: tuple[str, ...]) -> np.ndarray:
        """Least seconds of a group by the samples that it does."""
        found = np.full(self.batch + 1, math.inf)
        shares = all_shares(len(group), self.batch)
        totals = shares.sum(axis=1)
        sizes = np.array(list(product(range(1, self.batch + 1), repeat=len(group))))
        for mode in modes:
            traffic = Traffic.of(self.costs, self.state, self.network, spread_of(self.cluster, group), mode)
            for again in product((False, True), repeat=len(group)):
                passes = [self.passes[rank][on] for rank, on in zip(group, again, strict=True)]
                if mode == "NO_SHARD":
                    seconds = None
                else:
                    seconds = lock_step_s(passes, sizes, traffic).reshape((self.batch,) * len(group))
                for count in range(1, self.batch + 1):
                    limit = [
                        self._limit(rank, len(group), mode, on, count > 1)
                        for rank, on in zip(group, again, strict=True)
                    ]
                    largest = np.maximum(1, -(-shares // count))
                    fits = (largest <= np.array(limit)).all(axis=1)
                    if not fits.any():
                        continue
                    taken = np.zeros(int(fits.sum()))
                    if seconds is None:
                        rows = [
                            count * own.fixed_s + own.per_sample_s * np.maximum(shares[fits][:, place], count)
                            for place, own in enumerate(passes)
                        ]
                        taken = np.max(rows, axis=0)
                    else:
                        for index in range(count):
                            now = np.maximum(1, shares[fits] // count + (index < shares[fits] % count))
                            taken += seconds[tuple((now - 1).T)]
                    np.minimum.at(found, totals[fits], taken)
        return found

    def _limit(self, rank: int, size: int, mode: str, again: bool, accumulates: bool) -> int:
        memory = self.cluster.devices[rank].memory_bytes
        key = (memory, size, mode, again, accumulates)
        if key not in self.limits:
            buffers = ReduceBuffers.of(self.cluster)
            most = group_memory(self.costs, self.state, buffers, size, mode, again, accumulates).max_samples(memory)
            self.limits[key] = self.batch if most is None else most
        return self.limits[key]


@cache
def all_shares(ranks: int, batch: int) -> np.ndarray:
    """Every way to give ranks samples, ``batch`` at most together."""
    found = np.array(list(product(range(batch + 1), repeat=ranks)))
    return found[found.sum(axis=1) <= batch]


def partitions(items: tuple[int, ...]) -> list[tuple[tuple[int, ...], ...]]:
    """Every partition into groups."""
    if not items:
        return [()]
    found = []
    for rest in partitions(items[1:]):
        found.append(((items[0],), *rest))
        for index, group in enumerate(rest):
            found.append((*rest[:index], (items[0], *group), *rest[index + 1 :]))
    return found
