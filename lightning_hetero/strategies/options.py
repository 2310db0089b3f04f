"""The sharding options of hetero_fsdp, from wherever they come: constructor, configuration file or plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

from lightning_hetero.cluster.peaks import preset_for
from lightning_hetero.membership.shards import replicas_of
from lightning_hetero.plan import ShardPlan
from lightning_hetero.plan.options import DTYPES, PLAN_OPTIONS, POLICY_DTYPES, Problem, hybrid_size, option_problems
from lightning_hetero.strategies.layout import Layout


@dataclass(frozen=True)
class ShardingOptions:
    """What was asked for; None stands for what was not. Values may be bad: :meth:`problems` says which.

    Args:
        sharding_strategy: "FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_k" or "auto".
        reshard_after_forward: True is FULL_SHARD, False SHARD_GRAD_OP; "auto" is not given.
        backward_prefetch: "BACKWARD_PRE", "BACKWARD_POST" or "NONE".
        forward_prefetch: whether blocks gather the next ones in forward by an explicit list.
        limit_all_gathers: True for 2 in flight, a number in flight, or False for no limit.
        cpu_offload: whether shards and their optimizer states live in the host's memory.
        activation_checkpointing: True for all blocks, n for every n-th, or False.
        mixed_precision: FSDP2's policy, or a mapping of its keys.
        compile: whether each block's forward is compiled.
    """

    sharding_strategy: str | None = None
    reshard_after_forward: bool | Literal["auto"] | None = None
    backward_prefetch: str | None = None
    forward_prefetch: bool | None = None
    limit_all_gathers: bool | int | None = None
    cpu_offload: bool | None = None
    activation_checkpointing: bool | int | None = None
    mixed_precision: Mapping[str, Any] | MixedPrecisionPolicy | None = None
    compile: bool | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "mixed_precision", _plain_policy(self.mixed_precision))
        for name in ("sharding_strategy", "reshard_after_forward"):
            if getattr(self, name) == "auto":
                object.__setattr__(self, name, None)

    # -- what is wrong -------------------------------------------------------------------------------------------------

    def problems(self) -> list[str]:
        """Return every bad value, by its name, with the accepted ones."""
        problems = [f"{name}={value!r}: {accepted}" for name, value, accepted in self._bad_values()]
        if problems or self.sharding_strategy is None or not isinstance(self.reshard_after_forward, bool):
            return problems
        agreeing = {"FULL_SHARD": (True,), "SHARD_GRAD_OP": (False,), "NO_SHARD": (False,)}
        if self.reshard_after_forward not in agreeing.get(self.sharding_strategy, (True, False)):
            problems.append(
                f"sharding_strategy={self.sharding_strategy!r} and reshard_after_forward={self.reshard_after_forward}: "
                "True is FULL_SHARD, False is SHARD_GRAD_OP; leave one out"
            )
        return problems

    def _bad_values(self) -> list[Problem]:
        given = {field.name: getattr(self, field.name) for field in fields(self)}
        reshard = given.pop("reshard_after_forward")
        found = option_problems(given)
        if reshard is not None and not isinstance(reshard, bool):
            found.append(Problem("reshard_after_forward", reshard, "use True, False or 'auto'"))
        return found

    def rank_problems(self, world_size: int, device_types: Sequence[str] = (), precision: str = "") -> list[str]:
        """Return what these ranks cannot do.

        Args:
            world_size: number of ranks.
            device_types: of the ranks, where they are known.
            precision: Lightning's, such as "bf16-mixed".
        """
        problems = []
        size = hybrid_size(self.sharding_strategy)
        if size is not None and world_size % size:
            whole = ", ".join(f"HYBRID_{k}" for k in range(1, world_size + 1) if world_size % k == 0)
            problems.append(
                f"sharding_strategy={self.sharding_strategy!r}: groups of {size} do not divide {world_size} ranks; "
                f"use {whole}, or a plan with groups of its own"
            )
        if "float16" in self._policy_dtypes() and precision != "16-mixed":
            problems.append(
                f"mixed_precision={self.mixed_precision!r}: fp16 needs a loss scaler, which comes with "
                "Trainer(precision='16-mixed') on CUDA devices; use bfloat16 or float32 elsewhere"
            )
        return problems + self._missing_dtypes(device_types, precision)

    def _missing_dtypes(self, device_types: Sequence[str], precision: str) -> list[str]:
        asked = {f"mixed_precision={self.mixed_precision!r}": set(self._policy_dtypes())}
        dtype = {"bf16": "bfloat16", "16": "float16"}.get(precision.partition("-")[0])
        if dtype is not None:
            asked[f"precision={precision!r}"] = {dtype}
        problems = []
        for argument, dtypes in asked.items():
            for name in sorted(dtypes & {"bfloat16", "float16"}):
                lacking = [f"{r} ({kind})" for r, kind in enumerate(device_types) if not _has_dtype(kind, DTYPES[name])]
                if lacking:
                    problems.append(
                        f"{argument}: {name} is not there on rank{'s' if len(lacking) > 1 else ''} "
                        f"{', '.join(lacking)}; use a type that every device has, such as float32, or leave them out"
                    )
        return problems

    def plan_problems(self, plan: ShardPlan) -> list[str]:
        """Return where the arguments and a given plan disagree, naming both. What a plan leaves open disagrees not."""
        problems = [
            f"{name}={mine!r}, but the plan's options say {plan.options[name]!r}: leave one out"
            for name, mine in self.given().items()
            if name in plan.options and not _same(mine, plan.options[name])
        ]
        how = [plan.mode_of(index) for index in range(len(plan.groups))]
        reshard = self.reshard_after_forward
        if isinstance(reshard, bool) and any((mode == "FULL_SHARD") != reshard for mode in how):
            problems.append(
                f"reshard_after_forward={reshard}, but the plan says {' and '.join(dict.fromkeys(how))}: leave it out"
            )
        if self.sharding_strategy is not None:
            problems += self._layout_problems(plan, how)
        mine = self.activation_checkpointing
        if mine is not None and plan.activation_checkpointing:
            theirs = [plan.checkpoints(rank) for rank in range(plan.world_size)]
            if any(bool(mine) != on for on in theirs):
                problems.append(
                    f"activation_checkpointing={mine!r}, but the plan says {theirs}, rank by rank: leave one out"
                )
        return problems

    def _layout_problems(self, plan: ShardPlan, how: Sequence[str]) -> list[str]:
        size = hybrid_size(self.sharding_strategy)
        if size is not None and plan.world_size % size:
            return []  # rank_problems says so
        asked = self.layout(plan.world_size)
        assert asked is not None
        mine = replicas_of(asked.groups, asked.modes)
        theirs = replicas_of(plan.groups, how)
        # a group may keep its parameters, and still be a group
        fit = set(asked.modes) if size is None else {"FULL_SHARD", "SHARD_GRAD_OP"}
        alike = all(len(replica) == 1 for replica in mine) or set(how) <= fit
        if sorted(mine) == sorted(theirs) and alike:
            return []
        shown = ", ".join(f"{list(group)} {mode}" for group, mode in zip(plan.groups[:4], how, strict=False))
        more = ", ..." if len(plan.groups) > 4 else ""
        return [f"sharding_strategy={self.sharding_strategy!r}, but the plan's groups are {shown}{more}: leave it out"]

    # -- what is meant -------------------------------------------------------------------------------------------------

    def given(self) -> dict[str, Any]:
        """Return the options that were given, as a plan holds them: all but how the model is sharded."""
        return {name: getattr(self, name) for name in PLAN_OPTIONS if getattr(self, name) is not None}

    def with_plan(self, plan: ShardPlan) -> ShardingOptions:
        """Return these options, and those of a plan that they agree with."""
        return replace(self, **(dict(plan.options) | self.given()))

    def in_plan(self, plan: ShardPlan) -> ShardPlan:
        """Return the plan with these options in it, so that it says by itself how it was run."""
        again = self.activation_checkpointing
        per_rank = (bool(again),) * plan.world_size if again else plan.activation_checkpointing
        return replace(plan, options=self.given(), activation_checkpointing=per_rank)

    def layout(self, world_size: int) -> Layout | None:
        """Return the groups and their modes that were asked for by name; None leaves them to the plan.

        Args:
            world_size: number of ranks; the k of "HYBRID_k" divides it.
        """
        name, size = self.sharding_strategy, hybrid_size(self.sharding_strategy)
        if name is None:
            return None
        if size is None:
            return Layout((tuple(range(world_size)),), (name,))
        groups = tuple(tuple(range(start, start + size)) for start in range(0, world_size, size))
        mode = "SHARD_GRAD_OP" if self.reshard_after_forward is False else "FULL_SHARD"
        return Layout(groups, (mode,) * len(groups))

    @property
    def reshards(self) -> bool | None:
        """Whether blocks are freed between forward and backward; None where it was not said."""
        if isinstance(self.reshard_after_forward, bool):
            return self.reshard_after_forward
        return None if self.sharding_strategy is None else self.sharding_strategy not in ("SHARD_GRAD_OP", "NO_SHARD")

    @property
    def backward(self) -> str:
        """When a backward's next all-gather is issued."""
        return self.backward_prefetch or "BACKWARD_PRE"

    @property
    def gathers_ahead(self) -> int | None:
        """How many blocks are gathered beside the one that computes; None for no limit."""
        limit = self.limit_all_gathers
        if limit is False:
            return None
        return 1 if limit is None or limit is True else limit - 1

    def gathers_forward(self, on_gloo: bool) -> bool:
        """Whether blocks gather the next ones in forward: unless said otherwise, where nothing else overlaps them."""
        return on_gloo if self.forward_prefetch is None else self.forward_prefetch

    def without_effect(self, *, on_cpu: bool, emulated: bool, reshards: bool) -> list[str]:
        """Return what does nothing here, one sentence each.

        Args:
            on_cpu: whether ranks run on CPUs.
            emulated: whether they behave like other devices.
            reshards: whether parameters are gathered again in backward.
        """
        texts = []
        if self.cpu_offload and on_cpu:
            texts.append("cpu_offload does nothing on CPU ranks, whose shards are in the host's memory already")
        if self.compile and emulated:
            texts.append("compile does nothing on emulated devices, whose every operation is watched")
        if self.backward_prefetch is not None and not reshards:
            texts.append(
                f"backward_prefetch={self.backward_prefetch} does nothing where parameters stay gathered for backward"
            )
        return texts

    def recompute_every(self, plan: ShardPlan | None, rank: int) -> int:
        """Return n where every n-th block of ``rank`` is computed again in backward, 0 where none is."""
        every = int(self.activation_checkpointing or 0)
        if plan is not None and plan.activation_checkpointing:
            return max(1, every) if plan.checkpoints(rank) else 0
        return every

    def policy(self, *, with_output: bool) -> MixedPrecisionPolicy:
        """Return FSDP2's mixed precision policy.

        Args:
            with_output: whether the module's output is the model's, and so becomes of ``output_dtype``.
        """
        asked = dict(self.mixed_precision) if isinstance(self.mixed_precision, Mapping) else {}
        types = {name: _torch_dtype(asked[name]) for name in POLICY_DTYPES if asked.get(name)}
        if not with_output:
            types.pop("output_dtype", None)
        return MixedPrecisionPolicy(**types, cast_forward_inputs=asked.get("cast_forward_inputs", True))

    def _policy_dtypes(self) -> list[str]:
        asked = self.mixed_precision if isinstance(self.mixed_precision, Mapping) else {}
        names = [asked[key] for key in POLICY_DTYPES if isinstance(asked.get(key), str)]
        return [_TORCH_NAMES[DTYPES[name]] for name in names if name in DTYPES]


_TORCH_NAMES = {short: name for name, short in DTYPES.items() if name.startswith(("float", "bfloat"))}


def _torch_dtype(name: str) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, _TORCH_NAMES[DTYPES[name]])
    return dtype


def _plain_policy(policy: object) -> Any:
    """Return a policy as plain data, so that it can be compared, checked and written; anything else as it is."""
    if isinstance(policy, MixedPrecisionPolicy):
        plain = {key: getattr(policy, key) for key in POLICY_DTYPES if getattr(policy, key) is not None}
        policy = plain | ({} if policy.cast_forward_inputs else {"cast_forward_inputs": False})
    if not isinstance(policy, Mapping):
        return policy
    return {
        key: str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else value
        for key, value in policy.items()
    }


def _same(mine: object, theirs: object) -> bool:
    """Whether two values mean the same: 1 and True do not for a limit, names of one type do."""
    if isinstance(mine, Mapping) and isinstance(theirs, Mapping):
        return _known(mine) == _known(theirs)
    return type(mine) is type(theirs) and mine == theirs


def _known(policy: Mapping[str, Any]) -> dict[str, Any]:
    return {key: DTYPES.get(value, value) for key, value in policy.items() if value is not None}


def _has_dtype(device_type: str, dtype: str) -> bool:
    """Whether a device computes in ``dtype``, as far as is known: nothing is said of one without figures."""
    preset = preset_for(device_type)
    return preset is None or not preset.peaks or dtype in preset.peaks
