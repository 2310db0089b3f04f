"""Pipeline schedules as data: actions, the named schedules, and a check that lists every fault."""

from lightning_hetero.schedule.action import (
    BACKWARD,
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    Action,
    Row,
    Schedule,
    needs,
    peaks_in_flight,
)
from lightning_hetero.schedule.builders import (
    SCHEDULES,
    build_schedule,
    gpipe,
    interleaved_1f1b,
    interleaving_problems,
    one_f_one_b,
    warmup_depths,
    warmup_problems,
    zero_bubble,
)
from lightning_hetero.schedule.check import Fault, find_faults, format_grid, validate_schedule

__all__ = [
    "BACKWARD",
    "BACKWARD_INPUT",
    "BACKWARD_WEIGHT",
    "FORWARD",
    "SCHEDULES",
    "Action",
    "Fault",
    "Row",
    "Schedule",
    "build_schedule",
    "find_faults",
    "format_grid",
    "gpipe",
    "interleaved_1f1b",
    "interleaving_problems",
    "needs",
    "one_f_one_b",
    "peaks_in_flight",
    "validate_schedule",
    "warmup_depths",
    "warmup_problems",
    "zero_bubble",
]
