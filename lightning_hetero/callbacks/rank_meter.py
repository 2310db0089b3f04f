"""What the callbacks of one run share: where a step's time goes, whose samples it had, and the file of all values.

Whichever of the callbacks are there, each step is measured once, and written as one line. The first of them in the
Trainer's order tells the meter what the trainer does; when the last one has added its values, the step is done.
"""

from __future__ import annotations

import time
import uuid
from collections import deque
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import lightning.pytorch as pl
from torch import nn

from lightning_hetero.callbacks.rank_values import gather_once
from lightning_hetero.callbacks.run_facts import Planned, RankFacts, emulation_of, planned_of
from lightning_hetero.callbacks.step_flops import StepWatch, pipeline_of, samples_in
from lightning_hetero.callbacks.step_record import Participant, StepRecord
from lightning_hetero.callbacks.timed_collectives import time_collectives
from lightning_hetero.callbacks.watched_units import WatchedUnits, is_sharded
from lightning_hetero.callbacks.whole_plan import whole_plan_of
from lightning_hetero.errors import HeteroError
from lightning_hetero.metrics import PLAN, RUN, SCHEMA, STEP, WHOLE_PLAN, RankFile, merge_rank_files
from lightning_hetero.profiler.model_flops import StepFlops
from lightning_hetero.profiler.step_timeline import (
    BLOCKED,
    INPUT,
    MESSAGES,
    OPTIMIZER,
    REST,
    StepTimeline,
)
from lightning_hetero.strategies import callback_adapter
from lightning_hetero.strategies.base import HeteroStrategy

_METERS: WeakKeyDictionary[pl.Trainer, RankMeter] = WeakKeyDictionary()


class RankMeter:
    """Measurements of this rank in one trainer; see :meth:`of`."""

    def __init__(self) -> None:
        self.participants: list[Participant] = []
        self.facts: RankFacts
        self.timeline: StepTimeline
        self.flops: StepFlops | None = None
        """of one sample of the model, all ranks of a pipeline together"""
        self.no_flops: str | None = None
        self.planned: Planned | None = None
        self.share = 1.0
        self.folder: Path | None = None
        self._file: RankFile | None = None
        self._units = WatchedUnits()
        self._watch: StepWatch | None = None
        self._undo: list[Callable[[], Any]] = []
        self._record: StepRecord | None = None
        self._waiting: deque[StepRecord] = deque()
        self._run: str | None = None
        self._first_part = REST
        self._in_batch = self._started = self._counted = self._interrupted = False
        self._hidden_before_s = 0.0
        self._done = -1
        self._noted_plan: Any = None

    @classmethod
    def of(cls, trainer: pl.Trainer) -> RankMeter:
        """The meter of a trainer, made when it is first asked for."""
        if trainer not in _METERS:
            _METERS[trainer] = cls()
        return _METERS[trainer]

    # -- a run ---------------------------------------------------------------------------------------------------------

    def join(self, callback: Participant, module: nn.Module) -> None:
        """Take part, before the model is wrapped.

        Raises:
            HeteroError: if another callback is given another folder, or other FLOPs.
        """
        if callback not in self.participants:
            self.participants.append(callback)
        for name in ("folder", "flops_per_sample"):
            self._given(name)
        if self.leads(callback):
            self._units.find(module)
            self._watch = StepWatch(module)

    def _given(self, name: str) -> Any:
        """What the callbacks were given under a name; None where none was."""
        given = {getattr(each, name) for each in self.participants} - {None}
        if len(given) > 1:
            those = " and ".join(map(str, sorted(given)))
            raise HeteroError(f"the callbacks of one Trainer share one {name}, and are given {those}: give one of them")
        return next(iter(given), None)

    def leads(self, callback: Participant) -> bool:
        """Whether a callback is the first one, which tells what the trainer does."""
        return bool(self.participants) and self.participants[0] is callback

    def ends(self, callback: Participant) -> bool:
        """Whether it is the last one, after which a step is done."""
        return bool(self.participants) and self.participants[-1] is callback

    def start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        """Begin to measure a fit, whose model is wrapped (a collective)."""
        self.stop()
        self.facts = RankFacts.of(trainer)
        distributed = trainer.world_size > 1
        messages = isinstance(trainer.strategy, HeteroStrategy) and trainer.strategy.waits_for_messages
        gathers = distributed and not messages and is_sharded(trainer, module)
        self._first_part = MESSAGES if messages else BLOCKED if gathers else REST
        self.timeline = StepTimeline(
            trainer.strategy.root_device,
            between=BLOCKED if gathers else REST,
            after_backward=BLOCKED if distributed and not messages else REST,
        )
        self._undo.append(self._units.listen(trainer, module, self.timeline))
        self._undo.append(
            callback_adapter.around_fetches(
                trainer, self._fetch_begins, self._fetch_ends, lambda: self.timeline.within(BLOCKED)
            )
        )
        for optimizer in trainer.optimizers:
            self._undo.append(optimizer.register_step_post_hook(self._optimizer_stepped).remove)
        self.flops, self.no_flops, self.share = None, None, 1.0
        self._record = None
        self._waiting.clear()
        self._in_batch = self._started = self._counted = self._interrupted = False
        self._hidden_before_s = self._hidden_s(trainer)
        self._done = trainer.global_step
        self.planned, self._noted_plan = planned_of(trainer), None
        self._open_file(trainer)
        self._write_first_line(trainer)
        if distributed:
            # last, since what was asked above is no step's
            self._undo.append(time_collectives(trainer.strategy, self.timeline))
        if self._watch is None:
            self._watch = StepWatch(module)
        self._watch.see_wrapped(module)

    def stop(self) -> None:
        """Take everything off the model, the trainer and the strategy; close the file as it is."""
        for undo in reversed(self._undo):
            undo()
        self._undo.clear()
        if self._watch is not None:
            self._watch.end()
        if self._file is not None:
            self._file.close()
            self._file = None

    def finish(self, trainer: pl.Trainer) -> None:
        """The fit has ended: write what is left, and merge the ranks' files (a collective)."""
        self.complete(trainer)
        self.write("end", {"step": trainer.global_step, "time": time.time()})
        self.stop()
        trainer.strategy.barrier("lightning_hetero metrics are written")
        if self.folder is not None and trainer.is_global_zero:
            merge_rank_files(self.folder)
        trainer.strategy.barrier("lightning_hetero metrics are merged")

    def leave(self) -> None:
        """Forget the callbacks: another run may have others."""
        self.stop()
        self.participants.clear()
        self._watch, self._units = None, WatchedUnits()  # which know the module, and so the trainer

    def write(self, kind: str, values: dict[str, Any]) -> None:
        """Write a line of one's own to this rank's file, where there is one."""
        if self._file is not None:
            self._file.write(kind, values)

    def _open_file(self, trainer: pl.Trainer) -> None:
        asked = self._given("folder")
        logged = trainer.log_dir  # a collective
        run = trainer.strategy.broadcast(uuid.uuid4().hex)
        self.folder = None
        if trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        self.folder = Path(asked if asked is not None else logged or trainer.default_root_dir)
        self._file = RankFile(self.folder, trainer.global_rank)
        self._run = run

    def _write_first_line(self, trainer: pl.Trainer) -> None:
        self.write(
            RUN,
            {
                "schema": SCHEMA,
                "run": self._run,
                **{name: value for name, value in asdict(self.facts).items() if name != "rank"},
                "callbacks": [type(each).__name__ for each in self.participants],
                "time": time.time(),
                "step": trainer.global_step,
                "plan": None if self.planned is None else asdict(self.planned),
            },
        )

    @property
    def record(self) -> StepRecord:
        """The step at hand."""
        assert self._record is not None
        return self._record

    # -- a step --------------------------------------------------------------------------------------------------------

    def begin_batch(self, trainer: pl.Trainer) -> None:
        """A training batch is on the device."""
        if not self._started:
            self._started = True
            if self._watch is not None and self._given("flops_per_sample") is None:
                self._watch.begin(trainer)
        self._note_plan(trainer)
        if self._record is None:
            self._record = StepRecord(trainer.global_step + 1, trainer.current_epoch)
        self._in_batch = True
        self.timeline.enter(self._first_part)

    def begin_backward(self) -> None:
        """The backward is about to begin."""
        self.timeline.enter(REST)

    def end_backward(self) -> None:
        """The backward has ended, gradients reduced."""
        self.timeline.end_backward()

    def begin_optimizer(self) -> None:
        """Gradients are there: clipping and the optimizer's step come."""
        self.timeline.enter(OPTIMIZER)

    def pause(self) -> None:
        """What comes is no step's: a validation, an epoch's end."""
        if not self.timeline.paused:
            self.timeline.pause()
            self._interrupted = self._started

    def end_batch(self, trainer: pl.Trainer, batch: Any) -> StepRecord:
        """The batch's step has run; returns its record, which is not complete yet."""
        self._in_batch = False
        record = self._record
        assert record is not None
        record.batches += 1
        record.samples += samples_in(trainer, batch) * self.share
        self._units.close()
        if self._stepped(trainer):
            total_s = self._hidden_s(trainer)
            record.hidden_s, self._hidden_before_s = total_s - self._hidden_before_s, total_s
            record.interrupted, self._interrupted = self._interrupted, False
            self.timeline.close_step()
        return record

    def end_step(self, trainer: pl.Trainer, batch: Any) -> None:
        """All callbacks have added their values: the step is done, unless batches accumulate."""
        record = self._record
        assert record is not None
        if not self._counted:
            self._counted = True
            self._count_flops(trainer, batch, record)
        if not self._stepped(trainer):
            return
        record.step, self._done = trainer.global_step, trainer.global_step
        self._record = None
        if self.flops is not None:
            record.flops = StepFlops(self.flops.model * record.samples, self.flops.recomputed * record.samples)
        self._waiting.append(record)
        self._drain(trainer, wait=0)
        for participant in self.participants:
            participant.step_is_over(trainer, record.step)

    def complete(self, trainer: pl.Trainer, behind: int = 0) -> None:
        """Wait until the device has run all steps but the last ``behind``."""
        self._drain(trainer, wait=max(0, self.timeline.closed_steps - behind))

    def _hidden_s(self, trainer: pl.Trainer) -> float:
        """Seconds so far that an emulated queue's units ran while their host was elsewhere."""
        emulation = emulation_of(trainer)
        return 0.0 if emulation is None else emulation.hidden_total_s

    def _stepped(self, trainer: pl.Trainer) -> bool:
        return trainer.global_step != self._done

    def _drain(self, trainer: pl.Trainer, wait: int) -> None:
        for parts in self.timeline.take_steps(wait=wait):
            record = self._waiting.popleft()
            record.parts = parts.with_hidden(record.hidden_s)
            for participant in self.participants:
                participant.step_is_complete(trainer, record)
            self.write(STEP, record.line())

    def _note_plan(self, trainer: pl.Trainer) -> None:
        planned = planned_of(trainer)
        if planned != self.planned:
            self.write(PLAN, {"step": trainer.global_step, "plan": None if planned is None else asdict(planned)})
        self.planned = planned
        plan = getattr(trainer.strategy, "plan", None)
        if plan is not self._noted_plan and trainer.is_global_zero:
            self.write(WHOLE_PLAN, {"step": trainer.global_step, **whole_plan_of(trainer)})
        self._noted_plan = plan

    # -- FLOPs ---------------------------------------------------------------------------------------------------------

    def _count_flops(self, trainer: pl.Trainer, batch: Any, record: StepRecord) -> None:
        """Count what the first batch's step was, on meta, while no step is timed (a collective)."""
        assert self._watch is not None
        self.timeline.pause()
        given = self._given("flops_per_sample")
        found = StepFlops(given) if given is not None else self._watch.count(trainer, batch)
        if isinstance(found, str):
            self.no_flops = found
        else:
            self.flops = found
        if pipeline_of(trainer) >= 0:
            self._share_samples(trainer, given, has_samples=record.samples > 0)
        record.samples *= self.share
        values = {"step": trainer.global_step, "share_of_a_sample": self.share, "no_flops": self.no_flops}
        if self.flops is not None:
            values |= {"flops_per_sample": self.flops.model, "recomputed_flops_per_sample": self.flops.recomputed}
        self.write("model", values)
        self.timeline.enter(REST)

    def _share_samples(self, trainer: pl.Trainer, given: float | None, *, has_samples: bool) -> None:
        """Find what a rank of a pipeline computes of each sample: by FLOPs, or alike where they are not known.

        A rank without a stage has no samples, and goes along with the first pipeline.
        """
        own = self.flops
        pipeline = float(pipeline_of(trainer))
        known = own is not None and given is None
        rows = gather_once(trainer, [pipeline, own.model if own is not None and known else None, float(has_samples)])
        models = [row[1] for row in rows if row[0] == pipeline]
        total = sum(models)  # not a number where one could not count
        if own is not None and known and total > 0:
            self.share = own.model / total
            self.flops = StepFlops(total, own.recomputed / self.share if self.share else 0.0)
            return
        self.share = has_samples / max(1.0, sum(row[2] for row in rows if row[0] == pipeline))
        if given is None:
            self.flops = None
            self.no_flops = self.no_flops or "another rank of the pipeline could not count its own"

    # -- fetches and the optimizer -------------------------------------------------------------------------------------

    def _fetch_begins(self) -> None:
        if self._in_batch:
            self.timeline.push(INPUT)
        else:
            self.timeline.enter(INPUT)

    def _fetch_ends(self) -> None:
        if self._in_batch:
            self.timeline.pop()

    def _optimizer_stepped(self, *_: Any) -> None:
        if self._in_batch and not self.timeline.paused:
            self.timeline.enter(REST)
