"""The steps of hetero_fsdp: what a rank's samples count for, forward, backward, logging, and the table at the end."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_hetero.collate import MicroBatches
from lightning_hetero.plan import ShardPlan
from lightning_hetero.strategies import torch_adapter
from lightning_hetero.strategies.companions import Companions
from lightning_hetero.strategies.gradients import GradientReduction
from lightning_hetero.strategies.loaders import Loaders
from lightning_hetero.strategies.loss_check import cut
from lightning_hetero.strategies.loss_weight import BatchWeights, LossWeight, parts_of, scaled
from lightning_hetero.strategies.manual import ManualSteps
from lightning_hetero.strategies.micro_batches import MicroBatchSteps
from lightning_hetero.strategies.rebalance import Rebalancer
from lightning_hetero.strategies.running import RunningStrategy
from lightning_hetero.strategies.scaler import scale_loss
from lightning_hetero.strategies.summary import RankSummary, print_summary
from lightning_hetero.strategies.untouched import untouched


class FSDPSteps(RunningStrategy):
    """What Lightning calls from the first batch of a fit to its end; set-up and planning are the subclass's."""

    plan: ShardPlan | None
    gradients: GradientReduction
    rebalancer: Rebalancer
    loss_weight: LossWeight | None
    companions: Companions
    summaries: list[RankSummary]
    flops_per_sample: float | None
    loaders: Loaders
    _given_plan: ShardPlan | None
    _micro_batches: MicroBatchSteps
    _manual: ManualSteps

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._sizes: tuple[int, ...] | None = None
        self._weights: BatchWeights | None = None

    def step_samples(self) -> int:
        """Return this rank's samples in the current step; 0 where it takes part without any."""
        if self._sizes is None:
            return 1
        return self._micro_batches.samples(self._sizes[self.global_rank])

    def rank_samples(self) -> int:
        """Return this rank's samples of the training batch at hand, over all of its micro-batches."""
        return 1 if self._sizes is None else self._sizes[self.global_rank]

    def micro_batches_per_step(self) -> int:
        """Return into how many micro-batches this rank's group cuts a step."""
        return 1 if self.plan is None else self.plan.micro_batches_of(self.plan.group_of(self.global_rank))

    def most_micro_batches(self) -> int:
        """Return the most micro-batches that any group cuts a step into."""
        return 1 if self.plan is None else max(self.plan.micro_batches, default=1)

    def micro_batch(self) -> tuple[int, int]:
        """Return which micro-batch of the step is at hand, and how many there are."""
        return self._micro_batches.index, self._micro_batches.count

    def batch_weights(self) -> BatchWeights | None:
        """Return what each rank's part of the batch at hand counts for; None where that is its samples."""
        return self._weights

    def step_items(self) -> float:
        """Return what this rank's batch or micro-batch at hand counts for, where there are :meth:`batch_weights`."""
        assert self._weights is not None
        return self._weights.parts[self._micro_batches.index] if self._micro_batches.count > 1 else self._weights.own

    def _weigh(self, batch: Any) -> BatchWeights | None:
        if self.loss_weight is None or self._sizes is None or batch is None:
            return None
        parts = parts_of(batch, self._sizes[self.global_rank])
        return self.loss_weight.of_ranks(parts, self._trainer.global_step, self.gather_vector)

    def begin_batch(self, training: bool, batch: Any = None) -> None:
        """Note what the batch that starts now counts for on all ranks."""
        if not training:
            # they stay after the step: hooks at the batch's end log, too
            self._sizes = self.loaders.next_eval_sizes()
            self._weights = self._weigh(batch)
            return
        self._micro_batches.forget()
        self._sizes = self.loaders.next_train_sizes()
        self._full_steps = (self._full_steps[1], sum(self._sizes) == self.loaders.global_batch_size)
        self._weights = self._weigh(batch)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Note what the step before took, and move shares where that asks for it."""
        busy_s = self.instruments.take_busy_s()
        counted = self._recorder.begin_step(busy_s, comparable=self._full_steps[0] and batch_idx > 0)
        if self.rebalancer.begin_batch(busy_s, counted=counted):
            self._recorder.forget()
        self.instruments.at_step(self._trainer.global_step)
        self._batch = batch

    def mean_of_losses(self, loss: Tensor) -> Tensor:
        """Return the loss of the global batch, from this rank's (a collective)."""
        return self.sum_over_ranks(scaled(loss.detach(), self._loss_factor()).reshape(1))[0]

    @contextmanager
    def _taking_part(self) -> Iterator[None]:
        """A rank without samples runs the step for the others' sake and keeps nothing of it but its logging's part."""
        assert self.lightning_module is not None
        if self.step_samples() > 0:
            yield
            return
        manual = not self.lightning_module.automatic_optimization
        with untouched(self.lightning_module, silence_logs=False, keep_numbers=manual):
            yield

    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        """Move a batch, or each of its micro-batches, as the user's hooks say."""
        if isinstance(batch, MicroBatches):
            return MicroBatches(self.batch_to_device(each, device, dataloader_idx) for each in batch)
        return super().batch_to_device(batch, device, dataloader_idx)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the user's step on this rank's samples, micro-batch by micro-batch where the plan has several."""
        if isinstance(self._batch, MicroBatches):
            return self._micro_batches.run(self._batch, *args[1:], **kwargs)
        self.gradients.begin_forward()
        return self.own_step(self._batch, *args, **kwargs)

    def own_step(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        """Run the user's training step on one batch of this rank, or for the others' sake."""
        assert self.lightning_module is not None
        with self.instruments.step(batch), self._taking_part(), self._manual.step(self.lightning_module):
            return super().training_step(*args, **kwargs)

    def _loss_factor(self) -> float:
        """Return what this rank's loss counts for in the mean over the global batch."""
        if self._weights is not None:
            return self._weights.factor(self.step_items())
        return 1.0 if self._sizes is None else self.step_samples() / sum(self._sizes)

    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        """Scale the loss by this rank's share of the samples, so that the gradients' sum is the global mean's."""
        closure_loss = scaled(closure_loss, self._loss_factor())
        self._micro_batches.before_backward()
        with self.instruments.step(self._batch):
            loss = self._backward(closure_loss, optimizer, *args, **kwargs)
        self._micro_batches.after_backward()
        return loss

    def _backward(self, loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        """As ``Strategy.backward``, with gradients complete before the user's ``on_after_backward`` sees them."""
        module = self.lightning_module
        assert module is not None
        self.pre_backward(loss)
        loss = self.precision_plugin.pre_backward(loss, module)
        with self.gradients.backward(is_last=not self._accumulates, complete=not module.automatic_optimization):
            self.precision_plugin.backward(loss, module, optimizer, *args, **kwargs)
            self._manual.end_backward()
        self._manual.after_backward()
        self._accumulated = self._accumulates
        loss = self.precision_plugin.post_backward(loss, module)
        self.post_backward(loss)
        return loss

    def early_backward(self, loss: Tensor, batch: Any) -> None:
        """Backward of a micro-batch that is not the step's last: gradients add up within the group."""
        assert self.lightning_module is not None
        accumulated = self._trainer.accumulate_grad_batches  # Lightning divides the last one's loss itself
        loss = scaled(loss, self._loss_factor() / accumulated)
        loss = scale_loss(self.precision_plugin, loss)  # as Lightning does the last one's, within its pre_backward
        with self.instruments.step(batch), self.gradients.backward(is_last=False):
            self.precision_plugin.backward(loss, self.lightning_module, None)

    def keeps_gradients(self) -> bool:
        """Whether gradients that are there when a step begins may still be wanted: by an accumulation, or by a hook."""
        return self._accumulated or self._hooks_keep_gradients()

    def optimizer_step(self, optimizer: Optimizer, closure: Any, model: Any = None, **kwargs: Any) -> Any:
        """Run the closure (forward and backward) and the optimizer's step."""
        with self.instruments.step(self._batch):
            result = super().optimizer_step(optimizer, closure, model, **kwargs)
            self._manual.after_optimizer_step()
        return result

    def _eval_step(self, step: Any, *args: Any, **kwargs: Any) -> Any:
        with self.instruments.step(args[0] if args else None), self._taking_part():
            output = step(*args, **kwargs)
        if self.companions.averages and self.lightning_module is not None:
            torch_adapter.reshard(self.lightning_module)  # the average and the model are swapped as shards
        # what a rank without samples computed is a repetition of another one's
        return output if self.step_samples() > 0 else cut(output, 1, 0, 0)

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the user's step on this rank's samples."""
        return self._eval_step(super().validation_step, *args, **kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the user's step on this rank's samples."""
        return self._eval_step(super().test_step, *args, **kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the user's step on this rank's samples; where it has none, the prediction is empty."""
        self.begin_predict_batch()
        self.begin_batch(training=False)  # predicting logs nothing, so Lightning notes no batch
        return self._eval_step(super().predict_step, *args, **kwargs)

    def on_validation_end(self) -> None:
        """Forget what was read ahead; leave the shards where hooks look for parameters."""
        self.loaders.clear(evaluating=True)
        assert self.lightning_module is not None
        torch_adapter.reshard(self.lightning_module)
        super().on_validation_end()

    on_test_end = on_predict_end = on_validation_end

    def on_train_end(self) -> None:
        """Say what each rank did."""
        super().on_train_end()
        if self.plan is None:
            return
        own = RankSummary(
            **self._measured(),
            samples=self.plan.batch_shares[self.global_rank],
            flops_per_sample=self.flops_per_sample,
        )
        self._batch = None
        self.summaries = self.gather_objects(own)
        if self._summary and self.is_global_zero:
            print_summary(self.summaries, self.plan)
