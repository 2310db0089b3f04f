"""Energy, seconds and samples between two readings of a meter, pauses left out."""

from __future__ import annotations

from dataclasses import replace

from lightning_hetero.profiler.power import Reading


class EnergySpan:
    """What was taken since a reading. With a reading that is missing there is nothing to tell."""

    def __init__(self) -> None:
        self.samples = 0
        self._since: Reading | None = None
        self._paused: Reading | None = None

    def restart(self, reading: Reading | None) -> None:
        """Begin anew."""
        self.samples, self._since, self._paused = 0, reading, None

    def pause(self, reading: Reading | None) -> None:
        """What comes now does not count."""
        self._paused = reading

    def resume(self, reading: Reading | None) -> None:
        """It counts again."""
        before, self._paused = self._paused, None
        if reading is None or before is None or self._since is None:
            self._since = None
            return
        self._since = replace(
            self._since,
            joules=self._since.joules + reading.joules - before.joules,
            at_s=self._since.at_s + reading.at_s - before.at_s,
        )

    def values(self, reading: Reading | None, flops_per_sample: float | None) -> dict[str, float | None] | None:
        """What was taken up to a reading.

        Args:
            reading: the meter's.
            flops_per_sample: floating-point operations for each sample, where they are known.

        Returns:
            ``joules``, ``seconds``, ``power_w``, ``joules_per_sample`` and ``tflops_per_s_per_w``, the last two None
            where they cannot be told; None where nothing can.
        """
        if reading is None or self._since is None or reading.at_s <= self._since.at_s:
            return None
        joules, seconds = reading.joules - self._since.joules, reading.at_s - self._since.at_s
        tflops = None if flops_per_sample is None else flops_per_sample * self.samples / 1e12
        return {
            "joules": joules,
            "seconds": seconds,
            "power_w": joules / seconds,
            "joules_per_sample": joules / self.samples if self.samples else None,
            # FLOP/s over joules/s: the seconds cancel out
            "tflops_per_s_per_w": tflops / joules if tflops is not None and joules > 0 else None,
        }
