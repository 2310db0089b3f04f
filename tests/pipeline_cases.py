"""Random small clusters and models, and the exhaustive search over all pipeline designs for them."""

import itertools
import math
import random

from lightning_hetero.cluster import Cluster, Device, Link
from lightning_hetero.costs import ModelCosts, UnitCost, UnitTiming
from lightning_hetero.planner.pipeline import micro_batch_sizes, policies_of
from lightning_hetero.planner.pipeline_design import Design, PipelineDesign, Problem
from lightning_hetero.planner.seconds import unit_timings
from lightning_hetero.planner.training import Training


def random_case(seed, most_devices=4, most_units=8, most_batch=10):
    """A cluster of random types, speeds, memories and links, a random model, and how it is trained."""
    dice = random.Random(seed)
    kinds = dice.sample(["a", "b", "c"], dice.randint(1, 3))
    speeds = {kind: 10 ** dice.uniform(-0.7, 0.3) for kind in kinds}
    rooms = {kind: int(10 ** dice.uniform(4.3, 5.8)) for kind in kinds}
    world = dice.randint(1, most_devices)
    nodes = sorted(dice.randrange(2) for _ in range(world))
    devices = tuple(
        Device(kind, f"n{node}", rooms[kind], None)
        for node, kind in zip(nodes, (dice.choice(kinds) for _ in range(world)), strict=True)
    )
    links = [
        None if dice.random() < 0.15 else Link(10 ** dice.uniform(2.5, 6), dice.choice([0, 1e-3, 1e-2, 0.1]))
        for _ in range(2)
    ]
    units = []
    for index in range(dice.randint(max(1, world - 1), most_units)):
        work = dice.uniform(0.2, 2) if dice.random() < 0.8 else 0.02
        fixed = dice.choice([0, 0.3]) * work
        timings = {}
        for kind in kinds:
            slow = dice.uniform(0.85, 1.15) / speeds[kind]
            timings[kind] = UnitTiming(fixed * slow, work * slow / 3, 2 * fixed * slow, work * slow * 2 / 3)
        parameters = dice.randint(10, 600) * (10 if dice.random() < 0.1 else 1)
        units.append(UnitCost(f"u{index}", parameters, 0, 0, dice.randint(0, 4000), dice.randint(0, 400), timings))
    costs = ModelCosts("m", tuple(units), loss_bytes=dice.randint(0, 200))
    training = Training(dice.randint(1, most_batch), optimizer=dice.choice(["adamw", "sgd"]))
    return Cluster("c", devices, *links), costs, training


def problem_of(case):
    cluster, costs, training = case
    return Problem(cluster, costs, training, unit_timings(costs, cluster))


def compositions(total, parts):
    """Every way to write ``total`` as an ordered sum of ``parts`` numbers of at least 1."""
    for borders in itertools.combinations(range(1, total), parts - 1):
        yield tuple(b - a for a, b in zip((0, *borders), (*borders, total), strict=True))


def ordered_layouts(ranks):
    """Every set of disjoint, ordered pipelines of some of the ranks."""
    if not ranks:
        yield ()
        return
    first, rest = ranks[0], ranks[1:]
    for layout in ordered_layouts(rest):
        yield layout
        yield ((first,), *layout)
        for index, block in enumerate(layout):
            for place in range(len(block) + 1):
                yield (*layout[:index], (*block[:place], first, *block[place:]), *layout[index + 1 :])


def exhaustive(problem, schedules=("1f1b", "gpipe")):
    """The least predicted step over every layout, order, cut, split, micro-batch size and schedule; and its design.

    Designs are skipped only if a bound proves that they cannot be better: a stage i has to work for all micro-batches,
    and before and after it there is the way through the stages before it; and one micro-batch goes all the way.
    """
    best, chosen = math.inf, None
    names = [(k, c, n) for k, c, n in zip(problem.kinds, problem.capacity, problem.nodes, strict=True)]
    layouts = {}
    for layout in ordered_layouts(tuple(range(len(problem.kinds)))):
        if layout and max(map(len, layout)) <= problem.units:
            layouts.setdefault(tuple(sorted(tuple(names[r] for r in block) for block in layout)), layout)
    sizes = micro_batch_sizes(problem.training.global_batch_size)
    for size in sizes:
        total = problem.total_micro_batches(size)
        table = problem.table(size)
        for layout in layouts.values():
            if len(layout) > total:
                continue
            for cuts in itertools.product(*(list(compositions(problem.units, len(block))) for block in layout)):
                stages = [_stage_seconds(problem, table, block, cut) for block, cut in zip(layout, cuts, strict=True)]
                for split in compositions(total, len(layout)):
                    bound = max(_bound(each, count) for each, count in zip(stages, split, strict=True))
                    if bound >= best:
                        continue
                    pipelines = tuple(PipelineDesign(*each) for each in zip(layout, cuts, split, strict=True))
                    for policy in policies_of(schedules, 2, True):
                        design = Design(size, policy, pipelines)
                        seconds = problem.evaluate(design).step_s
                        if seconds < best:
                            best, chosen = seconds, design
    return best, chosen


def _stage_seconds(problem, table, block, cut):
    starts = [0, *itertools.accumulate(cut)]
    return [table.seconds(problem.kinds[rank], starts[s], starts[s + 1], False).both_s for s, rank in enumerate(block)]


def _bound(seconds, count):
    before, bound = 0.0, sum(seconds)
    for each in seconds:
        bound = max(bound, before + count * each)
        before += each
    return bound * (1 - 1e-12)
