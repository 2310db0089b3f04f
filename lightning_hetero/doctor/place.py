"""Where a rank stands among the others, and where they meet."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Place:
    """As a launcher gives it.

    Args:
        rank: this rank.
        world_size: number of ranks.
        local_rank: its number on its machine.
        host: name or address of the machine where ranks meet (MASTER_ADDR).
        port: there (MASTER_PORT).
        hosted: whether the launcher holds the store there; otherwise rank 0 does.
        attempt: tells this start from earlier ones of the same launcher.
    """

    rank: int
    world_size: int
    local_rank: int
    host: str
    port: int
    hosted: bool = False
    attempt: str = ""
