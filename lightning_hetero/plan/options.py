"""The options of sharded training, by the names that the field uses: which values each takes. Plain data, no torch."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

BACKWARD_PREFETCH = ("BACKWARD_PRE", "BACKWARD_POST", "NONE")
"""When the next all-gather of a backward is issued: before the unit at hand computes; after its gradients are there
and before they are reduced; when it is needed."""

DTYPES: Mapping[str, str] = {
    "float64": "fp64",
    "float32": "fp32",
    "bfloat16": "bf16",
    "float16": "fp16",
    "fp64": "fp64",
    "fp32": "fp32",
    "bf16": "bf16",
    "fp16": "fp16",
}
"""names of floating-point types, torch's and short ones, and how ``cluster/peaks.py`` calls them"""

POLICY_DTYPES = ("param_dtype", "reduce_dtype", "output_dtype")
"""what a mixed precision policy says the type of: parameters while they compute, gradients while they are reduced,
the model's output"""

_HYBRID = re.compile(r"HYBRID_([0-9]+)")


class Problem(NamedTuple):
    """A value that an option does not take.

    Args:
        name: of the option, and of the key within it where it is a mapping ("mixed_precision.param_dtype").
        value: as it was given.
        accepted: what to give instead ("use True or False").
    """

    name: str
    value: object
    accepted: str


def hybrid_size(sharding_strategy: object) -> int | None:
    """The k of "HYBRID_k", the ranks of a group; None for anything else."""
    found = _HYBRID.fullmatch(sharding_strategy) if isinstance(sharding_strategy, str) else None
    return int(found[1]) if found and int(found[1]) > 0 else None


def option_problems(options: Mapping[str, object]) -> list[Problem]:
    """Every value that its option does not take, in the order given.

    Args:
        options: some of :data:`OPTIONS` and their values; None stands for an option that is not given.
    """
    problems = []
    for name, value in options.items():
        if name not in _CHECKS:
            problems.append(Problem(name, value, f"known options are {', '.join(_CHECKS)}"))
        elif value is not None:
            problems += _CHECKS[name](name, value)
    return problems


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _one_of(accepted: str, is_good: Callable[[Any], bool]) -> Callable[[str, object], list[Problem]]:
    def check(name: str, value: object) -> list[Problem]:
        return [] if is_good(value) else [Problem(name, value, f"use {accepted}")]

    return check


def _check_policy(name: str, value: object) -> list[Problem]:
    known = [*POLICY_DTYPES, "cast_forward_inputs"]
    if not isinstance(value, Mapping):
        return [Problem(name, value, f"use a mapping with some of the keys {', '.join(known)}")]
    problems = []
    for key, entry in value.items():
        if key not in known:
            problems.append(Problem(f"{name}.{key}", entry, f"known keys are {', '.join(known)}"))
        elif key == "cast_forward_inputs":
            problems += _BOOLEAN(f"{name}.{key}", entry)
        elif entry is not None and not (isinstance(entry, str) and entry in DTYPES):
            problems.append(Problem(f"{name}.{key}", entry, f"use {', '.join(list(DTYPES)[:4])}"))
    return problems


def _is_sharding(value: object) -> bool:
    return value in ("auto", "FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD") or hybrid_size(value) is not None


_BOOLEAN = _one_of("True or False", lambda value: isinstance(value, bool))

_PLANNED: Mapping[str, Callable[[str, object], list[Problem]]] = {
    "backward_prefetch": _one_of(
        ", ".join(BACKWARD_PREFETCH[:2]) + f" or {BACKWARD_PREFETCH[2]}", lambda value: value in BACKWARD_PREFETCH
    ),
    "forward_prefetch": _BOOLEAN,
    "limit_all_gathers": _one_of(
        "True (2 in flight), a whole number in flight >= 1, or False (no limit)",
        lambda value: isinstance(value, bool) or _is_whole(value),
    ),
    "cpu_offload": _BOOLEAN,
    "activation_checkpointing": _one_of(
        "True (all blocks), False, or a whole number n >= 1 (every n-th block)",
        lambda value: isinstance(value, bool) or _is_whole(value),
    ),
    "mixed_precision": _check_policy,
    "compile": _BOOLEAN,
}

_CHECKS: Mapping[str, Callable[[str, object], list[Problem]]] = {
    "sharding_strategy": _one_of(
        "auto, FULL_SHARD, SHARD_GRAD_OP, NO_SHARD or HYBRID_k (k ranks in each group, such as HYBRID_2)", _is_sharding
    ),
    **_PLANNED,
}

OPTIONS = tuple(_CHECKS)
"""all options"""

PLAN_OPTIONS = tuple(_PLANNED)
"""those that a plan holds as such; it says how it shards by groups, modes and reshard_after_forward"""
