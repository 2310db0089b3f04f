"""Whether all ranks stop: one that leaves a fit alone leaves the others waiting for it."""

from __future__ import annotations

import time
from collections.abc import Callable

import lightning.pytorch as pl

from lightning_hetero.errors import HeteroError
from lightning_hetero.strategies.peers import Store

_PREFIX = "lightning_hetero/stops"


class StopAgreement:
    """Compares by the process group's store, and only when a rank wants to stop: it costs a running fit nothing.

    Args:
        store: of the process group.
        rank: this rank.
        world_size: number of ranks.
        timeout_s: until a rank that has not followed is taken to train on.
        failed: whether another rank failed meanwhile; then nobody follows, and its message is what counts.
    """

    def __init__(
        self, store: Store, rank: int, world_size: int, timeout_s: float, failed: Callable[[], object]
    ) -> None:
        self._store = store
        self._rank = rank
        self._world_size = world_size
        self._timeout_s = timeout_s
        self._failed = failed
        self._run = f"{_PREFIX}/{store.add(f'{_PREFIX}/runs/{rank}', 1)}"
        self._loops = 0

    def look(self, trainer: pl.Trainer, moment: str) -> None:
        """Where this rank wants to stop in mid-fit, wait for all others to want it, too.

        Args:
            trainer: whose ``should_stop`` it is.
            moment: what has just ended: "batch", "validation".

        Raises:
            HeteroError: naming the ranks that stop and those that do not.
        """
        if trainer.should_stop:
            self._require_all(f"after {moment} {trainer.fit_loop.total_batch_idx}")

    def look_at_end(self, trainer: pl.Trainer) -> None:
        """The same at the end of a fit, where ranks that have come without ``should_stop`` are there, too."""
        self._arrive("at the end")
        if trainer.should_stop:
            self._require_all("at the end")
        self._loops += 1  # the learning rate finder's comes before the fit's own

    def _arrive(self, place: str) -> None:
        self._store.set(self._key(place, self._rank), "1")

    def _require_all(self, place: str) -> None:
        self._arrive(place)
        deadline_s = time.monotonic() + self._timeout_s
        missing = list(range(self._world_size))
        while True:
            missing = [rank for rank in missing if not self._store.check([self._key(place, rank)])]
            if not missing or self._failed():
                return
            if time.monotonic() > deadline_s:
                stopping = [rank for rank in range(self._world_size) if rank not in missing]
                raise HeteroError(
                    f"trainer.should_stop is True {place} on ranks {stopping} and not on ranks {missing}, which would "
                    "wait for the others: decide together, trainer.should_stop = "
                    "trainer.strategy.reduce_boolean_decision(decision, all=False)"
                )
            time.sleep(0.005)

    def _key(self, place: str, rank: int) -> str:
        return f"{self._run}/{self._loops}/{place}/{rank}"
