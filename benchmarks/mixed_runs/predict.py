"""Predict the step of a run from layer times, layer sizes and link speeds.

The runs were made with Megatron-DeepSpeed. What is declared of it here holds for every run; README.md says where each
of it comes from. No number is fitted to a measured step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from benchmarks.mixed_runs.links import SiteLinks
from benchmarks.mixed_runs.runs import Run, RunsFile, Stage, Unit
from benchmarks.mixed_runs.tables import Tables
from lightning_hetero.cluster import Link
from lightning_hetero.errors import HeteroError, raise_all
from lightning_hetero.schedule import one_f_one_b
from lightning_hetero.simulator.comm import Network
from lightning_hetero.simulator.pipeline import Hop, PointToPoint, StageSeconds
from lightning_hetero.simulator.pipelines import PipelineLoad, PipelinesTimeline, simulate_pipelines
from lightning_hetero.simulator.reductions import Reduction

SENDING = PointToPoint(blocking=False, gradient_first=True)
"""DeepSpeed's pipeline engine: its instructions put RecvGrad before SendActivation; what each GPU sends is its part of
the activation, which fits NCCL's buffer, so that the sender goes on"""

GATHERS_IN_FORWARD, GATHERS_IN_BACKWARD = 1, 2
"""all-gathers of an activation within a node, as stages exchange it in tensor-parallel parts: the input, where a stage
is not the first; the output and its gradient, where it is not the last"""


@dataclass(frozen=True)
class Prediction:
    """What is predicted of one run.

    Args:
        run: the run.
        timeline: its step.
        gradient_sync_s: of the longest reduction of gradients; zero without replicas.
    """

    run: Run
    timeline: PipelinesTimeline
    gradient_sync_s: float

    @property
    def error(self) -> float | None:
        """Predicted over measured step, less 1."""
        measured_s = self.run.measured_step_s
        return self.timeline.step_s / measured_s - 1 if measured_s else None

    def row(self) -> dict[str, Any]:
        """As it is written."""
        return {
            "run": self.run.name,
            "measured_step_s": self.run.measured_step_s,
            "predicted_step_s": self.timeline.step_s,
            "error": self.error,
            "measured_gradient_sync_s": self.run.measured_gradient_sync_s,
            "predicted_gradient_sync_s": self.gradient_sync_s,
            "predicted_exposed_communication_s": self.timeline.exposed_communication_s,
            "predicted_bubble": self.timeline.bubble,
            "pipelines": self.run.pipelines,
            "stages": [
                f"layers {stage.first}-{stage.last}: " + ", ".join(map(str, stage.replicas))
                for stage in self.run.stages
            ],
        }


def predict(file: RunsFile, tables: Tables) -> list[Prediction]:
    """Predict every run of a file.

    Raises:
        HeteroError: listing every layer time, layer size and link speed that is missing, by run, stage and replica.
    """
    links = SiteLinks(file.inter_node_bytes_per_s)
    problems = [
        f"run {run.name!r}, {where}: {text}" for run in file.runs for where, text in _problems(run, tables, links)
    ]
    raise_all(HeteroError, f"the runs of {file.path} cannot be predicted", problems)
    return [_predict(run, tables, links) for run in file.runs]


def _problems(run: Run, tables: Tables, links: SiteLinks) -> list[tuple[str, str]]:
    found = []
    for index, stage in enumerate(run.stages):
        for number, unit in enumerate(stage.replicas):
            where = f"stage {index}, replica {number}"
            lookup = tables.problems(unit.gpu, unit.tensor_parallel, run.micro_batch, stage.first, stage.last)
            found += [(where, text) for text in lookup]
            nodes = [other.gpu for other in stage.replicas[:number]]
            nodes += [run.stages[index - 1].replicas[number].gpu] if index else []
            for gpu in dict.fromkeys(nodes):
                try:
                    links.speed_bytes_per_s(gpu, unit.gpu)
                except HeteroError as error:
                    found.append((where, str(error)))
    return found


def _predict(run: Run, tables: Tables, links: SiteLinks) -> Prediction:
    pipelines = [_pipeline(run, index, tables, links) for index in range(run.pipelines)]
    reductions = [_reduction(index, stage, tables, links) for index, stage in enumerate(run.stages)]
    reductions = [each for each in reductions if len(each.owners) > 1]
    timeline = simulate_pipelines(pipelines, reductions, SENDING)
    return Prediction(run, timeline, max((each.seconds for each in reductions), default=0.0))


def _pipeline(run: Run, pipeline: int, tables: Tables, links: SiteLinks) -> PipelineLoad:
    """One pipeline: the replica of this index of every stage."""
    units = [stage.replicas[pipeline] for stage in run.stages]
    last = len(units) - 1
    seconds, optimizers, hops = [], [], []
    for index, (stage, unit) in enumerate(zip(run.stages, units, strict=True)):
        layers = tables.times[unit.gpu, unit.tensor_parallel, run.micro_batch]
        taken = [layers[layer] for layer in range(stage.first, stage.last + 1)]
        gather_s = _gather_s(unit, tables, run.micro_batch)
        forward_s = sum(layer.forward_s for layer in taken) + (GATHERS_IN_FORWARD * gather_s if index else 0.0)
        backward_s = sum(layer.backward_s for layer in taken) + (
            GATHERS_IN_BACKWARD * gather_s if index < last else 0.0
        )
        seconds.append(StageSeconds(forward_s, backward_s))
        optimizers.append(sum(layer.update_s for layer in taken))
        if index < last:
            size = run.micro_batch * tables.sizes[unit.tensor_parallel][stage.last].output_bytes
            ends = unit.gpu, units[index + 1].gpu
            hops.append(Hop(size / links.speed_bytes_per_s(*ends), links.name(*ends), links.name(*reversed(ends))))
    schedule = one_f_one_b(len(units), run.micro_batches)
    return PipelineLoad(schedule, tuple(seconds), tuple(hops), tuple(optimizers))


def _gather_s(unit: Unit, tables: Tables, micro_batch: int) -> float:
    """Seconds of an all-gather of one activation within a node.

    The forward of a tensor-parallel embedding is a look-up and an all-reduce of such an activation, and next to that
    the look-up takes no time; an all-gather is half of an all-reduce on a ring.
    """
    if unit.tensor_parallel == 1:
        return 0.0
    embedding = tables.times[unit.gpu, unit.tensor_parallel, micro_batch].get(0)
    return embedding.forward_s / 2 if embedding else 0.0


def _reduction(index: int, stage: Stage, tables: Tables, links: SiteLinks) -> Reduction:
    """Sum a stage's gradients over its replicas: rings over the nodes, one for each GPU of a node, side by side."""
    owners = tuple((pipeline, index) for pipeline in range(len(stage.replicas)))
    if len(owners) == 1:
        return Reduction(0.0, owners)
    node_bytes = max(
        unit.tensor_parallel
        * sum(tables.sizes[unit.tensor_parallel][layer].params_bytes for layer in range(stage.first, stage.last + 1))
        for unit in stage.replicas
    )
    speed, names = links.ring(unit.gpu for unit in stage.replicas)
    ring = Network(between_nodes=Link(speed, 0.0))
    return Reduction(ring.all_reduce_s(node_bytes, (1,) * len(owners)), owners, names)
