"""The settings that are run, by name."""

from __future__ import annotations

from typing import Any

from benchmarks.hetero_speedup.model import ViTSize
from benchmarks.predicted_steps.models import GPTSize
from benchmarks.predicted_steps.setting import FSDP, PIPE, Setting

DEEP, DEEP_TEXT = ViTSize(depth=8, width=128, heads=4), GPTSize(depth=8)
ONE_TYPE = ("card",) * 4

_PINNED: dict[str, Any] = {"declared": (6, 6, 3, 3), "true": (6.6, 5.4, 2.7, 3.3), "global_batch": 56}
_FOUR_STAGES: dict[str, Any] = {"declared": (3, 3, 1.5, 1.5), "true": (3.4, 2.6, 1.3, 1.7), "global_batch": 16}

SHARDED = (
    Setting("two equal devices", FSDP, (4, 4), global_batch=24),
    Setting("two, declared 20 % off", FSDP, (6, 3), (5, 3.6), global_batch=32),
    Setting("three types", FSDP, (5, 4, 2), (4.4, 4.8, 2.5), global_batch=36),
    Setting("four, kept gathered", FSDP, **_PINNED, options={"sharding_strategy": "SHARD_GRAD_OP"}),
    Setting("four, FULL_SHARD", FSDP, **_PINNED, options={"sharding_strategy": "FULL_SHARD"}),
    Setting("four of a type, one throttled", FSDP, (4,) * 4, (4, 4, 4, 2.8), global_batch=48, types=ONE_TYPE),
    Setting("NO_SHARD", FSDP, (4, 4, 3, 3), (4.6, 3.4, 2.7, 3.3), 48, options={"sharding_strategy": "NO_SHARD"}),
    Setting("HYBRID_2", FSDP, (4, 4, 3, 3), (4.6, 3.4, 2.7, 3.3), 48, options={"sharding_strategy": "HYBRID_2"}),
    Setting("groups {0} {1,2}", FSDP, (6, 3, 3), (5, 3.6, 3), 42, groups=((0,), (1, 2))),
    Setting("groups {0} {1,2,3}", FSDP, (6, 3, 3, 3), (5, 3.6, 3, 2.7), 48, groups=((0,), (1, 2, 3))),
    Setting(
        "activation checkpointing",
        FSDP,
        (6, 3),
        (5, 3.6),
        global_batch=24,
        options={"activation_checkpointing": True},
    ),
    Setting(
        "two micro-batches by memory",
        FSDP,
        (4, 2),
        (4.6, 2.4),
        global_batch=24,
        memory_mib=(30,),
        options={"sharding_strategy": "FULL_SHARD"},
    ),
    Setting(
        "micro-batches of one group",
        FSDP,
        (6, 3, 3),
        (5, 3.6, 3),
        global_batch=42,
        groups=((0,), (1, 2)),
        memory_mib=(30, 1024, 1024),
    ),
    Setting(
        "a share by memory",
        FSDP,
        (4,) * 4,
        (3.6,) * 4,
        global_batch=96,
        size=ViTSize(depth=2, width=128, heads=4),
        memory_mib=(29, 1024, 1024, 1024),
        options={"sharding_strategy": "FULL_SHARD"},
    ),
    Setting("GPT, four", FSDP, **_PINNED, size=GPTSize()),
    Setting(
        "GPT, three, FULL_SHARD", FSDP, (5, 4, 2), (4.4, 4.8, 2.5), 36, GPTSize(), {"sharding_strategy": "FULL_SHARD"}
    ),
)

PIPELINES = (
    Setting("two stages", PIPE, (3, 2), (2.6, 2.3), 16, DEEP, {"pipelines": 1, "micro_batch_size": 2}),
    Setting(
        "three stages",
        PIPE,
        (3, 2, 2),
        (2.6, 2.3, 1.8),
        global_batch=24,
        size=DEEP,
        options={"pipelines": 1, "micro_batch_size": 2, "schedule": "1f1b"},
    ),
    Setting("four stages", PIPE, **_FOUR_STAGES, size=DEEP, options={"pipelines": 1}),
    Setting(
        "four stages, gpipe",
        PIPE,
        **_FOUR_STAGES,
        size=DEEP,
        options={"pipelines": 1, "micro_batch_size": 2, "schedule": "gpipe"},
    ),
    Setting(
        "two ranks, interleaved",
        PIPE,
        (2, 2),
        (2.3, 1.8),
        global_batch=16,
        size=DEEP,
        options={"pipelines": 1, "micro_batch_size": 2, "schedule": "interleaved_1f1b"},
    ),
    Setting("two pipelines", PIPE, **_FOUR_STAGES, size=DEEP, options={"pipelines": 2}),
    Setting(
        "a pipeline a device",
        PIPE,
        (2, 2, 1),
        (2.3, 1.8, 1.2),
        global_batch=24,
        options={"pipelines": 3, "micro_batch_size": 3},
    ),
    Setting("only micro-batches of 4", PIPE, (3, 2), (2.6, 2.3), global_batch=28, options={"micro_batch_size": 4}),
    Setting("GPT, four stages", PIPE, **_FOUR_STAGES, size=DEEP_TEXT, options={"pipelines": 1}),
    Setting("GPT, two pipelines", PIPE, **_FOUR_STAGES, size=DEEP_TEXT, options={"pipelines": 2}),
)

SETTINGS = {f"{each.strategy}: {each.name}": each for each in (*SHARDED, *PIPELINES)}

QUICK = tuple(
    f"{strategy}: {name}"
    for strategy, name in (
        (FSDP, "two, declared 20 % off"),
        (FSDP, "groups {0} {1,2}"),
        (FSDP, "two micro-batches by memory"),
        (PIPE, "two stages"),
        (PIPE, "two pipelines"),
        (PIPE, "GPT, four stages"),
    )
)
