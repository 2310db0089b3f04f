"""hetero_pipe: a model cut into stages by what each device can, and the numbers of one device."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info

from lightning_hetero.cluster import Cluster
from lightning_hetero.costs import ModelCosts
from lightning_hetero.errors import HeteroError, UnsupportedError, raise_all
from lightning_hetero.models.units import Unit, find_units
from lightning_hetero.plan import ModelKey, PipelinePlan
from lightning_hetero.strategies import lightning_adapter, results_adapter
from lightning_hetero.strategies.arguments import read_costs, read_plan
from lightning_hetero.strategies.loss_weight import LossWeight, loss_weight_problems
from lightning_hetero.strategies.optimizer_probe import optimizer_s
from lightning_hetero.strategies.pipe import planning
from lightning_hetero.strategies.pipe.arguments import PipelineOptions, pipeline_problems, refused_callbacks
from lightning_hetero.strategies.pipe.assembly import Assembly
from lightning_hetero.strategies.pipe.checkpoints import PipeCheckpoints
from lightning_hetero.strategies.pipe.loaders import PipeLoaders
from lightning_hetero.strategies.pipe.placement import move, size_of
from lightning_hetero.strategies.pipe.rehearsal import Rehearsal
from lightning_hetero.strategies.pipe.splitting import Splitting
from lightning_hetero.strategies.pipe.strategy_steps import PipeSteps
from lightning_hetero.strategies.planning import local_bytes
from lightning_hetero.strategies.scaler import share_scaler

_PLACED = "_hetero_pipe_placed_by"


class HeteroPipelineStrategy(PipeSteps):
    """Runs a LightningModule as a pipeline, with the numbers of one device.

    The module stays as it is: its step calls its model once; that model is cut into stages of whole units, each rank
    keeps the units of its stages, and micro-batches run through them by a schedule (docs/hetero_pipe.md).

    ``training_step`` runs once per micro-batch, up to the model on the first stage and whole on the last: attributes
    that it sets are there alone, and so is what it tells ``self.logger.experiment``; ``self.log``, metrics and what it
    returns reach every rank. Validation, test and predict steps run on every rank of a pipeline. Hooks around training
    batches get a list of micro-batches, and ``p.grad`` of a rank's own parameters. The loss is taken for a mean over
    samples.

    Args:
        cluster: the devices, one per rank; a path is read as YAML, None takes the file that the environment variable
            ``LIGHTNING_HETERO_CLUSTER`` names, else what the ranks discover.
        plan: "auto" measures the units on every kind of device and plans; else a :class:`~lightning_hetero.plan.
            PipelinePlan` or the path of one.
        module: dotted name of the submodule to split; by default the largest child that has a unit chain.
        micro_batch_size: samples of a micro-batch; "auto" takes the best one.
        schedule: "gpipe", "1f1b", "interleaved_1f1b" or "zero_bubble"; "auto" takes the better of the first two.
        pipelines: number of pipelines; "auto" takes the best one.
        activation_checkpointing: True lets stages that do not fit otherwise run their forward again in backward,
            False forbids it; "auto" is True.
        costs: seconds of the model's units per type of device, or the path of such a file: planned by in place of
            measuring, and what emulated devices take.
        global_batch_size: samples per step over all ranks; default: the loader's batch size times the ranks, as with
            any other strategy on so many devices.
        loss_weight: what a batch's loss counts for where it is a mean over other items than samples.
        weights_only: of checkpoints that are loaded, as for ``torch.load``.
        summary: print at the end of a fit what each rank did.
        timeout: for collectives, and so for a rank that never comes.
        **kwargs: as every Lightning strategy takes them.

    Raises:
        HeteroError: listing every argument that is no valid one.
    """

    strategy_name = "hetero_pipe"

    def __init__(
        self,
        cluster: Cluster | str | Path | None = None,
        *,
        plan: PipelinePlan | str | Path = "auto",
        module: str | None = None,
        micro_batch_size: int | str = "auto",
        schedule: str = "auto",
        pipelines: int | str = "auto",
        activation_checkpointing: bool | str = "auto",
        costs: ModelCosts | str | Path | None = None,
        global_batch_size: int | None = None,
        loss_weight: Callable[[Any], Any] | None = None,
        weights_only: bool | None = None,
        summary: bool = True,
        timeout: timedelta = timedelta(minutes=30),
        **kwargs: Any,
    ) -> None:
        super().__init__(cluster, timeout=timeout, **kwargs)
        self.options = PipelineOptions(
            micro_batch_size, schedule, pipelines, activation_checkpointing, given=plan != "auto"
        )
        raise_all(
            HeteroError,
            "hetero_pipe cannot take these arguments",
            [*pipeline_problems(self.options, module, global_batch_size), *loss_weight_problems(loss_weight)],
        )
        self._given_plan = None if plan == "auto" else read_plan(plan, PipelinePlan)
        self.plan: PipelinePlan | None = self._given_plan
        self._module_name = module
        self.costs = read_costs(costs)
        self.unit_costs: ModelCosts | None = None
        """what the plan was made from, unit by unit of the chain"""
        self.basis: planning.Basis | None = None
        """the same with the devices that it was measured on; None where the plan was given"""
        self._splitting: Splitting | None = None  # that a plan was asked for beforehand
        self._rest_is_planned = True  # a plan that was given is taken as it is
        self._users_loss_weight = loss_weight
        self._summary = summary
        self.loaders = PipeLoaders(self, global_batch_size)
        self._checkpoints = PipeCheckpoints(self, weights_only)

    # -- processes ---------------------------------------------------------------------------------------------------

    def setup_environment(self) -> None:
        """Refuse callbacks that cannot work, then start the process group."""
        assert self.lightning_module is not None
        trainer: Any = self.lightning_module.trainer
        raise_all(
            UnsupportedError, "hetero_pipe cannot work with these callbacks", refused_callbacks(trainer.callbacks)
        )
        super().setup_environment()

    # -- set-up --------------------------------------------------------------------------------------------------------

    def setup(self, trainer: pl.Trainer) -> None:
        """Discover what was not given, plan, keep this rank's units, make the optimizers."""
        assert self.accelerator is not None
        module = self.lightning_module
        assert module is not None
        self.accelerator.setup(trainer)
        fitting = trainer.state.fn == TrainerFn.FITTING
        if fitting and not module.automatic_optimization:
            raise UnsupportedError(
                "hetero_pipe cannot run manual optimization: its backward and optimizer steps sit inside a "
                "training_step that stages in the middle never run. Set automatic_optimization = True, or use "
                "hetero_fsdp"
            )
        self._know_cluster()
        self.loss_weight = LossWeight.of_user(self._users_loss_weight, module, self.global_rank)
        self._evaluate_without_inference_mode(trainer)
        if self._assembly is None or self._assembly.placement.root is not module:
            self._assemble(trainer, module)
        else:
            self.model = module
        self._attach_instruments(module)  # teardown took them off
        results_adapter.weigh_logged_values(trainer, self, training=False)
        if fitting:
            self.setup_optimizers(trainer)
            lightning_adapter.clip_norms_by(self.precision_plugin, self._clip)
        share_scaler(self.precision_plugin, self.root_device)
        self.setup_precision_plugin()

    def find_basis(self, trainer: pl.Trainer, module: pl.LightningModule) -> planning.Basis:
        """Measure what a plan is made from, and keep it for the plan (a collective); ``hetero_auto`` asks first."""
        self._know_cluster()
        self._keep_global_batch(trainer)
        self.precision_plugin.convert_module(module)  # in place
        self._splitting = Splitting(self, trainer, module, self._module_name)
        return self._splitting.basis()

    def _assemble(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        """Plan, and keep what the plan gives this rank."""
        assert self.cluster is not None
        if _PLACED in module.__dict__:
            raise UnsupportedError(
                f"this {type(module).__name__} was cut by another hetero_pipe strategy: each rank has a part. "
                "Build it anew and load a checkpoint, or go on with the same Trainer"
            )
        self._keep_global_batch(trainer)
        self.model = self.precision_plugin.convert_module(module)
        splitting, self._splitting = self._splitting or Splitting(self, trainer, module, self._module_name), None
        self._model_key = ModelKey(type(module).__name__, size_of(splitting.placement.model))
        if self._given_plan is None:
            basis = splitting.basis()
            self.basis, self.unit_costs = basis, basis.costs
            self.plan = planning.make_plan(self, basis)
            self._rest_is_planned = False
            rank_zero_info(f"hetero_pipe: {self.cluster.describe()}; {planning.describe(self.plan)}")
        assert self.plan is not None
        self.plan.validate(cluster=self.cluster, model=self._model_key)
        self.loaders.use_plan(self.plan)
        placement = splitting.for_micro_batches(self.plan.micro_batch_size)
        module.__dict__[_PLACED] = id(self)
        self._assembly = Assembly(
            self.plan, placement, self.global_rank, self.root_device, self.make_group, self.gather_objects
        )
        move(module, self.root_device)
        self._roles_and_log(module, placement)
        self._join_metrics(module)

    def model_to_device(self) -> None:
        """Move what has values here to this rank's device."""
        assert self.model is not None
        move(self.model, self.root_device)

    def make_group(self, ranks: Any, backend: str | None = None) -> Any:
        """Make a process group of some ranks (called on all ranks in the same order)."""
        if self.world_size == 1:
            return None
        return dist.new_group(sorted(ranks), timeout=self._timeout, backend=backend)

    def _attach_instruments(self, module: pl.LightningModule) -> None:
        prefix = f"{self.assembly.placement.prefix}."
        known = {cost.name for cost in self.costs.units} if self.costs is not None else set()
        units = []
        for unit in find_units(module):
            if any(tensor.is_meta for tensor in (*unit.module.parameters(), *unit.module.buffers())):
                continue
            short = unit.name.removeprefix(prefix)
            if known and unit.name not in known and short in known:
                unit = Unit(short, unit.module, unit.is_block)
            if known and unit.name not in known and not unit.name.startswith(prefix):
                continue  # outside the split model: no costs
            units.append(unit)
        recomputed = {unit.name for unit in units} if self.assembly.recomputes else set()
        self._put_up_instruments(module, units, recomputed, halves=self.assembly.plan.schedule == "zero_bubble")

    def _keep_global_batch(self, trainer: pl.Trainer) -> None:
        """Plan for the global batch of the checkpoint that the fit goes on from, unless one is given (a collective)."""
        path = lightning_adapter.checkpoint_to_come(trainer)
        if trainer.state.fn == TrainerFn.FITTING and path is not None and self._given_plan is None:
            saved = self._checkpoints.saved_global_batch(path)
            if saved is not None:
                self.loaders.keep_global_batch(saved)

    def restore_global_batch(self, saved: int) -> None:
        """Tell of a checkpoint with another global batch than the one that was asked for, or planned for before."""
        if self.global_batch_size not in (None, saved):
            rank_zero_info(
                f"hetero_pipe: the checkpoint was trained with a global batch of {saved}, this run's is "
                f"{self.global_batch_size}"
            )

    # -- a fit ---------------------------------------------------------------------------------------------------------

    def on_train_start(self) -> None:
        """Begin to count."""
        self._check_single_loader()
        self.loaders.skip(lightning_adapter.batches_to_skip(self._trainer), self._trainer.current_epoch)
        self.instruments.count(self.optimizers)
        self.instruments.at_step(self._trainer.global_step)
        if not self._rest_is_planned:
            self._plan_the_rest()
        self._begin_to_count()

    def _plan_the_rest(self) -> None:
        """Add to the plan what only its own stages show: messages between them, and the optimizer (a collective)."""
        assert self.plan is not None
        assert self.basis is not None
        assert self.cluster is not None
        module = self.lightning_module
        assert module is not None
        self._rest_is_planned = True
        rehearsal = Rehearsal(
            self.assembly,
            module,
            self.basis.call,
            self.instruments,
            self.precision_plugin.forward_context,
            self.root_device,
        )
        free_bytes = self.cluster.devices[self.global_rank].memory_bytes - local_bytes(self._own_parameters())
        taken_s = rehearsal.time_s(self.barrier)
        own_s = optimizer_s(
            self.optimizers, free_bytes, lambda: self.instruments.step(None, samples=1), self.root_device, self.barrier
        )
        everyones = self.gather_objects((rehearsal.micro_batches, taken_s, own_s))
        # the first stage's backward is the last to end
        firsts = [everyones[pipeline.rank_of(0)] for pipeline in self.plan.pipelines]
        plan, self.basis = planning.with_messages(
            self.plan, self.basis, [each[0] for each in firsts], [each[1] for each in firsts]
        )
        self.plan = self.assembly.plan = planning.with_optimizer(plan, [each[2] for each in everyones])

    def _own_parameters(self) -> list[torch.nn.Parameter]:
        module = self.lightning_module
        assert module is not None
        return [parameter for parameter in module.parameters() if not parameter.is_meta]

    def _clip(self, parameters: list[torch.nn.Parameter], max_norm: float) -> torch.Tensor:
        """Clip by the norm over all stages, which every rank finds alike."""
        assert self._assembly is not None
        gradients = {p: p.grad for p in parameters if p.grad is not None}
        total = self._assembly.gradients.squared_norm(gradients, self.root_device)
        if dist.is_initialized() and self.world_size > 1:
            dist.all_reduce(total)
        norm = total.sqrt()
        factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        for gradient in gradients.values():
            gradient.mul_(factor.to(gradient))
        return norm
