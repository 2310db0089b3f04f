"""Callbacks that work under any strategy."""

from lightning_hetero.callbacks.emulated_devices import EmulatedDevices
from lightning_hetero.callbacks.rank_energy import RankEnergy
from lightning_hetero.callbacks.rank_memory import RankMemory
from lightning_hetero.callbacks.rank_throughput import RankThroughput
from lightning_hetero.callbacks.straggler_monitor import Straggler, StragglerMonitor

__all__ = ["EmulatedDevices", "RankEnergy", "RankMemory", "RankThroughput", "Straggler", "StragglerMonitor"]
