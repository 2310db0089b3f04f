"""Process groups over which stages send to each other."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

MakeGroup = Callable[..., Any]


class Lines:
    """The groups of one pipeline, by sender, receiver and direction.

    gloo matches messages by their tags, so forward and backward take a group each. NCCL runs what goes over one group
    one after the other, receives that are posted ahead too: a send that comes after one waits for it, and by way of
    other ranks for itself. So each direction between two ranks has a group of its own there, in which one rank only
    sends and the other only receives, in one order. Called on all ranks in the same order.

    Args:
        ranks: of the pipeline.
        pairs: of sender and receiver of forward messages; their answers go back.
        device: that the messages are on.
        make_group: makes a process group of ranks.
    """

    def __init__(
        self, ranks: Sequence[int], pairs: Iterable[tuple[int, int]], device: torch.device, make_group: MakeGroup
    ) -> None:
        self._whole: dict[bool, Any] = {}
        self._lines: dict[tuple[int, int, bool], Any] = {}
        if len(ranks) < 2:
            return
        if device.type == "cpu":
            self._whole = {forward: make_group(ranks) for forward in (True, False)}
            return
        for source, target in sorted({pair for pair in pairs if pair[0] != pair[1]}):
            self._lines[source, target, True] = make_group((source, target))
            self._lines[target, source, False] = make_group((source, target))

    def of(self, source: int, target: int, forward: bool) -> Any:
        """The group of the messages from one rank to another."""
        return self._whole[forward] if self._whole else self._lines[source, target, forward]

    @property
    def groups(self) -> tuple[Any, ...]:
        """All groups, in the order in which they were made; of ranks that are in none of theirs they are nothing."""
        return (*self._whole.values(), *self._lines.values())
