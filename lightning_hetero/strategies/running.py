"""What hetero_fsdp and hetero_pipe do alike from set-up to the end of a fit; hetero_auto only chooses."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning.pytorch.utilities.model_helpers import is_overridden

from lightning_hetero.callbacks.emulated_devices import EmulatedDevices
from lightning_hetero.cluster import Cluster
from lightning_hetero.costs import ModelCosts
from lightning_hetero.errors import UnsupportedError
from lightning_hetero.models.units import Unit
from lightning_hetero.plan import PipelinePlan, ShardPlan
from lightning_hetero.strategies import lightning_adapter
from lightning_hetero.strategies.base import HeteroStrategy
from lightning_hetero.strategies.checkpoint_hooks import CheckpointHooks
from lightning_hetero.strategies.ears import Ears
from lightning_hetero.strategies.instruments import Instruments
from lightning_hetero.strategies.stopping import StopAgreement
from lightning_hetero.strategies.summary import StepRecorder
from lightning_hetero.strategies.termination import Termination

if TYPE_CHECKING:
    from lightning_hetero.strategies.loaders import Loaders
    from lightning_hetero.strategies.pipe.loaders import PipeLoaders


class RunningStrategy(CheckpointHooks, HeteroStrategy):
    """Base of the strategies that run a model by a plan."""

    strategy_name: str
    plan: ShardPlan | PipelinePlan | None
    costs: ModelCosts | None
    loaders: Loaders | PipeLoaders
    instruments: Instruments
    _given_plan: ShardPlan | PipelinePlan | None
    _recorder: StepRecorder
    _summary: bool

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._batch: Any = None
        self._full_steps = (False, False)  # whether the step before and the one at hand have a whole global batch
        self._accumulates = False  # whether the backward at hand leaves its gradients for later ones
        self._accumulated = False  # whether the last one did
        self._stops: StopAgreement | None = None
        self._termination: Termination | None = None
        self._ears: Ears | None = None

    @property
    def _trainer(self) -> pl.Trainer:
        assert self.lightning_module is not None
        return self.lightning_module.trainer

    @property
    def plan_is_given(self) -> bool:
        """Whether the user gave the plan."""
        return self._given_plan is not None

    @property
    def global_batch_size(self) -> int | None:
        """Samples per training step over all ranks; None before the training loader is known."""
        return self.loaders.global_batch_size

    def process_dataloader(self, dataloader: object) -> object:
        """Replace the user's loader by one that reads what this rank, or its pipeline, takes of each batch."""
        return self.loaders.process(dataloader)

    # -- set-up --------------------------------------------------------------------------------------------------------

    def environment_is_there(self) -> None:
        """Agree with the other ranks on when to stop, from now on."""
        self._stops = self._stop_agreement()
        self._termination = self._heed_sigterm()

    def _heed_sigterm(self) -> Termination | None:
        if self._watch is None or self.world_size == 1:
            return None  # Lightning's own handler does
        termination = Termination(
            self._watch.store,
            self.global_rank,
            self.world_size,
            give_up=self._end_at_once,
            failed=self._watch.first_failure,
        )
        handle = lightning_adapter.on_sigterm(self._trainer, termination.ask)
        ears = self._ears = Ears(signal.SIGTERM)

        def look() -> None:
            if ears.heard():
                handle()
            termination.look()

        self._watch.beside = look
        return termination

    def leave_environment(self) -> None:
        """Leave signals and the watch over the other ranks to a strategy that takes over."""
        self._watch = None
        self._heed_no_more()

    def _heed_no_more(self) -> Termination | None:
        termination, self._termination = self._termination, None
        if self._ears is not None:
            self._ears.close()
            self._ears = None
        return termination

    def _end_at_once(self, why: str) -> None:
        print(f"[rank {self.global_rank}] {why}", file=sys.stderr, flush=True)
        os._exit(128 + signal.SIGTERM)

    def _stop_agreement(self) -> StopAgreement | None:
        if self._watch is None or self.world_size == 1:
            return None
        # before the others, who wait in a collective, give up
        timeout_s = self._timeout.total_seconds() / 2
        return StopAgreement(self._watch.store, self.global_rank, self.world_size, timeout_s, self._watch.first_failure)

    def _know_cluster(self) -> Cluster:
        """The cluster that was given, else what the ranks discover (a collective).

        Raises:
            UnsupportedError: if its devices are emulated, and a callback emulates them as well.
        """
        if self.cluster is None:
            self.cluster = self.broadcast(Cluster.discover())
        assert self.cluster is not None
        trainer: Any = self._trainer  # its callbacks are not typed
        if self.cluster.emulate and any(isinstance(callback, EmulatedDevices) for callback in trainer.callbacks):
            raise UnsupportedError(
                f"cluster {self.cluster.name!r} is emulated by the strategy already: leave the EmulatedDevices "
                "callback out, or the devices would be slowed twice"
            )
        return self.cluster

    def _put_up_instruments(
        self, module: pl.LightningModule, units: Sequence[Unit], recomputed: Collection[str], halves: bool = False
    ) -> None:
        """Measure the units, and emulate this rank's device where the cluster says so."""
        assert self.cluster is not None
        self.instruments = Instruments(
            module,
            units,
            self.root_device,
            self.global_rank,
            emulated=self.cluster.devices[self.global_rank] if self.cluster.emulate else None,
            costs=self.costs,
            recomputed=recomputed,
            halves=halves,
        )

    def _evaluate_without_inference_mode(self, trainer: pl.Trainer) -> None:
        """What it makes cannot take part in a later training step, and FSDP2's modules crash in one (fact 5)."""
        for loop in (trainer.validate_loop, trainer.test_loop, trainer.predict_loop):
            loop.inference_mode = False

    # -- in steps ------------------------------------------------------------------------------------------------------

    def _check_single_loader(self) -> None:
        """Refuse several training loaders: which one's samples would weigh the loss?"""
        loaders = lightning_adapter.train_loaders(self._trainer)
        if loaders > 1:
            raise UnsupportedError(
                f"{self.strategy_name} trains from one DataLoader, got {loaders}: put the datasets together "
                "(torch.utils.data.StackDataset or ConcatDataset)"
            )

    def _begin_to_count(self) -> None:
        self._recorder = StepRecorder()
        self.instruments.take_busy_s()
        self.instruments.take_peak_bytes()

    def _hooks_keep_gradients(self) -> bool:
        """Whether gradients that are there when a step begins may still be wanted, since a hook zeroes them."""
        module = self.lightning_module
        return any(is_overridden(hook, module) for hook in ("optimizer_zero_grad", "on_before_zero_grad"))

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Lightning enters it where gradients accumulate: they are not complete before the last batch."""
        self._accumulates = True
        try:
            yield
        finally:
            self._accumulates = False

    def end_batch(self, training: bool) -> None:
        """Note that the batch at hand has ended, with all of its hooks."""
        if training and self._stops is not None:
            self._stops.look(self._trainer, "batch")
        if self._termination is not None and self._termination.end_batch():
            lightning_adapter.end_by_sigterm(self._trainer)

    def begin_predict_batch(self) -> None:
        """Note that the batch before has ended; predicting logs nothing, by which the other loops' ends are known.

        Raises:
            SIGTERMException: on all ranks, where one got a SIGTERM. Lightning's predicting does not look for it.
        """
        if self._termination is not None and self._termination.end_batch():
            raise SIGTERMException

    def on_validation_start(self) -> None:
        """The time until the next training step is not a step's."""
        if self._trainer.state.fn == TrainerFn.FITTING and not self._trainer.sanity_checking:
            self._recorder.pause()

    def on_validation_end(self) -> None:
        """In mid-fit, stop together or not at all."""
        if self._stops is not None and self._trainer.state.fn == TrainerFn.FITTING:
            self._stops.look(self._trainer, "validation after batch")

    # -- the end -------------------------------------------------------------------------------------------------------

    def on_train_end(self) -> None:
        """End together, or say who does not."""
        if self._stops is not None:
            self._stops.look_at_end(self._trainer)

    def on_exception(self, exception: BaseException) -> None:
        """End together, with the message of the rank that failed, if it was no SIGTERM that ends the run."""
        termination = self._heed_no_more()
        if isinstance(exception, SIGTERMException) and termination is not None and termination.is_due:
            return  # the others end, too, and need not be told; teardown follows
        super().on_exception(exception)

    def _measured(self) -> dict[str, Any]:
        """What this rank measured, as :class:`~lightning_hetero.strategies.rank_table.MeasuredRank` holds it."""
        assert self.plan is not None
        step_s, busy_s = self._recorder.medians()
        return {
            "rank": self.global_rank,
            "device": self.plan.device_types[self.global_rank],
            "steps": max(0, len(self._recorder.step_s) - 1),
            "step_s": step_s,
            "busy_s": busy_s,
            "peak_bytes": self.instruments.take_peak_bytes(),
            "emulation": self.instruments.report(),
        }

    def teardown(self) -> None:
        """Take our hooks off the module."""
        if hasattr(self, "instruments"):
            self.instruments.close()
        super().teardown()
        termination = self._heed_no_more()
        if termination is not None and termination.is_asked and not termination.is_due:
            # it came when no batch was to end any more; whoever sent it does not want the rest of the program
            lightning_adapter.obey_sigterm(self._trainer)
