"""Read a file of runs: what was trained, on which GPUs, cut how, and what was measured."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_hetero.errors import HeteroError
from lightning_hetero.records import Record, integer, number, optional, read_json, text, tuple_of


@dataclass(frozen=True)
class Unit:
    """One node that holds one replica of one stage.

    Args:
        gpu: type of its GPUs.
        tensor_parallel: how many of them share every layer.
    """

    gpu: str
    tensor_parallel: int

    def __str__(self) -> str:
        return f"{self.gpu} x {self.tensor_parallel}"


@dataclass(frozen=True)
class Stage:
    """Layers ``first`` to ``last``, both included, and a node for each replica."""

    first: int
    last: int
    replicas: tuple[Unit, ...]


@dataclass(frozen=True)
class Run:
    """One run.

    Args:
        name: of it.
        stages: in the order of the layers. Replica d of every stage belongs to pipeline d.
        micro_batch: samples in one forward.
        global_batch: samples in one step, over all pipelines.
        measured_step_s: what was measured, where something was.
        measured_gradient_sync_s: likewise.
    """

    name: str
    stages: tuple[Stage, ...]
    micro_batch: int
    global_batch: int
    measured_step_s: float | None = None
    measured_gradient_sync_s: float | None = None

    @property
    def pipelines(self) -> int:
        """Number of replicas of every stage."""
        return len(self.stages[0].replicas)

    @property
    def micro_batches(self) -> int:
        """Of one pipeline in one step."""
        return self.global_batch // self.micro_batch // self.pipelines


@dataclass(frozen=True)
class RunsFile:
    """What a file holds.

    Args:
        path: of it.
        model: name of the model.
        layers: of the model, embedding and head counted.
        gpus_per_node: of each type.
        inter_node_bytes_per_s: speed of links between nodes, by name (links.py says which names there are).
        runs: in the order of the file.
    """

    path: Path
    model: str
    layers: int
    gpus_per_node: Mapping[str, int]
    inter_node_bytes_per_s: Mapping[str, float]
    runs: tuple[Run, ...]


def read_runs(path: Path) -> RunsFile:
    """Read a file of runs.

    Raises:
        HeteroError: listing everything that is missing or malformed, by run and stage.
    """
    data = read_json(path, "runs file", HeteroError, "give the path of a file of runs")
    record = Record(f"runs file {path}", HeteroError)
    top = _mapping(record, data, "", ("model", "measured_inter_node_bytes_per_s", "runs"))
    model = _mapping(record, top.get("model"), "model", ("name", "layers"))
    name = record.take(model, "name", "model", text, "")
    layers = record.take(model, "layers", "model", integer(1), 1)
    speeds = _mapping(record, top.get("measured_inter_node_bytes_per_s"), "measured_inter_node_bytes_per_s", ())
    links = {key: record.take(speeds, key, "measured_inter_node_bytes_per_s", number(1), 1.0) for key in speeds}
    nodes = _mapping(record, top.get("gpus_per_node", {}), "gpus_per_node", ())
    gpus = {key: record.take(nodes, key, "gpus_per_node", integer(1), 1) for key in nodes}
    runs = [_run(record, key, run) for key, run in _mapping(record, top.get("runs"), "runs", ()).items()]
    if not runs and "runs" in top:
        record.note("runs", "has no run: add one")
    record.finish()
    for run in runs:
        _check(record, run, layers, gpus)
    record.finish()
    return RunsFile(path, name, layers, gpus, links, tuple(runs))


def _mapping(record: Record, value: object, place: str, required: tuple[str, ...]) -> dict[str, Any]:
    """A mapping with at least these keys; what else a file says of itself is left alone."""
    others = [str(key) for key in value] if isinstance(value, Mapping) else []
    return record.mapping(value, place, required, others) or {}


def _run(record: Record, name: str, value: object) -> Run:
    place = f"run {name!r}"
    run = _mapping(record, value, place, ("stages", "micro_batch", "global_batch"))
    stages = []
    for index, (_, item) in enumerate(record.items(run.get("stages"), place, "stage")):
        where = f"{place}, stage {index}"
        stage = _mapping(record, item, where, ("layers", "replicas"))
        border = record.take(stage, "layers", where, tuple_of(integer(0)), (0, 0))
        if len(border) != 2:
            record.note(where, f"layers is {list(border)}: write its first and its last layer")
            border = (0, 0)
        replicas = [
            _unit(record, f"{where}, replica {number}", units)
            for number, (_, units) in enumerate(record.items(stage.get("replicas"), where, "replica"))
        ]
        stages.append(Stage(border[0], border[1], tuple(replicas)))
    return Run(
        name,
        tuple(stages),
        record.take(run, "micro_batch", place, integer(1), 1),
        record.take(run, "global_batch", place, integer(1), 1),
        record.take(run, "measured_step_s", place, optional(number(0)), None),
        record.take(run, "measured_gradient_sync_s", place, optional(number(0)), None),
    )


def _unit(record: Record, place: str, value: object) -> Unit:
    if not isinstance(value, list) or len(value) != 1:
        many = f"{len(value)} nodes" if isinstance(value, list) else f"{value!r}"
        record.note(place, f"has {many}: write a list with the one node that holds it, with gpu and tensor_parallel")
        return Unit("", 1)
    unit = _mapping(record, value[0], place, ("gpu", "tensor_parallel"))
    return Unit(record.take(unit, "gpu", place, text, ""), record.take(unit, "tensor_parallel", place, integer(1), 1))


def _check(record: Record, run: Run, layers: int, gpus_per_node: Mapping[str, int]) -> None:
    """Note what does not fit together in a run."""
    place, following = f"run {run.name!r}", 0
    for index, stage in enumerate(run.stages):
        where = f"{place}, stage {index}"
        if stage.first != following or stage.last < stage.first:
            record.note(
                where,
                f"has layers {stage.first} to {stage.last} where layer {following} is next: "
                "let stages follow one another without gaps",
            )
        following = stage.last + 1
        if len(stage.replicas) != run.pipelines:
            record.note(
                where,
                f"has {len(stage.replicas)} replicas, stage 0 has {run.pipelines}: give every stage as many replicas",
            )
        for number_, unit in enumerate(stage.replicas):
            room = gpus_per_node.get(unit.gpu)
            if room is not None and unit.tensor_parallel > room:
                record.note(
                    f"{where}, replica {number_}",
                    f"tensor_parallel is {unit.tensor_parallel}, a node has {room} {unit.gpu}: give at most {room}",
                )
    if following != layers:
        record.note(
            f"{place}, stage {len(run.stages) - 1}",
            f"ends with layer {following - 1} of {layers}: let the last stage end with layer {layers - 1}",
        )
    samples = run.micro_batch * run.pipelines
    if run.global_batch % samples:
        record.note(
            place,
            f"global_batch {run.global_batch} does not divide by {run.pipelines} replicas x micro_batch "
            f"{run.micro_batch}: give a multiple of {samples}",
        )
