"""The topics as groups of arms; those of a group take turns in one run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.hetero_speedup.case import PINNED_CLUSTER, Effort
from benchmarks.hetero_speedup.ranks import Arm
from benchmarks.vit_scaling import arms, figures, settings
from benchmarks.vit_scaling.case import ScalingCase
from benchmarks.vit_scaling.data import digit_folder
from benchmarks.vit_scaling.settings import Settings
from benchmarks.vit_scaling.shapes import GPT_NAME, Shape, costs, flops_per_sample, local_batch, parameters
from lightning_hetero.cluster import Cluster, Device
from lightning_hetero.planner.training import Training
from lightning_hetero.simulator.shard_prediction import group_memory
from lightning_hetero.simulator.sharded_memory import FSDP2_BUFFERS, GLOO_BUFFERS, ReduceBuffers
from lightning_hetero.strategies.options import ShardingOptions

EMULATED_FLOPS_PER_S = 3e9
"""of each emulated device of weak scaling: four of them leave two cores time for what is not emulated"""

STUDY_BATCH = 32
"""images of a device in a step: the study's"""

GPU_PRECISION, GPU_DTYPE = "bf16-true", "bfloat16"
_ARMS: dict[str, Arm] = {
    "hetero_fsdp": arms.hetero_fsdp,
    "hetero_pipe": arms.hetero_pipe,
    "ddp": arms.ddp,
    "fsdp2": arms.fsdp2,
    "even_pipe": arms.even_pipeline,
}


@dataclass(frozen=True)
class Entry:
    """An arm of a group.

    Args:
        arm: what runs.
        case: what it trains.
        labels: of its row, beside the model and the like.
        reads_only: whether it trains nothing.
    """

    arm: Arm
    case: ScalingCase
    labels: Mapping[str, Any] = field(default_factory=dict)
    reads_only: bool = False


@dataclass(frozen=True)
class Group:
    """Arms that take turns.

    Args:
        topic: whose rows theirs are.
        title: for progress.
        entries: by the arm's name.
        effort: repeats.
        skipped_steps: first steps of each turn that do not count.
    """

    topic: str
    title: str
    entries: dict[str, Entry]
    effort: Effort
    skipped_steps: int = 0


def sharding(wanted: Settings, folder: Path) -> list[Group]:
    """Throughput and memory of each model in each sharding mode."""
    found = []
    for model in wanted.models:
        case = replace(real_case(wanted, model, wanted.here.devices), count_memory=True)
        entries = {mode: sharded(case, mode) for mode in modes(wanted.sharding, case.world_size)}
        found.append(Group(settings.SHARDING, f"sharding of {model}", entries, wanted.counting_effort))
    return found


def options(wanted: Settings, folder: Path) -> list[Group]:
    """Backward prefetch x limit on all-gathers, of the model that the study took."""
    case = real_case(wanted, wanted.one_of("vit_5b"), wanted.here.devices)
    entries = {}
    for prefetch in wanted.prefetch:
        for limit in wanted.limit_all_gathers:
            given = {"backward_prefetch": prefetch, "limit_all_gathers": limit}
            name = f"{prefetch}, limit {limit}"
            entries[name] = Entry(arms.Sharded("FULL_SHARD", given), case, {"sharding": "FULL_SHARD", **given})
    return [Group(settings.OPTIONS, "prefetch x limit", entries, wanted.effort)]


def weak_scaling(wanted: Settings, folder: Path) -> list[Group]:
    """The same batch per rank on more and more ranks: real ones as far as there are devices, and emulated ones."""
    found = []
    for model in wanted.models:
        real = [n for n in wanted.ranks if n <= wanted.here.devices]
        cases = {n: real_case(wanted, model, n) for n in real}
        found.append(Group(settings.WEAK_SCALING, f"scaling of {model}", _scaled(wanted, cases), wanted.effort))
    shape = wanted.shape(wanted.one_of("vit_huge"))
    samples = local_batch(shape, wanted.emulated_step_s * EMULATED_FLOPS_PER_S)
    cases = {}
    for n in (wanted.ranks[0], wanted.ranks[-1]) if wanted.quick else wanted.ranks:
        device = Device("equal", "here", arms.ENOUGH_BYTES, EMULATED_FLOPS_PER_S)
        path = folder / f"equal_{n}.yaml"
        Cluster(f"{n} equal devices", (device,) * n, emulate=True).to_yaml(path)
        cases[n] = with_data(wanted, ScalingCase("scaling", shape, n, samples, path))
    entries = _scaled(wanted, cases)
    found.append(Group(settings.WEAK_SCALING, f"EMULATED scaling of {shape.preset}", entries, wanted.emulated_effort))
    return [group for group in found if group.entries]


def _scaled(wanted: Settings, cases: Mapping[int, ScalingCase]) -> dict[str, Entry]:
    entries = {}
    for n, case in cases.items():
        if n == 1:
            entries["1 rank"] = Entry(arms.one_device, case, {"sharding": "one device"})
            continue
        entries |= {f"{mode}, {n} ranks": sharded(case, mode) for mode in modes(wanted.scaled_modes, n)}
    return entries


def limits(wanted: Settings, folder: Path) -> list[Group]:
    """The same steps with synthetic data, with image files, and with communication removed; and reading alone."""
    case = replace(real_case(wanted, wanted.one_of("vit_3b"), wanted.here.devices), image_folder=None)
    reading = replace(case, image_folder=wanted.image_folder or digit_folder())
    label = {"sharding": "FULL_SHARD"}
    entries = {
        figures.SYNTHETIC: Entry(arms.Sharded(), case, label),
        figures.REAL: Entry(arms.Sharded(), reading, label),
        figures.SILENT: Entry(arms.Sharded(communicates=False), case, label),
        figures.READING: Entry(arms.input_alone, reading, reads_only=True),
    }
    return [Group(settings.LIMITS, "what limits", entries, wanted.reading_effort, skipped_steps=wanted.skipped_steps)]


def mixed(wanted: Settings, folder: Path) -> list[Group]:
    """Unequal devices: ours against what people run. Emulated."""
    strategies = wanted.strategies
    if wanted.quick:  # pipelines need more samples than its small steps have
        strategies = tuple(name for name in strategies if "pipe" not in name) or strategies
    return [_on_cluster(wanted, settings.MIXED, wanted.cluster_path or PINNED_CLUSTER, strategies)]


def little_memory(wanted: Settings, folder: Path) -> list[Group]:
    """The same where the fast devices have little memory: running out of it is a row. Emulated."""
    strategies = wanted.strategies
    if wanted.quick:  # the one that runs out of it
        strategies = tuple(name for name in strategies if name == "ddp") or strategies[:1]
    return [_on_cluster(wanted, settings.MEMORY, settings.LITTLE_MEMORY, strategies)]


def _on_cluster(wanted: Settings, topic: str, path: Path, strategies: tuple[str, ...]) -> Group:
    cluster = Cluster.from_yaml(path)
    shape = wanted.shape(wanted.one_of("vit_huge"))
    speeds = [device.actual_speed_flops_per_s or 0.0 for device in cluster.devices]
    samples = local_batch(shape, wanted.emulated_step_s * sum(speeds) / len(speeds))
    case = with_data(wanted, ScalingCase(topic, shape, cluster.world_size, samples, path.resolve()))
    if shape.config.depth < cluster.world_size:  # there is no even cut
        strategies = tuple(name for name in strategies if name != "even_pipe")
    entries = {name: Entry(_ARMS[name], case, {"cluster": cluster.name}) for name in strategies}
    return Group(topic, f"EMULATED {cluster.name}", entries, wanted.emulated_effort)


def gpt(wanted: Settings, folder: Path) -> list[Group]:
    """FSDP against a pipeline on equal devices, GPT 1.4B-shaped."""
    # a pipeline needs several micro-batches
    case = replace(real_case(wanted, GPT_NAME, wanted.here.devices), image_folder=None)
    case = replace(case, local_batch=max(case.local_batch, 2 if wanted.quick else 8))
    entries = {
        "hetero_fsdp, FULL_SHARD": Entry(arms.Sharded(), case, {"sharding": "FULL_SHARD"}),
        "hetero_pipe": Entry(arms.hetero_pipe, case),
    }
    effort = replace(wanted.effort, turns=1) if wanted.quick else wanted.effort
    return [Group(settings.GPT_TOPIC, "GPT", entries, effort)]


def one_gpu(wanted: Settings, folder: Path) -> list[Group]:
    """The models at their own size on one GPU, smallest first, compiled and not."""
    found = []
    for shape in sorted((Shape(model) for model in wanted.models), key=parameters):
        case = with_data(
            wanted, ScalingCase("ladder", shape, 1, STUDY_BATCH, accelerator="cuda", precision=GPU_PRECISION)
        )
        entries = {
            f"{shape.preset}, {name}": Entry(arms.one_device, replace(case, compile=compiled), {"compiled": compiled})
            for name, compiled in (("eager", False), ("compiled", True))
        }
        found.append(Group(settings.ONE_GPU, f"{shape.preset} on one GPU", entries, wanted.effort))
    return found


BUILDERS: dict[str, Callable[[Settings, Path], list[Group]]] = {
    settings.SHARDING: sharding,
    settings.OPTIONS: options,
    settings.WEAK_SCALING: weak_scaling,
    settings.LIMITS: limits,
    settings.MIXED: mixed,
    settings.MEMORY: little_memory,
    settings.GPT_TOPIC: gpt,
    settings.ONE_GPU: one_gpu,
}


def real_case(wanted: Settings, model: str, ranks: int) -> ScalingCase:
    """A model on ranks that compute for real; on CPUs with a batch by FLOPs, on GPUs with the study's."""
    accelerator = wanted.here.accelerator
    shape = wanted.shape(model, accelerator)
    if accelerator == "cpu":
        case = ScalingCase(model, shape, ranks, local_batch(shape, wanted.step_flops))
    else:
        case = ScalingCase(model, shape, ranks, STUDY_BATCH, accelerator=accelerator, precision=GPU_PRECISION)
    return with_data(wanted, case)


def with_data(wanted: Settings, case: ScalingCase) -> ScalingCase:
    """The case with image files where all topics are to read them."""
    if not wanted.images:
        return replace(case, workers=wanted.workers)
    return replace(case, workers=wanted.workers, image_folder=wanted.image_folder or digit_folder())


def modes(asked: tuple[str, ...], ranks: int) -> list[str]:
    """The modes that so many ranks can have, those that are one and the same once."""
    sizes = {mode: int(mode.removeprefix("HYBRID_")) for mode in asked if mode.startswith("HYBRID_")}
    return [
        mode
        for mode in asked
        if mode not in sizes or (ranks % sizes[mode] == 0 and not (sizes[mode] == ranks and "FULL_SHARD" in asked))
    ]


def sharded(case: ScalingCase, mode: str) -> Entry:
    """The arm of a sharding mode; DDP is Lightning's own."""
    arm: Arm = arms.ddp if mode == "DDP" else arms.Sharded(mode)
    predicted = None if mode == "DDP" else predicted_bytes(case, mode)
    return Entry(arm, case, {"sharding": mode, "predicted_peak_bytes": predicted})


def predicted_bytes(case: ScalingCase, mode: str) -> int:
    """Peak memory of a rank by the memory model, from what is counted on meta."""
    layout = ShardingOptions(sharding_strategy=mode).layout(case.world_size)
    assert layout is not None
    size, mode = len(layout.groups[0]), layout.modes[0]
    if case.accelerator == "cpu":
        return _predicted(case, "float32", GLOO_BUFFERS, size, mode)
    return _predicted(case, GPU_DTYPE, FSDP2_BUFFERS, size, mode)


def predicted_bytes_alone(case: ScalingCase) -> int:
    """Peak memory of one device without a strategy: nothing is gathered, sent or kept for it."""
    alone = ReduceBuffers(computing=0, reducing=0, copies=0)
    return _predicted(case, GPU_DTYPE, alone, 1, "NO_SHARD")


def _predicted(case: ScalingCase, dtype: str, buffers: ReduceBuffers, size: int, mode: str) -> int:
    state = Training(case.global_batch, case.precision).state
    memory = group_memory(costs(case.shape, dtype), state, buffers, size, mode, False, False)
    return memory.peak_bytes(case.local_batch)


def labels_of(entry: Entry, name: str) -> dict[str, Any]:
    """What a row says of itself before anything has run."""
    case = entry.case
    found = {
        "arm": name,
        "model": case.shape.preset,
        "scaled_down": case.shape.scaled,
        "emulated": case.emulated,
        "accelerator": case.accelerator,
        "precision": case.precision,
        "data": "image files" if case.image_folder is not None else "synthetic",
        "local_batch": case.local_batch,
        **entry.labels,
    }
    if "compiled" in found:
        found["predicted_peak_bytes"] = predicted_bytes_alone(case)
    return found


def flops_of(entry: Entry) -> float:
    """FLOPs of a sample; 0 where nothing is trained."""
    return 0.0 if entry.reads_only else flops_per_sample(entry.case.shape)
