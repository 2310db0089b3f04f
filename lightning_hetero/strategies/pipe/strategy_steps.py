"""The steps of hetero_pipe: what Lightning calls from the first batch to the table at the end."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn
from torch.optim import Optimizer
from torchmetrics import Metric

from lightning_hetero.collate import MicroBatches
from lightning_hetero.data import default_seed
from lightning_hetero.errors import UnsupportedError, raise_all
from lightning_hetero.plan import even_parts
from lightning_hetero.strategies import torch_adapter
from lightning_hetero.strategies.loss_weight import LossWeight
from lightning_hetero.strategies.pipe.evaluation import PipeEvaluation
from lightning_hetero.strategies.pipe.gradients import Release
from lightning_hetero.strategies.pipe.logs import StepLog, join_logs, values_are_everyones
from lightning_hetero.strategies.pipe.nested import shapes_of
from lightning_hetero.strategies.pipe.placement import Placement
from lightning_hetero.strategies.pipe.randomness import Draws
from lightning_hetero.strategies.pipe.roles import ALONE, Roles
from lightning_hetero.strategies.pipe.steps import StepResult, TrainingWork, join_outputs
from lightning_hetero.strategies.pipe.summary import PipeSummary, print_pipe_summary
from lightning_hetero.strategies.scaler import scale_loss
from lightning_hetero.strategies.untouched import same_random_states, untouched

if TYPE_CHECKING:
    from lightning.pytorch import Trainer


_TRANSFER_HOOKS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")

_BY_ITSELF = (
    "a rank of a pipeline has its own stages' parameters alone. Use an optimizer that takes each parameter by itself, "
    "such as AdamW"
)


class PipeSteps(PipeEvaluation):
    """What runs; set-up and planning are the subclass's."""

    waits_for_messages = True
    loss_weight: LossWeight | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._batch_samples = self._pipeline_samples = 0
        self._has_run = False
        self.summaries: list[PipeSummary] = []

    def pipeline_index(self) -> int:
        """Index of this rank's pipeline."""
        return self.assembly.pipeline

    def sizes_of_pipelines(self, own: int) -> tuple[int, ...]:
        """Every pipeline's number, of which each rank knows its own (a collective)."""
        numbers = self.gather_numbers(own)
        return tuple(numbers[pipeline.rank_of(0)] for pipeline in self.assembly.plan.pipelines)

    def precision_name(self) -> str:
        """The precision in its long form."""
        return self._precision_name({})

    def _roles_and_log(self, module: Any, placement: Placement) -> None:
        self._roles = Roles(module, placement.model, placement.prefix)
        self._log = StepLog(module, placement.prefix)
        names = {child: name for name, child in module.named_modules()}
        norms = [names[child] for child in torch_adapter.batch_norms(module)]
        if norms and self._trainer.state.fn == TrainerFn.FITTING:
            shown = ", ".join(norms[:3]) + (", ..." if len(norms) > 3 else "")
            rank_zero_warn(
                f"BatchNorm in training mode ({shown}) normalises over each micro-batch, so that "
                "results depend on its size, which is not so on one device: freeze it (eval mode), or use LayerNorm or "
                "GroupNorm"
            )

    def _join_metrics(self, module: nn.Module) -> None:
        """Have torchmetrics objects come together over the pipelines' last stages: the other ranks see no sample."""
        if self.world_size == 1:
            return
        last = self.assembly.last_ranks()

        def gather(state: Tensor, group: Any = None) -> list[Tensor]:
            if self._is_alone:
                raise UnsupportedError(ALONE)
            everyones = self.gather_objects(state.cpu() if self.global_rank in last else None)
            return [everyones[rank].to(state.device) for rank in last]

        for child in module.modules():
            if isinstance(child, Metric):
                child.dist_sync_fn = gather
                child.dist_sync_on_step = False  # a step runs on the last stages alone, and its value is joined there

    def _where(self) -> str:
        where = super()._where()
        runtime = self._assembly.runtime if self._assembly is not None else None
        if runtime is None or runtime.at is None:
            return where
        at = runtime.at
        kind = {"F": "forward", "B": "backward", "I": "backward of inputs", "W": "backward of weights"}[at.kind]
        return f"{where}, stage {at.stage}, {kind} of micro-batch {at.micro_batch} (action {at})"

    # -- training ------------------------------------------------------------------------------------------------------

    def begin_batch(self, training: bool, batch: Any = None) -> None:
        """Note how many samples the batch that starts now has in each pipeline."""
        if training:
            sizes = self.loaders.train_sizes[0]
            self._batch_samples = sum(sizes)
            self._pipeline_samples = sizes[self.assembly.pipeline] if self.assembly.takes_part else 0
        else:
            super().begin_batch(training, batch)

    def batch_samples(self) -> int:
        """Samples of the training batch at hand, over all pipelines."""
        return self._batch_samples

    def rank_samples(self) -> int:
        """Samples of the training batch at hand that pass through this rank: its pipeline's; 0 where it is idle."""
        return self._pipeline_samples

    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        """Move a batch as the user's hooks say; in training only where inputs or targets are needed."""
        if not isinstance(batch, MicroBatches):
            return super().batch_to_device(batch, device, dataloader_idx)
        if not (self.assembly.is_first or self.assembly.is_last):
            return batch
        owners: tuple[Any, ...] = (self.lightning_module, getattr(self._trainer, "datamodule", None))
        if not any(owner is not None and is_overridden(hook, owner) for hook in _TRANSFER_HOOKS for owner in owners):
            return MicroBatches(super(PipeSteps, self).batch_to_device(each, device, dataloader_idx) for each in batch)
        draws = self._training_draws(len(batch), ahead=1)  # Lightning has not counted it yet
        moved = MicroBatches()
        with same_random_states():
            for each, own in zip(batch, draws, strict=True):
                own.begin_transfer()  # what augments there draws the same on both ends
                moved.append(super().batch_to_device(each, device, dataloader_idx))
        return moved

    def setup_optimizers(self, trainer: Trainer) -> None:
        """Make the optimizers, and refuse those that a stage cannot run on its own parameters."""
        try:
            super().setup_optimizers(trainer)
        except RuntimeError as error:
            if "multiple optimizers" not in str(error):
                raise
            # Lightning's own advice is manual optimization
            raise UnsupportedError(
                "configure_optimizers returned several optimizers, which needs manual optimization, and hetero_pipe "
                "cannot run that: use one optimizer with parameter groups, or hetero_fsdp"
            ) from error
        if any(isinstance(optimizer, torch.optim.LBFGS) for optimizer in self.optimizers):
            raise UnsupportedError(
                f"LBFGS works on all parameters as one vector and runs the step again and again: {_BY_ITSELF}"
            )

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Note what the step before took."""
        busy_s = self.instruments.take_busy_s()
        self._recorder.begin_step(busy_s, comparable=self._full_steps[0] and batch_idx > 0)
        self.instruments.at_step(self._trainer.global_step)
        self._batch, self._has_run = batch, False

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the pipeline's schedule; return the loss of the global batch, whose backward hands out the gradients."""
        batches = self._batch if isinstance(self._batch, MicroBatches) else MicroBatches([self._batch])
        if self._has_run:
            raise UnsupportedError(
                f"the optimizer runs its closure more than once a step, as SAM and line searches do: {_BY_ITSELF}"
            )
        self._has_run = True
        sizes = self.loaders.train_sizes.popleft()
        self._full_steps = (self._full_steps[1], sum(sizes) == self.global_batch_size)
        # a collective, for ranks that stay idle as well
        weights = self._weights(batches, sizes)
        with same_random_states():
            told = self._tell(lambda: self._run_training(batches, weights, sizes, args[1:], kwargs))
        self.loaders.read_ahead()
        self._refuse_both_sides()
        concluded = self._conclude(told, sizes)
        self.assembly.reader.go_on()
        return concluded

    def _tell(self, run: Callable[[], StepResult | None]) -> list[StepResult]:
        """Run, and return every pipeline's result on every rank; a last rank that is done early waits for nobody."""
        if len(self.assembly.plan.pipelines) > 1:
            everyones = self.gather_objects(run())
            return [everyones[rank] for rank in self.assembly.last_ranks()]
        hand = self.assembly.last_hand
        asked = None if hand.alone or hand.gives else hand.ask()
        result = run()
        if asked is not None:
            return [pickle.loads(asked.take())]
        assert result is not None
        if not hand.alone:
            hand.hand_on(pickle.dumps(result))
        return [result]

    def _run_training(
        self,
        batches: MicroBatches,
        weights: list[float],
        sizes: tuple[int, ...],
        rest: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> StepResult | None:
        assembly = self.assembly
        gradients = assembly.gradients
        gradients.begin(keep=self._accumulated or self._hooks_keep_gradients())
        if assembly.runtime is None:
            gradients.take(summed=not self._sums_late())
            return None
        module = self.lightning_module
        assert module is not None
        wanted = assembly.plan.runnable(assembly.pipeline, len(batches))
        real = len(batches)
        batches = MicroBatches([*batches, *([batches[0]] * (wanted - real))])
        filling = [0] * (wanted - real)
        self._log.begin_step()

        def step(batch: Any) -> Any:
            with self.precision_plugin.train_step_context(), self._alone():
                return module.training_step(batch, *rest, **kwargs)

        step.__name__ = "training_step"
        work = TrainingWork(
            step,
            assembly.placement.chain,
            self._roles,
            self._log,
            [*weights, *filling],
            [*self._samples_of(batches[:real], sizes), *filling],
            self._capturing,
            self._scaled,
            self._stage_is_done,
            self._training_draws(wanted),
            batches,
            self.instruments,
            self.precision_plugin.forward_context,
        )
        # what is frozen says which values want a gradient; every rank knows it, of its own parameters and of others'
        trained = hash(tuple(parameter.requires_grad for parameter in module.parameters()))
        shapes = [("training", trained, shapes_of(batch)) for batch in batches]
        schedule = assembly.schedule(wanted, training=True)
        try:
            assembly.runtime.run(schedule, work, shapes)
        except BaseException:
            gradients.drop()
            raise
        gradients.take(summed=not self._sums_late())
        return work.result() if assembly.is_last else None

    def _weights(self, batches: MicroBatches, sizes: tuple[int, ...]) -> list[float]:
        """What each micro-batch of this pipeline counts for in the global batch."""
        samples = self._samples_of(batches, sizes)
        if self.loss_weight is None:
            return [size / sum(sizes) for size in samples]
        takes_part = self.assembly.takes_part
        parts = [(batch, takes_part and size > 0) for batch, size in zip(batches, samples, strict=True)]
        items = [self.loss_weight.of(batch, self._trainer.global_step) if real else 0.0 for batch, real in parts]
        totals = self.gather_vector([sum(items)])
        total = sum(totals[pipeline.rank_of(0)][0] for pipeline in self.assembly.plan.pipelines)
        return [item / total if total else 0.0 for item in items]

    def _samples_of(self, batches: Sequence[Any], sizes: tuple[int, ...]) -> tuple[int, ...]:
        own = sizes[self.assembly.pipeline]
        return even_parts(own, len(batches)) if own else (0,) * len(batches)

    @contextmanager
    def _capturing(self) -> Iterator[None]:
        """Where the first stage is the last one too, the step up to the model runs twice, and changes things once."""
        module = self.lightning_module
        assert module is not None
        with untouched(module, freeze_norms=False) if self.assembly.is_last else nullcontext():
            yield

    def _training_draws(self, micro_batches: int, ahead: int = 0) -> list[Draws]:
        before = self.assembly.plan.micro_batches_before(self.assembly.pipeline)
        step = self._trainer.fit_loop.total_batch_idx + ahead
        return [Draws(default_seed(), step, before + k) for k in range(micro_batches)]

    def _stage_is_done(self, stage: int) -> None:
        if not self._sums_late():
            self.assembly.gradients.stage_is_done(stage)

    def _sums_late(self) -> bool:
        """Whether gradients stay this rank's own for now, since more batches accumulate."""
        return self._trainer.accumulate_grad_batches > 1 and not self._hooks_keep_gradients()

    def _scaled(self, loss: Tensor) -> Tensor:
        """Scale a loss for fp16, inside the schedule."""
        return scale_loss(self.precision_plugin, loss)

    def _conclude(self, parts: list[StepResult], sizes: tuple[int, ...]) -> Any:
        """Log for this rank what all pipelines logged; return the step's output."""
        assembly = self.assembly
        own = parts[assembly.pipeline]
        if not assembly.is_last:
            self._log.take_metric_states(own.metrics)
        if self.global_rank != assembly.last_ranks()[0]:
            self._log.take_buffers(parts[0].buffers)
        with values_are_everyones(self):
            self._log.log_all(join_logs([part.logged for part in parts]), self.root_device)
        value = torch.tensor(sum(part.loss for part in parts), device=self.root_device, dtype=own.dtype)
        handle = torch.zeros((), device=self.root_device, requires_grad=True)
        loss = Release.apply(handle, value, self._release)
        extras = [(part.extras, size) for part, size in zip(parts, sizes, strict=True) if part.extras is not None]
        if not extras:
            return loss
        return {**move_data_to_device(join_outputs(extras), self.root_device), "loss": loss}

    def _refuse_both_sides(self) -> None:
        """After sums over owners: a parameter that has a gradient on both ends of a pipeline is used on both."""
        pipelines = self.assembly.plan.pipelines
        ends = [(each.rank_of(0), each.rank_of(len(each.stages) - 1)) for each in pipelines]
        where = "; ".join(f"pipeline {i}: ranks {first} and {last}" for i, (first, last) in enumerate(ends))
        found = self.assembly.gradients.ranks_with_gradient
        raise_all(
            UnsupportedError,
            "parameters outside the split model are used both before and after it, which a pipeline cannot run: use "
            "two parameters, or move what uses them into the model",
            [
                f"{name} ({where})"
                for name in sorted(self.assembly.placement.outside)
                if found.get(name, 0) > len(pipelines)
            ],
        )

    def _release(self, incoming: Tensor) -> None:
        scaler = getattr(self.precision_plugin, "scaler", None)
        factor = float(incoming) / (1.0 if scaler is None else scaler.get_scale())
        sum_now = self._sums_late() and not self._accumulates
        self.assembly.gradients.release(factor, sum_now=sum_now)
        if sum_now:
            self._refuse_both_sides()
        self._accumulated = self._accumulates

    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        """Run the closure (the schedule), and count what the optimizer's step itself makes."""
        with ExitStack() as stack:

            def closure_then_counted() -> Any:
                result = closure()
                stack.enter_context(self.instruments.step(None, samples=1))
                return result

            result = super().optimizer_step(optimizer, closure_then_counted, model, **kwargs)
        self.assembly.reader.go_on()
        return result

    # -- the end -------------------------------------------------------------------------------------------------------

    def on_train_end(self) -> None:
        """Say what each rank did."""
        super().on_train_end()
        assembly = self.assembly
        assembly.reader.end()
        stages = assembly.own.stages_of(self.global_rank) if assembly.takes_part else ()
        own = PipeSummary(
            **self._measured(),
            pipeline=assembly.pipeline if assembly.takes_part else None,
            units=tuple(assembly.own.stages[stage].units for stage in stages),
        )
        self._batch = None
        self.summaries = self.gather_objects(own)
        if self._summary and self.is_global_zero:
            print_pipe_summary(self.summaries, assembly.plan)
