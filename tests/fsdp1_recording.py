"""Prints, as JSON, the collectives of FullyShardedDataParallel by mode: rank 0 of 8 on a fake process group."""

import json
import sys
import warnings

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
from torch.testing._internal.distributed.fake_pg import FakeStore

RANKS = 8
KINDS = {
    "all_gather": "all_gather",
    "all_gather_single": "all_gather",
    "all_gather_into_tensor": "all_gather",
    "reduce_scatter_single": "reduce_scatter",
    "reduce_scatter_tensor": "reduce_scatter",
    "all_reduce": "all_reduce",
}

recorded: list[tuple[str, int, int]] = []


def record(name: str) -> None:
    function = getattr(dist, name, None)
    if function is None:
        return

    def recording(*args, **kwargs):
        values = [*args, *kwargs.values()]
        sizes = [value.numel() for value in values if isinstance(value, torch.Tensor)]
        sizes += [sum(each.numel() for each in value) for value in values if isinstance(value, list)]
        groups = [value for value in values if isinstance(value, dist.ProcessGroup)]
        recorded.append((KINDS[name], max(sizes), groups[0].size() if groups else RANKS))
        return function(*args, **kwargs)

    setattr(dist, name, recording)


def is_block(module: nn.Module, recurse: bool, nonwrapped_numel: int) -> bool:
    return recurse or (isinstance(module, nn.Linear) and module.out_features == 8)


def run(**options) -> list[tuple[str, int, int]]:
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)), nn.Linear(8, 4))
    sharded = FullyShardedDataParallel(model, auto_wrap_policy=is_block, device_id=torch.device("cpu"), **options)
    recorded.clear()
    sharded(torch.randn(2, 8)).sum().backward()
    return list(recorded)


def main() -> None:
    warnings.simplefilter("ignore")
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    for name in KINDS:
        record(name)
    found = {}
    for name in ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"):
        found[name] = run(sharding_strategy=ShardingStrategy[name])
    for size in (1, 2, 4):
        groups = (dist.new_group(list(range(size))), dist.new_group(list(range(0, RANKS, size))))
        found[f"HYBRID_{size}"] = run(process_group=groups, sharding_strategy=ShardingStrategy.HYBRID_SHARD)
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
