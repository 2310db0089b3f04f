"""Good orders and cuts for the devices of one pipeline, by closed form."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lightning_hetero.planner.layouts import Block, orders_of
from lightning_hetero.planner.pipeline_design import Policy, Problem
from lightning_hetero.planner.stage_cut import Cut, find_cuts
from lightning_hetero.planner.stage_table import StageTable

_FEW = 4  # with more stages fewer bottlenecks are looked at, since every cut takes longer
_FEW_SLACKS = (0.04,)


@dataclass(frozen=True)
class Option:
    """An order of a block's ranks (as positions in the block) and a cut."""

    order: tuple[int, ...]
    cut: Cut


@dataclass(frozen=True)
class Chain:
    """What one pipeline can do.

    Args:
        options: orders and cuts, all of which fit the memory.
        seconds: ``[m - 1]`` is about what the best option takes for m micro-batches; rising.
        best: which option that is.
    """

    options: tuple[Option, ...]
    seconds: NDArray[np.float64]
    best: NDArray[np.int64]

    def alternatives(self, micro_batches: int, most: int) -> list[Option]:
        """The best cut of each order, then the further ones, by what they take for so many micro-batches."""
        ranked = sorted(self.options, key=lambda option: option.cut.seconds(micro_batches))
        first = list({option.order: option for option in reversed(ranked)}.values())[::-1]
        chosen = sorted(first, key=lambda option: option.cut.seconds(micro_batches))[:most]
        return chosen + [option for option in ranked if option not in chosen][: most - len(chosen)]


class Chains:
    """Finds chains, and remembers them: blocks that look alike are one.

    Args:
        problem: what is planned.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.names = [
            (kind, room, node) for kind, room, node in zip(problem.kinds, problem.capacity, problem.nodes, strict=True)
        ]
        self._classes = [name[:2] for name in self.names]
        self._chains: dict[object, Chain | None] = {}
        self._cuts: dict[object, list[Cut]] = {}
        self._hop_rows: dict[tuple[int, bool], NDArray[np.float64]] = {}

    def looks(self, block: Block) -> tuple[object, ...]:
        """What tells blocks apart: types, memory, and which ranks share a node, in the order of the block."""
        nodes: dict[str, int] = {}
        return tuple((self._classes[rank], nodes.setdefault(self.problem.nodes[rank], len(nodes))) for rank in block)

    def find(self, block: Block, samples: int, policy: Policy, expected: int, most: int) -> Chain | None:
        """The chain of a block.

        Args:
            block: its ranks.
            samples: of a micro-batch.
            policy: schedule and warm-up.
            expected: micro-batches that it will about run, which sets how many are in flight.
            most: micro-batches that it may run.

        Returns:
            The chain, ``None`` if nothing fits.
        """
        held = policy.in_flight(len(block), max(1, expected))
        key = (self.looks(block), samples, policy, held, expected == held[0], most)
        if key not in self._chains:
            self._chains[key] = self._find(block, samples, policy, held, expected, most)
        return self._chains[key]

    def _find(
        self, block: Block, samples: int, policy: Policy, held: tuple[int, ...], expected: int, most: int
    ) -> Chain | None:
        options = []
        for order in orders_of(block, self.names, self._classes):
            places = tuple(block.index(rank) for rank in order)
            options += [Option(places, cut) for cut in self._cut(order, samples, policy, held, expected)]
        if not options:
            return None
        count = np.arange(most, dtype=np.float64)
        way = np.array([option.cut.way_s for option in options])
        slowest = np.array([option.cut.slowest_s for option in options])
        if len(options) * most <= 100_000:
            total = way[:, None] + count[None, :] * slowest[:, None]
            best = total.argmin(axis=0)
            return Chain(tuple(options), total[best, np.arange(most)], best)
        # With so many micro-batches the slowest stage is all that counts.
        least = int(np.lexsort((way, slowest))[0])
        return Chain(tuple(options), way[least] + count * slowest[least], np.full(most, least))

    def _cut(self, order: Block, samples: int, policy: Policy, held: tuple[int, ...], expected: int) -> list[Cut]:
        key = (self.looks(order), samples, policy, held, tuple(each == expected for each in held))
        if key not in self._cuts:
            problem, table, stages = self.problem, self.problem.table(samples), len(order) * policy.stages_per_rank
            if stages > problem.units:
                return []
            seconds = []
            for stage in range(stages):
                rank = order[stage % len(order)]
                # Of several stages of a rank each may have its part of the memory; the search checks the whole.
                room = problem.capacity[rank] / policy.stages_per_rank
                seconds.append(
                    table.choice(problem.kinds[rank], room, held[stage], expected == held[stage], policy.may_recompute)
                )
            hops = self._hops(order, table, stages)
            slacks = {} if stages <= _FEW else {"slacks": _FEW_SLACKS}
            self._cuts[key] = find_cuts(seconds, hops, **slacks)
        return self._cuts[key]

    def _hops(self, order: Sequence[int], table: StageTable, stages: int) -> list[NDArray[np.float64]]:
        """Per border between stages: seconds of a message, by the unit before which the border lies."""
        nodes, hops = self.problem.nodes, []
        for stage in range(stages - 1):
            same = nodes[order[stage % len(order)]] == nodes[order[(stage + 1) % len(order)]]
            key = table.samples, same
            if key not in self._hop_rows:
                sizes = np.concatenate([[0.0], table.output_bytes]) * table.samples
                row = [self.problem.network.point_to_point_s(float(size), same) for size in sizes]
                self._hop_rows[key] = np.array(row)
            hops.append(self._hop_rows[key])
        return hops
