"""What this package knows of Lightning's private parts, but for results and callbacks (checked with 2.5 to 2.6.6).

Each piece says which private name it touches and why nothing public will do.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

import lightning.pytorch as pl
from lightning.fabric.strategies.launchers.subprocess_script import _ChildProcessObserver
from lightning.fabric.utilities.distributed import (
    _init_dist_connection,
    _set_num_threads_if_needed,
    _sync_ddp_if_available,
)
from lightning.pytorch.overrides.distributed import _IndexBatchSamplerWrapper
from lightning.pytorch.plugins import Precision
from lightning.pytorch.strategies.launchers.subprocess_script import _SubprocessScriptLauncher
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn

from lightning_hetero.data import UnevenLoader, with_batch_sampler
from lightning_hetero.strategies.parent import launching

__all__ = [
    "SubprocessLauncher",
    "batches_to_skip",
    "checkpoint_to_come",
    "clip_norms_by",
    "drop_loader_states",
    "end_by_sigterm",
    "evaluation_loader",
    "forget_train_dataloader",
    "give_device_mesh",
    "init_process_group",
    "keep_users_samplers",
    "obey_sigterm",
    "on_sigterm",
    "reduce_over_ranks",
    "set_up_data",
    "track_indices",
    "train_loaders",
    "trainer_arguments",
    "use_strategy",
    "users_samplers_kept",
    "without_index_tracking",
]

_log = logging.getLogger("lightning.pytorch")  # where the user looks for what a Trainer says

init_process_group = _init_dist_connection
reduce_over_ranks = _sync_ddp_if_available


class _PatientObserver(_ChildProcessObserver):
    """Lets ranks end by themselves, with the message of the one that failed, before it kills what is left."""

    grace_s = 20.0
    _deadline_s: float | None = None

    def _run(self) -> bool:
        codes = [process.poll() for process in self._child_processes]
        if any(codes):
            if self._deadline_s is None:
                self._deadline_s = time.monotonic() + self.grace_s
            if time.monotonic() < self._deadline_s:
                return False
        return super()._run()


class SubprocessLauncher(_SubprocessScriptLauncher):
    """Lightning's launcher of local ranks, with a patient observer.

    Lightning's own, which ``launch`` starts by itself, kills every rank with SIGKILL within 5 s of one that has ended,
    before any of them could say which it was.
    """

    def launch(self, function: Callable[..., Any], *args: Any, trainer: Any = None, **kwargs: Any) -> Any:
        """Start the other ranks of this node, then call ``function``."""
        self.cluster_environment.validate_settings(num_devices=self.num_processes, num_nodes=self.num_nodes)
        if not self.cluster_environment.creates_processes_externally:
            with launching():
                self._call_children_scripts()
            _PatientObserver(main_pid=os.getpid(), child_processes=self.procs, sleep_period=1).start()
        _set_num_threads_if_needed(num_processes=self.num_processes)
        return function(*args, **kwargs)


def on_sigterm(trainer: pl.Trainer, note: Callable[[], None]) -> Callable[..., None]:
    """Have a SIGTERM noted and handed on to the ranks that this process launched, and nothing else, from now on.

    ``_SignalConnector._sigterm_notifier_fn`` is what the Trainer puts in the signal's place when it begins to run. From
    2.5.2 on it broadcasts from within the handler, on a process group that is in use.

    Returns:
        The handler, for a signal that was heard otherwise; only its first call does something.
    """
    noted, pid = False, os.getpid()

    def handle(signum: int = signal.SIGTERM, frame: FrameType | None = None) -> None:
        nonlocal noted
        if os.getpid() != pid:  # a forked process, such as a loader's worker, has the handler, too
            signal.signal(signum, signal.SIG_DFL)
            os.kill(os.getpid(), signum)
            return
        if noted:
            return
        noted = True
        note()
        launcher = trainer.strategy.launcher
        if launcher is not None:
            launcher.kill(signum)
        _log.info(f"[rank: {trainer.global_rank}] SIGTERM: all ranks end after the batch at hand")

    trainer._signal_connector._sigterm_notifier_fn = handle  # type: ignore[method-assign, assignment]
    return handle


def end_by_sigterm(trainer: pl.Trainer) -> None:
    """Have Lightning's loops raise SIGTERMException where they next look.

    ``Trainer.received_sigterm`` reads the signal connector's attribute and has no setter.
    """
    trainer._signal_connector.received_sigterm = True


def obey_sigterm(trainer: pl.Trainer) -> None:
    """Do what this process would do on a SIGTERM if no Trainer ran.

    The Trainer puts the handlers of before back after ``Strategy.teardown``; ``_SignalConnector.teardown`` does it now.
    """
    trainer._signal_connector.teardown()
    os.kill(os.getpid(), signal.SIGTERM)


def clip_norms_by(plugin: Precision, clip: Callable[[list[nn.Parameter], float], Tensor]) -> None:
    """Have gradients clipped by norm with ``clip(parameters, max_norm)``.

    Lightning asks the precision plugin and hands it neither strategy nor module; a subclass of every plugin would
    be the other way.
    """

    def clip_grad_by_norm(optimizer: Any, clip_val: float) -> None:
        if clip_val > 0:
            clip(list(plugin.main_params(optimizer)), clip_val)

    plugin.clip_grad_by_norm = clip_grad_by_norm  # type: ignore[method-assign]


def keep_users_samplers(trainer: pl.Trainer) -> None:
    """Stop Lightning from replacing samplers before ``Strategy.process_dataloader`` sees them (fact 14).

    The connector's ``use_distributed_sampler`` is read at that moment and has no setter on the Trainer.
    """
    connector = trainer._accelerator_connector
    if not hasattr(connector, "_hetero_users_choice"):
        connector._hetero_users_choice = connector.use_distributed_sampler  # type: ignore[attr-defined]
    connector.use_distributed_sampler = False


def users_samplers_kept(trainer: pl.Trainer) -> bool:
    """Whether the user passed ``Trainer(use_distributed_sampler=False)``: their loaders are to be left alone."""
    choice = getattr(trainer._accelerator_connector, "_hetero_users_choice", None)
    return choice is False


class _OwnIndices(_IndexBatchSamplerWrapper):
    """Notes no index where a rank only repeats another one's sample, so that nothing is written for it."""

    def __init__(self, batch_sampler: Any, has_samples: Callable[[int], bool]) -> None:
        super().__init__(batch_sampler)
        self.seen_batch_indices = []  # Lightning makes it when iterated, and not every rank of a pipeline reads
        self._has_samples = has_samples

    def __next__(self) -> list[int]:
        batch = super().__next__()
        if not self._has_samples(len(self.seen_batch_indices) - 1):
            self.seen_batch_indices[-1] = []
        return batch


def track_indices(loader: UnevenLoader) -> None:
    """Let Lightning's prediction loop read a loader's indices off its batch sampler; it asks for this very class."""
    loader.loader = with_batch_sampler(loader.loader, _OwnIndices(loader.uneven, loader.uneven.has_samples))


def without_index_tracking(loader: Any) -> Any:
    """Return the loader that Lightning wrapped for predicting as it was before; any other one as it is."""
    wrapper = getattr(loader, "batch_sampler", None)
    if not isinstance(wrapper, _IndexBatchSamplerWrapper):
        return loader
    return with_batch_sampler(loader, wrapper._batch_sampler)


def trainer_arguments() -> dict[str, Any]:
    """Return ``devices``, ``precision`` and ``sync_batchnorm`` as passed to the Trainer being built; else {}.

    The connector replaces ``devices="auto"`` on CPU by 1 and ``precision="16-mixed"`` by ``bf16-mixed`` before a
    strategy can look, so the arguments are read from its ``__init__``, which is on the stack when it calls
    ``Strategy._configure_launcher``.
    """
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        code = frame.f_code
        if code.co_name == "__init__" and code.co_filename.endswith("accelerator_connector.py"):
            return {name: frame.f_locals.get(name) for name in ("devices", "precision", "sync_batchnorm")}
        frame = frame.f_back
    return {}


def checkpoint_to_come(trainer: pl.Trainer) -> Any:
    """Return the path of the checkpoint that a Trainer at its set-up will load; None if there is none.

    ``Trainer.ckpt_path`` is None until the checkpoint is read, which is after the set-up where each rank loads its own
    part. Its path is an argument of ``Trainer._run``, which is on the stack when it calls ``Strategy.setup``.
    """
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code.co_name == "_run" and frame.f_locals.get("self") is trainer:
            return frame.f_locals.get("ckpt_path")
        frame = frame.f_back
    return trainer.ckpt_path


def train_loaders(trainer: pl.Trainer) -> int:
    """Return the number of training loaders that the fit loop combines; 0 before they are set up."""
    combined = trainer.fit_loop._combined_loader
    return 0 if combined is None else len(combined.flattened)


def batches_to_skip(trainer: pl.Trainer) -> int:
    """Return how many batches of the epoch a resumed fit has behind it; 0 for a fresh one or at an epoch's end.

    Lightning's own count. Its mechanism for stateful loaders is not used: it loads their states only if the loaders are
    set up after the restoration (``trainer.estimated_stepping_batches`` sets them up before), and refuses a checkpoint
    with a loader's state on one device, whose loader is a plain one.
    """
    loop = trainer.fit_loop
    if not loop.restarting:
        return 0
    done = loop.epoch_loop.batch_progress.current.ready
    return 0 if done >= trainer.num_training_batches else done


def drop_loader_states(checkpoint: dict[str, Any]) -> None:
    """Leave the loaders' states out of a checkpoint, in place, so that one device's plain loader can resume it."""
    fit_loop = checkpoint.get("loops", {}).get("fit_loop", {})
    fit_loop.get("state_dict", {}).pop("combined_loader", None)


def set_up_data(trainer: pl.Trainer) -> None:
    """Have the loop that is about to run ask for its loaders now; it would do so a little later, and only once.

    ``setup_data`` is the loops' own, and ``Trainer.estimated_stepping_batches`` calls the fit loop's likewise.
    """
    if trainer.state.fn == TrainerFn.FITTING:
        trainer.fit_loop.setup_data()
    else:
        _evaluation_loop(trainer).setup_data()


def evaluation_loader(trainer: pl.Trainer) -> Any:
    """Return the first loader of the evaluation that is about to run, as the user made it."""
    combined = _evaluation_loop(trainer)._combined_loader
    made = combined.flattened[0] if combined is not None and combined.flattened else ()
    return getattr(made, "loader", made)


def _evaluation_loop(trainer: pl.Trainer) -> Any:
    loops: dict[Any, Any] = {TrainerFn.VALIDATING: trainer.validate_loop, TrainerFn.TESTING: trainer.test_loop}
    return loops.get(trainer.state.fn, trainer.predict_loop)


def use_strategy(trainer: pl.Trainer, strategy: Any) -> None:
    """Let ``trainer`` go on with another strategy, which has taken over the first one's processes.

    ``Trainer.strategy`` reads the accelerator connector's attribute and has no setter.
    """
    trainer._accelerator_connector.strategy = strategy


def forget_train_dataloader(trainer: pl.Trainer) -> None:
    """Have Lightning set the training loader up again (a checkpoint brought another global batch size)."""
    trainer.fit_loop._combined_loader = None


def give_device_mesh(module: pl.LightningModule, mesh: Any) -> None:
    """Make ``LightningModule.device_mesh`` available in ``configure_model``, as ModelParallelStrategy does."""
    module._device_mesh = mesh
