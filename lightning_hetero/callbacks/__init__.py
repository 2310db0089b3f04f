"""Callbacks that work under any strategy."""

from lightning_hetero.callbacks.emulated_devices import EmulatedDevices
from lightning_hetero.callbacks.rank_energy import RankEnergy

__all__ = ["EmulatedDevices", "RankEnergy"]
