"""Ranks tell each other what they see, through a store, with a time limit on every wait.

No process group is made: where one would hang, this says who did not come.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from lightning_hetero.doctor.finding import Finding
from lightning_hetero.doctor.place import Place
from lightning_hetero.doctor.places import ranks_text
from lightning_hetero.doctor.reach import CHECK
from lightning_hetero.errors import HeteroError

_LOOK_S = 0.05
_PATIENT_S = 0.25
_FAREWELL_S = 10.0


class RendezvousError(HeteroError):
    """The place where ranks meet was not reached, or was lost."""


class Meeting:
    """The store in which ranks meet.

    Args:
        place: this rank's.
        wait_s: for how long others are waited for, in seconds.

    Raises:
        RendezvousError: the store could not be opened or reached in this time.
    """

    def __init__(self, place: Place, wait_s: float) -> None:
        self._place = place
        self._wait_s = wait_s
        holds = place.rank == 0 and not place.hosted
        if not holds:
            _wait_for_door(place, wait_s)
        try:
            store = dist.TCPStore(  # type: ignore[attr-defined]
                place.host, place.port, None, holds, timedelta(seconds=wait_s), wait_for_workers=False
            )
        except (RuntimeError, ValueError) as error:
            raise _unmet("open" if holds else "reach", place, wait_s, _first_line(error)) from error
        self._store = dist.PrefixStore(f"lightning_hetero/doctor/{place.attempt}", store)  # type: ignore[attr-defined]

    def give(self, what: str, value: Any) -> None:
        """Let the others have a value of this rank's, as JSON."""
        try:
            self._store.set(f"{what}/{self._place.rank}", json.dumps(value))
        except RuntimeError as error:
            raise self._lost(error) from error

    def collect(self, what: str, ranks: Iterable[int], wait_s: float | None = None) -> dict[int, Any]:
        """What these ranks gave; of those that did not in time, nothing.

        Args:
            what: name of the value.
            ranks: whose.
            wait_s: for how long; by default the meeting's own limit.
        """
        deadline_s = time.monotonic() + (self._wait_s if wait_s is None else wait_s)
        missing, found = sorted(set(ranks)), {}
        try:
            while missing:
                there = [rank for rank in missing if self._store.check([f"{what}/{rank}"])]
                for rank in there:
                    found[rank] = json.loads(self._store.get(f"{what}/{rank}"))
                missing = [rank for rank in missing if rank not in found]
                if time.monotonic() > deadline_s:
                    break
                if missing:
                    time.sleep(_LOOK_S)
        except RuntimeError as error:
            raise self._lost(error) from error
        return dict(sorted(found.items()))

    def conclude(self, status: int, others: Iterable[int]) -> None:
        """Rank 0 says how it ended, and stays until the others have heard: its end may be the store's."""
        self.give("status", status)
        self.collect("heard", [rank for rank in others if rank != self._place.rank], _FAREWELL_S)

    def conclusion(self, wait_s: float) -> int:
        """How it ended, as rank 0 says.

        Raises:
            RendezvousError: rank 0 does not say in this time.
        """
        said = self.collect("status", [0], wait_s)
        if 0 not in said:
            raise RendezvousError(f"rank 0 did not say how it ended within {wait_s:g} s: see its output")
        self.give("heard", True)
        return int(said[0])

    def _lost(self, error: Exception) -> RendezvousError:
        place = self._place
        return RendezvousError(f"{place.host}:{place.port}, where ranks meet, was lost ({_first_line(error)})")


def rendezvous_finding(error: RendezvousError, place: Place) -> Finding:
    """What a rank says that did not meet the others."""
    holds = place.rank == 0 and not place.hosted
    step = (
        "give a MASTER_PORT that is free on this node, and its own name or address as MASTER_ADDR"
        if holds
        else f"see that rank 0 was started, that {place.host} is its node, and that port {place.port} is open there"
    )
    return Finding("error", CHECK, ranks_text([place.rank]), str(error), step)


def _wait_for_door(place: Place, wait_s: float) -> None:
    """Connect until somebody answers: torch would print stacks of its own meanwhile, and wait twice as long."""
    deadline_s = time.monotonic() + wait_s
    while True:
        try:
            with socket.create_connection((place.host, place.port), max(_LOOK_S, deadline_s - time.monotonic())):
                return
        except OSError as error:
            if time.monotonic() + _PATIENT_S > deadline_s:
                why = "no answer" if isinstance(error, TimeoutError) else error.strerror or str(error)
                raise _unmet("reach", place, wait_s, why) from error
        time.sleep(_PATIENT_S)


def _unmet(verb: str, place: Place, wait_s: float, why: str) -> RendezvousError:
    return RendezvousError(f"cannot {verb} {place.host}:{place.port}, where ranks meet, within {wait_s:g} s ({why})")


def _first_line(error: Exception) -> str:
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__
