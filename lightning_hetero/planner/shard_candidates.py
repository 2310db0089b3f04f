"""What a search for a shard plan found and rejected."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_hetero.plan import ShardPlan


@dataclass(frozen=True)
class ShardCandidate:
    """One way to run the step that was looked at.

    Args:
        what: its groups, in words.
        predicted_step_s: predicted seconds of a step; ``None`` where it was rejected before it had any.
        rejected: why it is not the plan; ``None`` for the one that is.
    """

    what: str
    predicted_step_s: float | None
    rejected: str | None


@dataclass(frozen=True)
class Binding:
    """What limits the plan now.

    Args:
        rank: that sets the pace.
        by: "compute", "memory" or "link".
        why: in words, with numbers.
    """

    rank: int
    by: str
    why: str


@dataclass(frozen=True)
class Advice:
    """A change, and what it would bring: found by planning with it.

    Args:
        change: in words.
        predicted_step_s: of the plan with it.
        speed_up: by how much faster: 1.25 is a quarter more steps in the same time.
    """

    change: str
    predicted_step_s: float
    speed_up: float


@dataclass(frozen=True)
class ShardSearch:
    """A plan, and all that explains it.

    Args:
        plan: the fastest that fits.
        candidates: what was tried, fastest first; those without seconds last.
        even: what people run without a planner: one group, even shares, FULL_SHARD.
        binding: what limits the plan; ``None`` where it was not asked for.
        advice: changes, the most helpful one first; empty where they were not asked for.
    """

    plan: ShardPlan
    candidates: tuple[ShardCandidate, ...]
    even: ShardCandidate
    binding: Binding | None = None
    advice: tuple[Advice, ...] = ()
