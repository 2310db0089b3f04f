"""Every operation of chosen steps, and the planned step above the measured one."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import lightning.pytorch as pl
from torch.profiler import ProfilerActivity, profile, record_function

from lightning_hetero.callbacks.rank_callback import RankCallback
from lightning_hetero.callbacks.rank_values import gather_objects
from lightning_hetero.callbacks.span_recorder import SpanRecorder
from lightning_hetero.callbacks.step_record import StepRecord
from lightning_hetero.callbacks.trace_file import MARK, RankTimeline, merged_trace, temporary_name, write_whole
from lightning_hetero.callbacks.watched_units import WatchedUnits
from lightning_hetero.callbacks.whole_plan import planned_step_of
from lightning_hetero.errors import HeteroError, raise_all
from lightning_hetero.metrics import TIMELINE
from lightning_hetero.profiler.step_timeline import Span
from lightning_hetero.strategies.base import HeteroStrategy

if TYPE_CHECKING:  # strategies import callbacks
    from lightning_hetero.strategies.pipeline import HeteroPipelineStrategy

FOLDER = "traces"
"""beside metrics.jsonl"""


@dataclass
class _Capture:
    """A step that is being captured."""

    recorder: SpanRecorder
    profiler: profile | None
    unlisten: Callable[[], None]
    record: StepRecord | None = None
    parts: list[Span] | None = None


class TraceCapture(RankCallback):
    """Writes chrome traces of chosen steps: one per rank, and one of all with the planned step above the measured one.

    Under any strategy. In the folder ``traces`` beside ``metrics.jsonl``, by optimizer step and rank:

    - ``step_{n}.rank_{r}.json``: every operation, as ``torch.profiler`` has it;
    - ``step_{n}.json``: on top what the plan predicts (of a pipeline every action of its schedule, simulated), below it
      when each rank ran its actions or units and where its time went, then the ranks' operations; written by rank 0
      from the files that it sees.

    ``chrome://tracing`` and https://ui.perfetto.dev open both. Ranks meet before such a step, which is time 0. What it
    takes is longer than that of others: its line in ``metrics.jsonl`` says ``"traced": true``, and
    ``StragglerMonitor`` and the report leave it out. When a rank ran what goes to ``metrics.jsonl``, too, as
    ``timeline``, from which the report draws it.

    Args:
        steps: optimizer steps, counted from 1; the first ones of a run warm up.
        ranks: whose operations are profiled; default: all. Timelines are those of all ranks.
        record_shapes: note the shapes of operations' inputs.
        with_stack: note lines of source; the files grow.
        folder: where ``metrics.jsonl`` and ``traces`` are written; default: the logger's folder, or
            ``default_root_dir`` without one.

    Attributes:
        written: the files that this rank has written.

    Raises:
        HeteroError: listing every step or rank that is none.
    """

    def __init__(
        self,
        steps: int | Iterable[int] = (5,),
        ranks: int | Iterable[int] | None = None,
        *,
        record_shapes: bool = False,
        with_stack: bool = False,
        folder: str | os.PathLike[str] | None = None,
    ) -> None:
        super().__init__(folder=folder)
        problems: list[str] = []
        self.steps = _numbers("steps", steps, 1, problems)
        self.ranks = None if ranks is None else _numbers("ranks", ranks, 0, problems)
        raise_all(HeteroError, "TraceCapture cannot take these arguments", problems)
        self.record_shapes, self.with_stack = record_shapes, with_stack
        self.written: list[Path] = []
        self._units = WatchedUnits()
        self._capture: _Capture | None = None
        self._left: set[int] = set()
        self._folder: Path | None = None

    # -- a fit ---------------------------------------------------------------------------------------------------------

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Take part in a fit, before the model is wrapped."""
        super().setup(trainer, pl_module, stage)
        if stage == "fit":
            self._units.find(pl_module)

    def begin_fit(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        """Make the folder.

        Raises:
            HeteroError: for a rank that is not there, or a folder that cannot be written to.
        """
        world_size = trainer.world_size
        absent = sorted(rank for rank in self.ranks or () if rank >= world_size)
        if absent:
            raise HeteroError(
                f"TraceCapture(ranks=...) has {', '.join(map(str, absent))}, and the run has ranks 0 to "
                f"{world_size - 1}: give some of those"
            )
        self.written = []
        self._left = set(self.steps)
        if self.meter.folder is None:
            self.say_once("fast_dev_run writes nothing, and no trace")
            self._left = set()
            return
        self._folder = self.meter.folder / FOLDER
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise HeteroError(f"TraceCapture cannot write to {self._folder} ({error}): give another folder") from error

    def end_fit(self) -> None:
        """Drop a step that has not ended, and say which were asked for and never came."""
        capture, self._capture = self._capture, None
        if capture is not None:
            capture.unlisten()
            if capture.profiler is not None and capture.record is None:
                capture.profiler.stop()
        left, self._left = self._left, set()
        if left and self._meter is not None:
            steps = ", ".join(map(str, sorted(left)))
            self.say_once(f"no trace of step {steps}: the fit ended before; give steps that come")

    # -- a step --------------------------------------------------------------------------------------------------------

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Begin to capture with the first batch of a chosen step."""
        super().on_train_batch_start(trainer, pl_module, batch, batch_idx)
        if self._capture is None and trainer.global_step + 1 in self._left:
            self._left.discard(trainer.global_step + 1)
            self._begin(trainer, pl_module)

    def _begin(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        """Start the profiler and meet the others, which is no part of the step (a collective)."""
        timeline, device = self.meter.timeline, trainer.strategy.root_device
        timeline.pause()
        profiler = None
        if self.ranks is None or trainer.global_rank in self.ranks:
            activities = [ProfilerActivity.CPU]
            if device.type == "cuda":
                activities.append(ProfilerActivity.CUDA)
            profiler = profile(
                activities=activities, record_shapes=self.record_shapes, with_stack=self.with_stack, acc_events=True
            )
            profiler.start()
        recorder = SpanRecorder(device, _action_of(trainer))
        unlisten = self._units.listen(trainer, module, recorder)
        self._capture = _Capture(recorder, profiler, unlisten)
        timeline.keep_spans = True
        trainer.strategy.barrier("lightning_hetero: a step is traced")
        recorder.start()
        with record_function(MARK):
            pass
        self.meter.begin_batch(trainer)

    def add_values(self, trainer: pl.Trainer, record: StepRecord) -> None:
        """Stop the profiler when the step has ended."""
        capture = self._capture
        if capture is None or trainer.global_step < record.step:
            return
        self.meter.pause()  # what is written now is no step's
        for each in self.meter.participants:
            if isinstance(each, RankCallback) and each is not self:
                each.interrupt()
        self._units.close()
        capture.unlisten()
        capture.recorder.stop()
        if capture.profiler is not None:
            capture.profiler.stop()
        capture.record = record
        record.values["traced"] = True

    def step_is_complete(self, trainer: pl.Trainer, record: StepRecord) -> None:
        """Keep where the time went."""
        if self._capture is not None and self._capture.record is record:
            self._capture.parts = list(self.meter.timeline.spans)

    def step_is_over(self, trainer: pl.Trainer, step: int) -> None:
        """Write the traces (a collective)."""
        capture = self._capture
        if capture is None or capture.record is None:
            return
        self.meter.complete(trainer)
        self.meter.timeline.keep_spans = False
        self._capture = None
        assert self._folder is not None
        recorder = capture.recorder
        units = recorder.unit_spans(self._units.names)
        parts = capture.parts or []
        self.meter.write(
            TIMELINE,
            {
                "step": step,
                "parts": [[name, *_rounded(times)] for name, *times in parts],
                "units": [[name, phase, *_rounded(times)] for name, phase, *times in units],
                "actions": [[name, *_rounded(times)] for name, *times in recorder.actions],
            },
        )
        path = None if capture.profiler is None else self._export(trainer, capture.profiler, step)
        own = RankTimeline(self.meter.facts.device, parts, units, recorder.actions)
        if path is not None:
            own = replace(own, trace=str(path.resolve()), trace_bytes=path.stat().st_size)
        everyones: list[RankTimeline] = gather_objects(trainer, own)
        if trainer.is_global_zero:
            self._merge(trainer, everyones, step)
        trainer.strategy.barrier("lightning_hetero: traces are merged")

    # -- files ---------------------------------------------------------------------------------------------------------

    def _export(self, trainer: pl.Trainer, profiler: profile, step: int) -> Path | None:
        assert self._folder is not None
        path = self._folder / f"step_{step}.rank_{trainer.global_rank}.json"
        temporary = temporary_name(path)

        def write() -> None:
            try:
                profiler.export_chrome_trace(str(temporary))
                os.replace(temporary, path)
            finally:
                temporary.unlink(missing_ok=True)

        return path if self._wrote(path, write) else None

    def _merge(self, trainer: pl.Trainer, ranks: list[RankTimeline], step: int) -> None:
        assert self._folder is not None
        path = self._folder / f"step_{step}.json"
        trace, missing = merged_trace(ranks, planned_step_of(trainer), self.meter.facts.emulated)
        if self._wrote(path, lambda: write_whole(path, trace)):
            without = f" ({'; '.join(missing)})" if missing else ""
            self.say_once(f"step {step} is in {path}{without}: open it in https://ui.perfetto.dev or chrome://tracing")

    def _wrote(self, path: Path, write: Callable[[], None]) -> bool:
        """Write; a trace that cannot be written ends no training."""
        try:
            write()
        except (OSError, RuntimeError) as error:
            rank = self.meter.facts.rank
            print(f"TraceCapture: rank {rank} could not write {path} ({error}): see to the disk", flush=True)
            return False
        self.written.append(path)
        return True


def _action_of(trainer: pl.Trainer) -> Callable[[], str | None]:
    """What the stage of a pipeline runs at the moment."""
    strategy = trainer.strategy
    if not (isinstance(strategy, HeteroStrategy) and strategy.waits_for_messages):
        return lambda: None
    runtime = cast("HeteroPipelineStrategy", strategy).assembly.runtime
    return lambda: None if runtime is None or runtime.at is None else str(runtime.at)


def _rounded(times: Iterable[Any]) -> list[float]:
    """Seconds to a tenth of a microsecond, so that lines stay short."""
    return [round(float(each), 7) for each in times]


def _numbers(name: str, given: Any, least: int, problems: list[str]) -> tuple[int, ...]:
    """Whole numbers, one or several; what is none is noted."""
    values = [given] if isinstance(given, int) else list(given) if isinstance(given, Iterable) else None
    if not values or isinstance(given, str):
        problems.append(f"{name}={given!r}: give one whole number or several, {least} or more each")
        return ()
    for value in values:
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            problems.append(f"{name}: {value!r} is none: give whole numbers, {least} or more")
    return tuple(sorted({value for value in values if isinstance(value, int)}))
