"""Evaluation under hetero_pipe: forwards through the stages, and the user's step on every rank with their output."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from lightning_hetero.data import batch_size_of, default_seed
from lightning_hetero.plan import PipelinePlan, even_parts
from lightning_hetero.strategies.loss_check import cut
from lightning_hetero.strategies.loss_weight import BatchWeights
from lightning_hetero.strategies.pipe.assembly import Assembly
from lightning_hetero.strategies.pipe.loaders import PipeLoaders
from lightning_hetero.strategies.pipe.logs import StepLog
from lightning_hetero.strategies.pipe.nested import shapes_of
from lightning_hetero.strategies.pipe.randomness import Draws
from lightning_hetero.strategies.pipe.roles import Roles, alone
from lightning_hetero.strategies.pipe.steps import EvaluationWork, can_be_joined, join_outputs
from lightning_hetero.strategies.running import RunningStrategy
from lightning_hetero.strategies.untouched import same_random_states, untouched


class PipeEvaluation(RunningStrategy):
    """What Lightning calls to validate, test and predict; training, set-up and planning are the subclasses'."""

    plan: PipelinePlan | None
    loaders: PipeLoaders
    _given_plan: PipelinePlan | None
    _roles: Roles
    _log: StepLog

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._assembly: Assembly | None = None
        self._eval_sizes: tuple[int, ...] | None = None
        self._evaluated = 0
        self._loop_samples = 0
        self._is_alone = False
        self._whole_evaluation = False  # whether outputs of parts of a batch cannot be put together

    @property
    def assembly(self) -> Assembly:
        """The part of the plan that is this rank's; there from set-up on."""
        assert self._assembly is not None
        return self._assembly

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """The user's step runs on this rank and not on all."""
        self._is_alone = self.world_size > 1
        try:
            with alone(self):
                yield
        finally:
            self._is_alone = False

    # -- what weighed logging asks (evaluation) ------------------------------------------------------------------------

    def step_samples(self) -> int:
        """Samples that this rank answers for in the evaluation batch at hand: a pipeline's, on its last rank."""
        if self._eval_sizes is None:
            return 1
        return self._eval_sizes[self.assembly.pipeline] if self.assembly.is_last else 0

    def micro_batch(self) -> tuple[int, int]:
        """Evaluation runs the user's step once a batch."""
        return 0, 1

    def batch_weights(self) -> BatchWeights | None:
        """Evaluation weighs by samples."""
        return None

    def step_items(self) -> float:
        """As :meth:`step_samples`."""
        return float(self.step_samples())

    def begin_batch(self, training: bool, batch: Any = None) -> None:
        """Note how many samples the batch that starts now has in each pipeline."""
        sizes = self.loaders.eval_sizes
        self._eval_sizes = sizes.popleft() if sizes else None
        self._loop_samples += self.step_samples()

    def loop_samples(self, given: int | None) -> int:
        """Samples that a value counts for that is logged outside of an evaluation's batches, such as at its end."""
        if given is not None:
            return given if self.assembly.is_last else 0
        return self._loop_samples

    # -- evaluation ----------------------------------------------------------------------------------------------------

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the user's step on every rank, with the output that the pipeline made."""
        return self._evaluate("validation_step", args, kwargs, self.precision_plugin.val_step_context)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """As :meth:`validation_step`."""
        return self._evaluate("test_step", args, kwargs, self.precision_plugin.test_step_context)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """As :meth:`validation_step`: every rank of a pipeline has the predictions."""
        self.begin_predict_batch()
        self.begin_batch(training=False)  # predicting logs nothing, so Lightning notes no batch
        return self._evaluate("predict_step", args, kwargs, self.precision_plugin.predict_step_context)

    def _evaluate(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], context: Callable[[], Any]) -> Any:
        module: Any = self.lightning_module
        batch, rest = args[0], args[1:]
        samples = batch_size_of(batch)

        def step() -> Any:
            with context():
                return getattr(module, name)(batch, *rest, **kwargs)

        step.__name__ = name
        self._evaluated += 1
        draws = Draws(default_seed(), self._evaluated, 0, name)
        output = self._forwards(step, batch, samples, draws)

        def give() -> Any:
            draws.end_model()
            return output

        own = self._eval_sizes is None or self._eval_sizes[self.assembly.pipeline] > 0
        with same_random_states():
            draws.begin_step()
            if own:
                return self._roles.answer(give, step)
            # a repetition of another pipeline's sample; its logs count nothing, but are a collective
            with untouched(module, silence_logs=False):
                return cut(self._roles.answer(give, step), samples, 0, 0)

    def _forwards(self, step: Callable[[], Any], batch: Any, samples: int, draws: Draws) -> Any:
        """The model's output for a batch, on every rank of the pipeline."""
        output, joined = self._forwards_in(self._chunks(samples), step, batch, samples, draws)
        if not joined:
            self._whole_evaluation = True
            output, _ = self._forwards_in((samples,), step, batch, samples, draws)
        return output

    def _chunks(self, samples: int) -> tuple[int, ...]:
        plan = self.assembly.plan
        if self._whole_evaluation or plan.schedule == "interleaved_1f1b":
            return (samples,)
        return even_parts(samples, max(1, -(-samples // plan.micro_batch_size)))

    def _forwards_in(
        self, sizes: tuple[int, ...], step: Callable[[], Any], batch: Any, samples: int, draws: Draws
    ) -> tuple[Any, bool]:
        assembly, module = self.assembly, self.lightning_module
        found: Any = None
        if assembly.runtime is not None:
            arguments = None
            if assembly.is_first:
                assert module is not None
                with untouched(module), self._alone():
                    draws.begin_step()
                    arguments = self._roles.catch(step)
            each = [Draws(draws.seed, draws.step, k, draws.kind) for k in range(len(sizes))]
            work = EvaluationWork(
                assembly.placement.chain,
                arguments,
                samples,
                sizes,
                each,
                self.instruments,
                self.precision_plugin.forward_context,
            )
            shapes = [(draws.kind, size, shapes_of(batch)) for size in sizes]
            schedule = assembly.schedule(len(sizes), training=False)
            with same_random_states(), torch.no_grad():
                assembly.runtime.run(schedule, work, shapes)
            if assembly.is_last:
                joined = len(sizes) == 1 or can_be_joined(work.outputs, sizes)
                found = (join_outputs(list(zip(work.outputs, sizes, strict=True))) if joined else None, joined)
        output, joined = assembly.last_hand.give(found)
        if not assembly.is_last:
            output = super().batch_to_device(output, self.root_device)
        return output, joined

    def on_validation_start(self) -> None:
        """Count samples anew."""
        super().on_validation_start()
        self._loop_samples = 0

    on_test_start = on_validation_start

    def on_validation_end(self) -> None:
        """Forget the sizes of batches that were read ahead and not used."""
        self.loaders.eval_sizes.clear()
        super().on_validation_end()

    on_test_end = on_predict_end = on_validation_end
