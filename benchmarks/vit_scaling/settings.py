"""What is run: from the command line, with defaults for the devices that are there."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.hetero_speedup.case import Effort
from benchmarks.vit_scaling.data import AHEAD
from benchmarks.vit_scaling.shapes import VITS, Shape
from lightning_hetero.cluster import Cluster
from lightning_hetero.errors import HeteroError, raise_all
from lightning_hetero.strategies.rebalance import Rebalance

LITTLE_MEMORY = Path(__file__).with_name("little_memory.yaml")

SHARDING, OPTIONS, WEAK_SCALING, LIMITS = "sharding", "options", "weak_scaling", "limits"
MIXED, MEMORY, GPT_TOPIC, ONE_GPU = "mixed", "little_memory", "gpt", "one_gpu"
TOPICS = (SHARDING, OPTIONS, WEAK_SCALING, LIMITS, MIXED, MEMORY, GPT_TOPIC, ONE_GPU)

PREFETCH = ("BACKWARD_PRE", "BACKWARD_POST", "NONE")
STRATEGIES = ("hetero_fsdp", "hetero_pipe", "ddp", "fsdp2", "even_pipe")
_SHARDING = re.compile(r"DDP|FULL_SHARD|SHARD_GRAD_OP|NO_SHARD|HYBRID_[1-9]\d*")


@dataclass(frozen=True)
class Here:
    """The devices that are there.

    Args:
        cores: of the processor, for this process.
        gpus: CUDA (or ROCm) devices.
        gpu_name: what the first calls itself.
    """

    cores: int
    gpus: int = 0
    gpu_name: str | None = None

    @property
    def accelerator(self) -> str:
        """Where the topics over ranks compute for real: GPUs where there are several."""
        return "cuda" if self.gpus > 1 else "cpu"

    @property
    def devices(self) -> int:
        """How many ranks can compute for real at once."""
        return self.gpus if self.gpus > 1 else self.cores


@dataclass(frozen=True)
class Settings:
    """All that the topics need.

    Args:
        here: the devices that are there.
        models: ViTs by name.
        sharding: modes: "DDP", or what hetero_fsdp's ``sharding_strategy`` takes.
        prefetch: values of ``backward_prefetch``.
        limit_all_gathers: values of ``limit_all_gathers``.
        ranks: of weak scaling.
        strategies: of mixed devices.
        cluster_path: of mixed devices; None takes the bundled ones.
        image_folder: image files that are read where input is real; None takes the digits.
        images: whether all topics read image files, not that of limits alone.
        workers: processes of each rank that read images.
        quick: fewer repeats, smaller steps.
        width_divisor: of the models on CPU ranks.
        depth_divisor: likewise.

    Raises:
        HeteroError: listing every bad value.
    """

    here: Here
    models: tuple[str, ...]
    sharding: tuple[str, ...]
    prefetch: tuple[str, ...] = PREFETCH
    limit_all_gathers: tuple[bool | int, ...] = (True, False)
    ranks: tuple[int, ...] = (1, 2, 4)
    strategies: tuple[str, ...] = STRATEGIES
    cluster_path: Path | None = None
    image_folder: Path | None = None
    images: bool = False
    workers: int = 1
    quick: bool = False
    width_divisor: int = 8
    depth_divisor: int = 4

    def __post_init__(self) -> None:
        problems = []
        for what, given, known in (
            ("--models", self.models, VITS),
            ("--prefetch", self.prefetch, PREFETCH),
            ("--strategy", self.strategies, STRATEGIES),
        ):
            problems += [f"{what} {name}: give some of {', '.join(known)}" for name in given if name not in known]
        problems += [
            f"--sharding {name}: give some of DDP, FULL_SHARD, SHARD_GRAD_OP, NO_SHARD, HYBRID_k"
            for name in self.sharding
            if not _SHARDING.fullmatch(name)
        ]
        problems += [f"--ranks {n}: give numbers of 1 or more" for n in self.ranks if n < 1]
        problems += [
            f"{what} {value}: give {least} or more"
            for what, value, least in (
                ("--workers", self.workers, 0),
                ("--width-divisor", self.width_divisor, 1),
                ("--depth-divisor", self.depth_divisor, 1),
            )
            if value < least
        ]
        if self.image_folder is not None and not self.image_folder.is_dir():
            problems.append(f"--image-folder {self.image_folder} is no folder: give one with a folder for each class")
        raise_all(HeteroError, "the benchmark cannot run", problems)
        if self.cluster_path is not None and not Cluster.from_yaml(self.cluster_path).emulate:
            raise HeteroError(f"cluster file {self.cluster_path}: mixed devices are emulated here; set emulate: true")

    @property
    def effort(self) -> Effort:
        """Repeats of each arm."""
        return Effort(2, 2) if self.quick else Effort(5, 3, warmup_steps=2)

    @property
    def counting_effort(self) -> Effort:
        """Of arms that count memory: in two warm-up steps, which are not timed."""
        return replace(self.effort, warmup_steps=2)

    @property
    def emulated_effort(self) -> Effort:
        """Of arms on emulated devices, whose times hardly scatter."""
        return Effort(1, 2) if self.quick else Effort(3, 2, warmup_steps=2, settling_steps=SETTLING)

    @property
    def reading_effort(self) -> Effort:
        """Of arms that read: longer turns, of which the first steps do not count."""
        turns = 1 if self.quick else self.effort.turns
        return replace(self.effort, turns=turns, steps=self.effort.steps + self.skipped_steps)

    @property
    def skipped_steps(self) -> int:
        """First steps of a turn for which batches lie ready: what workers read ahead, the loader's own, the gate's."""
        return self.workers * AHEAD + 2

    @property
    def emulated_step_s(self) -> float:
        """About how long a step of emulated devices takes, if they were all as fast as their mean."""
        return 0.7 if self.quick else 2.0

    @property
    def step_flops(self) -> float:
        """FLOPs of a rank's step where CPUs compute for real."""
        return 4e9 if self.quick else 30e9

    @property
    def scaled_modes(self) -> tuple[str, ...]:
        """Modes of weak scaling; with ``quick`` one."""
        if not self.quick:
            return self.sharding
        return ("FULL_SHARD",) if "FULL_SHARD" in self.sharding else self.sharding[:1]

    def shape(self, preset: str, accelerator: str = "cpu") -> Shape:
        """A model as it runs there: scaled down on CPU ranks, its own size on GPUs."""
        if accelerator != "cpu":
            return Shape(preset)
        return Shape(preset, self.width_divisor, self.depth_divisor)

    def one_of(self, preferred: str) -> str:
        """The model of a topic that takes one: the preferred, where it was asked for, else the last."""
        return preferred if preferred in self.models else self.models[-1]


SETTLING = Rebalance().window
"""further steps before hetero_fsdp is timed on mixed devices: its shares may move once after the first of them"""


def default_models(here: Here, quick: bool) -> tuple[str, ...]:
    """Of the command line; on CPUs the larger ones are left out: a machine would hold a dozen copies of each."""
    if quick and here.accelerator == "cpu":
        return ("vit_huge",)
    return VITS if here.gpus else VITS[:4]


def default_prefetch(quick: bool) -> tuple[str, ...]:
    """Of the command line."""
    return ("BACKWARD_PRE", "NONE") if quick else PREFETCH


def default_sharding(devices: int, quick: bool = False) -> tuple[str, ...]:
    """All modes that are different ones on so many ranks; with ``quick`` three of them."""
    if quick:
        return ("DDP", "FULL_SHARD", "NO_SHARD")
    sizes = [k for k in (1, 2, 4, 8) if k < devices and devices % k == 0]
    return ("DDP", "FULL_SHARD", "SHARD_GRAD_OP", *(f"HYBRID_{k}" for k in sizes), "NO_SHARD")
