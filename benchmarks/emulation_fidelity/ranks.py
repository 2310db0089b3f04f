"""One case: gloo ranks that train the pinned model with FSDP2 on emulated devices."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from multiprocessing.queues import SimpleQueue

import torch
import torch.distributed as dist
from timm.models.vision_transformer import VisionTransformer
from torch import multiprocessing
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy

from lightning_hetero.cluster import Device
from lightning_hetero.emulation import Emulation
from lightning_hetero.emulation_report import EmulationReport
from lightning_hetero.models.units import find_units


@dataclass(frozen=True)
class Case:
    """Devices and their samples.

    Args:
        name: key in the results.
        speeds_flops_per_s: speed of each rank's device.
        samples: batch of each rank.
    """

    name: str
    speeds_flops_per_s: tuple[float, ...]
    samples: tuple[int, ...]


def run_case(case: Case, steps: int) -> list[EmulationReport]:
    """Reports of all ranks over ``steps`` steps, one unmeasured step ahead of them."""
    with tempfile.TemporaryDirectory() as folder:
        context = multiprocessing.get_context("spawn")
        queue: SimpleQueue[EmulationReport] = context.SimpleQueue()
        processes = multiprocessing.spawn(_rank, (case, steps, f"{folder}/store", queue), len(case.samples), join=False)
        reports = [queue.get() for _ in case.samples]
        while not processes.join():
            pass
    return sorted(reports, key=lambda report: report.rank)


def _rank(
    rank: int,
    case: Case,
    steps: int,
    store: str,
    queue: SimpleQueue[EmulationReport],
) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=len(case.samples))
    torch.manual_seed(0)
    model = VisionTransformer(
        img_size=32, patch_size=4, in_chans=3, num_classes=10, embed_dim=192, depth=6, num_heads=3
    )
    units = find_units(model)
    for unit in units:
        if unit.is_block:
            fully_shard(unit.module)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())
    device = Device(f"rank-{rank}", "here", 2 << 30, case.speeds_flops_per_s[rank])
    images, labels = torch.rand(case.samples[rank], 3, 32, 32), torch.zeros(case.samples[rank], dtype=torch.long)
    for measured in (False, True):
        emulation = Emulation(device, rank, units)
        emulation.start(model, [optimizer])
        for _ in range(steps if measured else 1):
            with emulation.step((images, labels)):
                cross_entropy(model(images), labels).backward()
                optimizer.step()
                optimizer.zero_grad()
        emulation.stop()
    queue.put(emulation.report())
    dist.barrier()
    dist.destroy_process_group()


def as_json(case: Case, reports: Sequence[EmulationReport]) -> dict[str, object]:
    """Raw figures of a case, per rank, unit and phase."""
    return {**asdict(case), "ranks": [asdict(report) for report in reports]}
