"""Before training: does everything that could make it hang, fail or crawl stand as it should.

Every rank gathers facts (gather.py, into facts.py), ranks exchange them (meeting.py) and knock at each other's doors
(reach.py); checks are pure functions from facts to findings, one file each (examination.py has them all).
"""

from lightning_hetero.doctor.examination import CHECKS, examine
from lightning_hetero.doctor.facts import DeviceFacts, DriverView, LimitFacts, RankFacts
from lightning_hetero.doctor.finding import Finding, can_start
from lightning_hetero.doctor.limits import LoaderNeeds

__all__ = [
    "CHECKS",
    "DeviceFacts",
    "DriverView",
    "Finding",
    "LimitFacts",
    "LoaderNeeds",
    "RankFacts",
    "can_start",
    "examine",
]
