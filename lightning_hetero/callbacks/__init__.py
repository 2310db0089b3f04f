"""Callbacks that work under any strategy."""

from lightning_hetero.callbacks.emulated_devices import EmulatedDevices

__all__ = ["EmulatedDevices"]
