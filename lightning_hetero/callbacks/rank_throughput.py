"""How fast every rank is, and where the time of its steps goes."""

from __future__ import annotations

import math
import os

import lightning.pytorch as pl

from lightning_hetero.callbacks.rank_callback import RankCallback
from lightning_hetero.callbacks.rank_values import RankValues, named
from lightning_hetero.callbacks.step_record import StepRecord

_COLUMNS = (
    "samples",
    "step_s",
    "compute_s",
    "blocked_s",
    "messages_s",
    "input_s",
    "optimizer_s",
    "rest_s",
    "flops",
    "recomputed_flops",
    "peak_flops_per_s",
)
_PARTS = ("compute_s", "waiting_s", "communication_s", "input_s", "optimizer_s", "rest_s")


class RankThroughput(RankCallback):
    """Logs samples/s, TFLOP/s, MFU, HFU and the parts of a step, of every rank and together.

    Under any strategy; a step is an optimizer step, and values are means since they were logged last:

    - ``samples_per_sec``, ``tflops_per_sec``: of all ranks together, the sums of theirs;
    - ``device/<what>`` (the mean over ranks), ``device/<what>_rank_{r}``, ``device/min_<what>``,
      ``device/max_<what>`` of: ``samples_per_sec``; ``tflops_per_sec``, 10^12 FLOP/s of the model, recompute left out;
      ``mfu`` and ``hfu``, their share of the device's dense peak without and with recompute; ``step_s`` and its parts
      ``compute_s``, ``waiting_s``, ``communication_s``, ``input_s``, ``optimizer_s`` and ``rest_s``, which sum to it;
      ``idle_share``, the share of the step in which no unit of the rank ran;
    - ``device/emulated``: 1 where the devices are emulated, and values a rehearsal.

    FLOPs are counted once, on the meta device, for what the first batch's step calls. A value that there is no ground
    for is absent, and the reason said once.

    Args:
        flops_per_sample: FLOPs of forward and backward of one sample, in place of counting them.
        log_every_n_steps: steps between two times that values are logged; default: the Trainer's.
        folder: where ``metrics.jsonl`` is written; default: the logger's folder, or ``default_root_dir`` without one.

    Attributes:
        logged: what was logged last, by name.

    Raises:
        HeteroError: for a value that is no such number.
    """

    def __init__(
        self,
        flops_per_sample: float | None = None,
        *,
        log_every_n_steps: int | None = None,
        folder: str | os.PathLike[str] | None = None,
    ) -> None:
        super().__init__(log_every_n_steps, folder, flops_per_sample)
        self._values: RankValues

    def begin_fit(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        """Begin anew."""
        self._values = RankValues(trainer, len(_COLUMNS))
        if self.meter.facts.emulated:
            self.say_once("devices are emulated: what is logged is a rehearsal, not a measurement of real ones")

    def step_is_complete(self, trainer: pl.Trainer, record: StepRecord) -> None:
        """Note a step, and add its rates to its line."""
        parts, flops, facts = record.parts, record.flops, self.meter.facts
        assert parts is not None
        step_s = parts.step_s
        record.values["samples_per_s"] = record.samples / step_s
        if flops is not None:
            record.values |= {"flops": flops.model, "recomputed_flops": flops.recomputed}
            record.values["tflops_per_s"] = flops.model / step_s / 1e12
            if facts.peak_flops_per_s is not None:
                record.values["mfu"] = flops.model / step_s / facts.peak_flops_per_s
                record.values["hfu"] = (flops.model + flops.recomputed) / step_s / facts.peak_flops_per_s
        if self.meter.no_flops is not None:
            self.say_once(f"no TFLOP/s and no MFU: {self.meter.no_flops}")
        elif facts.no_peak is not None:
            self.say_once(f"no MFU: {facts.no_peak}")
        self._values.add(
            [
                record.samples,
                step_s,
                parts.compute_s,
                parts.blocked_s,
                parts.messages_s,
                parts.input_s,
                parts.optimizer_s,
                parts.rest_s,
                None if flops is None else flops.model,
                None if flops is None else flops.recomputed,
                facts.peak_flops_per_s,
            ]
        )

    def step_is_over(self, trainer: pl.Trainer, step: int) -> None:
        """Bring the ranks' values together where they are logged."""
        if not self.logs_at(trainer, step):
            return
        self.meter.complete(trainer)
        rows = self._values.take()
        if rows:
            self.log_values(
                trainer, throughput_of([[dict(zip(_COLUMNS, row, strict=True)) for row in rank] for rank in rows])
            )


def throughput_of(ranks: list[list[dict[str, float]]]) -> dict[str, float]:
    """What is logged of the ranks' steps.

    Args:
        ranks: by rank and step: samples, seconds of the step and its parts, flops, recomputed_flops, peak_flops_per_s;
            NaN where there is none.
    """
    steps = len(ranks[0])
    communication = [min(rank[step]["blocked_s"] for rank in ranks) for step in range(steps)]
    by_rank: dict[str, list[float]] = {}
    for rank in ranks:
        for step, communication_s in zip(rank, communication, strict=True):
            step["communication_s"] = communication_s
            step["waiting_s"] = step["blocked_s"] - communication_s + step["messages_s"]
        total = {name: math.fsum(step[name] for step in rank) for name in rank[0]}
        seconds = total["step_s"]
        peak = rank[0]["peak_flops_per_s"]
        values = {
            "samples_per_sec": total["samples"] / seconds,
            "tflops_per_sec": total["flops"] / seconds / 1e12,
            "mfu": total["flops"] / seconds / peak,
            "hfu": (total["flops"] + total["recomputed_flops"]) / seconds / peak,
            "step_s": seconds / steps,
            **{name: total[name] / steps for name in _PARTS},
            "idle_share": 1.0 - total["compute_s"] / seconds,
        }
        for name, value in values.items():
            by_rank.setdefault(name, []).append(value)
    logged: dict[str, float] = {}
    for name in ("samples_per_sec", "tflops_per_sec"):
        if not any(map(math.isnan, by_rank[name])):
            logged[name] = math.fsum(by_rank[name])
    for name, values_of in by_rank.items():
        logged |= named(name, values_of)
    return logged
