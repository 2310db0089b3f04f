"""What an arm is to train: a model on ranks, with some data."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from benchmarks.vit_scaling.shapes import Shape


@dataclass(frozen=True)
class ScalingCase:
    """One model on so many ranks.

    Args:
        name: what progress calls it.
        shape: the model.
        world_size: ranks.
        local_batch: samples of a rank in an even split.
        cluster_path: cluster file of emulated devices; None to compute for real.
        image_folder: folder of folders of image files, one per class; None for synthetic data.
        workers: processes of each rank that read images.
        accelerator: "cpu" or "cuda".
        precision: Lightning's name.
        compile: whether blocks are compiled.
        count_memory: whether real CPU ranks count their live tensors, in the first two steps, which take longer by it;
            emulated devices and GPUs say their peak anyway.
        max_steps: bound on the steps of an arm; sets the length of the data set.
    """

    name: str
    shape: Shape
    world_size: int
    local_batch: int
    cluster_path: Path | None = None
    image_folder: Path | None = None
    workers: int = 1
    accelerator: str = "cpu"
    precision: str = "32-true"
    compile: bool = False
    count_memory: bool = False
    max_steps: int = 200

    @property
    def global_batch(self) -> int:
        """Samples of a step."""
        return self.world_size * self.local_batch

    @property
    def emulated(self) -> bool:
        """Whether step times come from emulated devices."""
        return self.cluster_path is not None
