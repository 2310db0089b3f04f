"""hetero_fsdp: FSDP2 with batch shares by measured speed, and the numbers of one device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torchmetrics import Metric

from lightning_hetero.cluster import Cluster
from lightning_hetero.costs import ModelCosts
from lightning_hetero.data import Split, UnevenLoader
from lightning_hetero.errors import HeteroError, PlanError, UnsupportedError, raise_all
from lightning_hetero.kept import KeptLoader
from lightning_hetero.membership.shards import replicas_of
from lightning_hetero.models.units import Unit, find_units
from lightning_hetero.plan import ModelKey, ShardPlan
from lightning_hetero.planner.measured import MeasuredRanks
from lightning_hetero.strategies import lightning_adapter, planning, results_adapter, torch_adapter
from lightning_hetero.strategies.arguments import argument_problems, read_costs, read_plan
from lightning_hetero.strategies.block_forwards import BlockForwards
from lightning_hetero.strategies.checkpoints import ShardCheckpoints
from lightning_hetero.strategies.companions import Companions
from lightning_hetero.strategies.fsdp_steps import FSDPSteps
from lightning_hetero.strategies.gradients import GradientReduction, clip_by_one_norm
from lightning_hetero.strategies.groups import ShardGroups
from lightning_hetero.strategies.layout import find_layout, is_small, march_together, reshards_after_forward
from lightning_hetero.strategies.loaders import Loaders
from lightning_hetero.strategies.loss_weight import LossWeight, loss_weight_problems
from lightning_hetero.strategies.manual import ManualSteps
from lightning_hetero.strategies.micro_batches import MicroBatchSteps
from lightning_hetero.strategies.opening import Opening
from lightning_hetero.strategies.options import ShardingOptions
from lightning_hetero.strategies.prefetch import order_gathers
from lightning_hetero.strategies.rebalance import Rebalance, Rebalancer, rebalance_problems, rebalance_rule
from lightning_hetero.strategies.scaler import share_scaler
from lightning_hetero.strategies.sharding import (
    check_parameters,
    check_steps,
    register_steps,
    shard_module,
)
from lightning_hetero.strategies.summary import RankSummary

CheckLoss = Literal["warn", "error", "off"]


class HeteroFSDPStrategy(FSDPSteps):
    """Trains an unchanged LightningModule on unequal devices at close to the sum of their speeds.

    The model is sharded over all ranks with FSDP2. Each rank takes its share of every global batch, in whole samples
    and by its measured speed; its loss is scaled by that share and gradients are summed, so that gradients, clipping,
    logged values and the order of samples are those of one device over the global batch. That holds for losses that
    are means over samples, and is checked on the first batch.

    Args:
        cluster: the devices, one per rank; a path is read as YAML; None takes the file that the environment variable
            ``LIGHTNING_HETERO_CLUSTER`` names, else the ranks discover what they are. With ``emulate: true`` in it,
            CPU ranks behave like its devices, and it sets the number of processes.
        plan: "auto" measures the ranks at the start of a fit and plans; a plan or the path of one is taken as it is.
        global_batch_size: samples per step over all ranks. Default: the training loader's batch size times the number
            of ranks, or what the checkpoint that is resumed from was trained with.
        costs: with an emulated cluster, the seconds that its devices' units take, in place of FLOPs / speed; a path is
            read as JSON.
        wrap: classes whose instances are wrapped one by one; default: blocks found by structure.
        check_loss: what to do when the loss is not a mean over samples, or BatchNorm makes the result depend on the
            split: "warn", "error" or "off".
        loss_weight: for losses that are means over other items than samples: what the loss of a batch counts for, such
            as its unpadded tokens. Takes a batch as the module's steps do, returns a number >= 0 or a tensor of one
            element; where a batch is cut, the parts' must add up to it. Default: the module's method ``loss_weight``,
            if it has one, else samples.
        rebalance: move batch shares in mid-run when what the ranks take, waiting for input included, drifts from what
            was expected: True, False, or a :class:`~lightning_hetero.strategies.rebalance.Rebalance` that says when.
            The global batch, the order of samples and the result stay the same. Default: with plan="auto".
        sharding_strategy: "FULL_SHARD" frees a block's gathered parameters between its forward and its backward: less
            memory, one more all-gather. "SHARD_GRAD_OP" keeps them. "HYBRID_k" shards fully in groups of k consecutive
            ranks (k divides their number), so that gradients alone cross between groups. "NO_SHARD" keeps a copy of
            the model on every rank. "auto" is a group for each node, where communication between nodes is what takes
            long and each node holds the model, else one of all ranks; it keeps parameters where they take less than a
            tenth of every device's memory.
        reshard_after_forward: another name for the first two: True and False; "auto" leaves it to the strategy.
        backward_prefetch: when a backward's next all-gather is issued: "BACKWARD_PRE" (default) before the block at
            hand computes; "BACKWARD_POST" when its gradients are there, before they are reduced: less memory, less
            overlap; "NONE" when it is needed.
        forward_prefetch: whether a block gathers the next ones by an explicit list. Default: on gloo, where nothing
            else overlaps; on NCCL streams do.
        limit_all_gathers: how many blocks may be gathered at once: True is 2, the one that computes and the next;
            n >= 1 is n; False is no limit. Each holds a whole block's parameters. Default: 2; on gloo no limit where
            parameters stay gathered anyway and take less than a tenth of every device's memory.
        cpu_offload: keep shards, their gradients and optimizer states in the host's memory: much less memory on the
            device, and a copy each way per block. Does nothing on CPU ranks.
        activation_checkpointing: compute blocks' forward again in backward in place of keeping activations: True for
            all blocks, n for every n-th. Results stay the same. A plan may say it rank by rank.
        mixed_precision: FSDP2's policy, or a mapping of ``param_dtype``, ``reduce_dtype``, ``output_dtype`` (names such
            as "bfloat16") and ``cast_forward_inputs``. Every device must have the types; float16 needs
            ``Trainer(precision="16-mixed")`` on CUDA devices, for its loss scaler.
        compile: compile each block with ``torch.compile``, once for all batch sizes from 2 up. Does nothing on emulated
            devices.
        save_distributed_checkpoint: False writes one file in the form that one device would write; True a folder with
            a part from each rank.
        weights_only: passed to ``torch.load`` for checkpoints. Lightning drops ``fit(weights_only=...)`` for strategies
            that restore after set-up, so it is given here.
        summary: print the table of what each rank did at the end of a fit.
        timeout: for collectives.
        **kwargs: accelerator, parallel_devices, cluster_environment, checkpoint_io, precision_plugin and
            process_group_backend, as for Lightning's own strategies.

    Raises:
        HeteroError: for bad arguments; the message names the value and what to do.
    """

    strategy_name = "hetero_fsdp"

    def __init__(
        self,
        cluster: Cluster | str | Path | None = None,
        plan: Literal["auto"] | str | Path | ShardPlan = "auto",
        *,
        global_batch_size: int | None = None,
        costs: str | Path | ModelCosts | None = None,
        wrap: set[type[torch.nn.Module]] | None = None,
        check_loss: CheckLoss = "warn",
        loss_weight: Callable[[Any], float | Tensor] | None = None,
        rebalance: bool | Rebalance | None = None,
        sharding_strategy: str = "auto",
        reshard_after_forward: bool | Literal["auto"] = "auto",
        backward_prefetch: str | None = None,
        forward_prefetch: bool | None = None,
        limit_all_gathers: bool | int | None = None,
        cpu_offload: bool | None = None,
        activation_checkpointing: bool | int | None = None,
        mixed_precision: dict[str, Any] | MixedPrecisionPolicy | None = None,
        compile: bool | None = None,
        save_distributed_checkpoint: bool = False,
        weights_only: bool | None = None,
        summary: bool = True,
        timeout: timedelta = timedelta(minutes=30),
        **kwargs: Any,
    ) -> None:
        super().__init__(cluster, timeout=timeout, **kwargs)
        options = ShardingOptions(
            sharding_strategy,
            reshard_after_forward,
            backward_prefetch,
            forward_prefetch,
            limit_all_gathers,
            cpu_offload,
            activation_checkpointing,
            mixed_precision,
            compile,
        )
        raise_all(
            HeteroError,
            "hetero_fsdp cannot take these arguments",
            [
                *argument_problems(check_loss, reshard_after_forward, global_batch_size, wrap),
                *loss_weight_problems(loss_weight),
                *rebalance_problems(rebalance),
                *options.problems(),
            ],
        )
        self.plan: ShardPlan | None = None if plan == "auto" else read_plan(plan, ShardPlan)
        self._given_plan = self.plan
        if self.plan is not None:
            raise_all(PlanError, "the arguments and the plan disagree", options.plan_problems(self.plan))
            options = options.with_plan(self.plan)
        self.options = options
        self._forwards: BlockForwards | None = None
        self._said: set[str] = set()
        self._wrap = wrap
        self._summary = summary
        self.summaries: list[RankSummary] = []
        self.groups: ShardGroups  # these from set-up on
        self.gradients: GradientReduction
        self.loaders = Loaders(self, global_batch_size)
        self._checkpoints = ShardCheckpoints(self, save_distributed_checkpoint, weights_only)
        self._users_loss_weight = loss_weight
        self.loss_weight: LossWeight | None = None  # from set-up on
        self.rebalance_is_asked = bool(rebalance)
        self.rebalancer = Rebalancer(self, rebalance_rule(rebalance, plan_is_given=self.plan_is_given))
        self.measured_costs: MeasuredRanks | None = None
        self._micro_batches = MicroBatchSteps(self)
        self.costs = read_costs(costs)
        self.flops_per_sample: float | None = None
        self._opening = Opening(self, check_loss, count_flops=summary)
        self.companions = Companions(self, save_distributed_checkpoint)
        self._manual = ManualSteps()

    # -- set-up --------------------------------------------------------------------------------------------------------

    def _option_problems(self, arguments: dict[str, Any]) -> list[str]:
        ranks = self.world_size if self.cluster is None else self.cluster.world_size
        types = () if self.cluster is None else self.cluster.device_types()
        return self.options.rank_problems(ranks, types, self._precision_name(arguments))

    def setup_environment(self) -> None:
        """Start the process group; give ``configure_model`` its device mesh."""
        self.companions.check()
        super().setup_environment()

    def backend_for(self, device: torch.device) -> str:
        """Return both backends with CPU offload: what is on the host is reduced there, such as a norm."""
        if self.options.cpu_offload and device.type == "cuda":
            return "cpu:gloo,cuda:nccl"
        return super().backend_for(device)

    def environment_is_there(self) -> None:
        """Give ``configure_model`` its device mesh."""
        super().environment_is_there()
        assert self.lightning_module is not None
        mesh = init_device_mesh(
            self.root_device.type, (self.world_size, 1), mesh_dim_names=("data_parallel", "tensor_parallel")
        )
        lightning_adapter.give_device_mesh(self.lightning_module, mesh)

    def setup(self, trainer: pl.Trainer) -> None:
        """Discover what was not given, shard the model, make the optimizers."""
        assert self.accelerator is not None
        assert self.lightning_module is not None
        self.accelerator.setup(trainer)
        module = self.lightning_module
        check_parameters(module)
        check_steps(module)
        self.loss_weight = LossWeight.of_user(self._users_loss_weight, module, self.global_rank)
        if trainer.state.fn == TrainerFn.FITTING:
            self.rebalancer.reset()
            self.plan = self._given_plan
        if trainer.state.fn == TrainerFn.FITTING and not self.plan_is_given:
            # a fit after another one may have another loader, and other devices
            self.plan = None
            self.loaders.forget_global_batch()
        cluster = self._know_cluster()
        raise_all(UnsupportedError, "the devices lack what was asked for", self._option_problems({}))
        self._model_key = ModelKey(type(module).__name__, sum(p.numel() for p in module.parameters()))
        self.loaders.check_plan(cluster, self._model_key)
        results_adapter.weigh_logged_values(trainer, self)
        self._evaluate_without_inference_mode(trainer)
        if self._layer_sync is not None:
            self._layer_sync.apply(module)  # in place; BatchNorm over all ranks, whatever their shares
        self.model = self.precision_plugin.convert_module(module)
        self._shard(module)
        self._manual.know(module)
        self.companions.join()
        if trainer.state.fn == TrainerFn.FITTING:
            if self.most_micro_batches() > 1 and not module.automatic_optimization:
                raise UnsupportedError(
                    f"the plan cuts a step into {self.most_micro_batches()} micro-batches, and with manual "
                    "optimization the step is the module's own: set micro_batches to 1 in the plan, or "
                    "automatic_optimization = True"
                )
            self.setup_optimizers(trainer)
        share_scaler(self.precision_plugin, self.root_device)
        self.setup_precision_plugin()

    def _shard(self, module: pl.LightningModule) -> None:
        assert self.cluster is not None
        units = find_units(module, self._wrap)
        self.reshards = reshards_after_forward(module, self.cluster, self.options, self._given_plan, self.global_rank)
        self.layout = find_layout(self, module, units)
        replicas = replicas_of(self.layout.groups, self.layout.modes)
        marching = march_together(module, self._given_plan)
        self.groups = ShardGroups(replicas, self.global_rank, self.root_device, self._timeout, march_together=marching)
        shard_module(
            module, units, self.groups, self.root_device, reshard_after_forward=self.reshards, options=self.options
        )
        register_steps(module)
        self.model_to_device()
        if self.root_device.type == "cpu":
            # gloo's all-gathers block unless they are asynchronous and asked for ahead (DESIGN 5)
            torch_adapter.set_unshard_async(module, True)
        self.gradients = GradientReduction(module, self.groups, self.root_device)
        roomy = not self.reshards and is_small(module, self.cluster)
        order_gathers(
            module,
            units,
            self.options,
            self.gradients.reduce_scatter,
            roomy=roomy,
            planned_by_two=self.cluster.emulate,
        )
        if len(self.groups.replicas) > 1:
            lightning_adapter.clip_norms_by(self.precision_plugin, clip_by_one_norm)
        self._forwards = self._wrap_forwards(units)
        self._put_up_instruments(module, units, self._forwards.recomputed)

    def _wrap_forwards(self, units: Sequence[Unit]) -> BlockForwards:
        """Have blocks computed again or compiled as the options say; say what of the options does nothing here."""
        assert self.cluster is not None
        if self._forwards is not None:
            self._forwards.close()  # of a fit that failed
        on_cpu, emulated = self.root_device.type == "cpu", self.cluster.emulate
        for text in self.options.without_effect(on_cpu=on_cpu, emulated=emulated, reshards=self.reshards):
            if text not in self._said:
                self._said.add(text)
                rank_zero_info(f"hetero_fsdp: {text}")
        return BlockForwards(
            units,
            recompute_every=self.options.recompute_every(self._given_plan, self.global_rank),
            compiled=bool(self.options.compile) and not emulated,
        )

    def model_to_device(self) -> None:
        """Move what is not sharded to this rank's device; with CPU offload, FSDP2 has done so, but for metrics."""
        if not self.options.cpu_offload:
            super().model_to_device()
            return
        assert self.model is not None
        for metric in (each for each in self.model.modules() if isinstance(each, Metric)):
            if not any(True for _ in metric.parameters()):  # those are shards, and stay on the host
                metric.to(self.root_device)

    def restore_global_batch(self, saved: int) -> None:
        """Go on with the global batch size of a checkpoint, unless the user gave another."""
        if self.loaders.restore_global_batch(saved):
            lightning_adapter.forget_train_dataloader(self._trainer)

    @property
    def train_loader(self) -> UnevenLoader | KeptLoader | None:
        """What reads this rank's share of the training batches; None before Lightning has asked for it."""
        return self.loaders.train

    def accumulated_batches(self) -> int:
        """Return how many training batches make an optimizer step now."""
        return self._trainer.accumulate_grad_batches

    def split_at(self, epoch: int, batch: int) -> Split:
        """Return how a training batch is split, whatever has moved since."""
        return self.rebalancer.split_at(epoch, batch)

    def split(self, samples: int, plan: ShardPlan | None = None) -> tuple[int, ...]:
        """Return how many of so many samples each rank takes: by the plan, or by declared speeds before that."""
        plan = plan or self.plan
        if plan is None:
            plan = self.declared_plan(max(samples, self.world_size))
        # evaluation loaders may have larger batches than the plan's
        whole, rest = divmod(samples, plan.global_batch_size)
        return tuple(whole * b + r for b, r in zip(plan.batch_shares, plan.samples(rest), strict=True))

    def declared_plan(self, global_batch_size: int) -> ShardPlan:
        """Return the plan by declared speeds: what holds until ranks are measured."""
        assert self.cluster is not None
        plan = planning.declared_plan(
            self.cluster, self._model_key, global_batch_size, reshard_after_forward=self.reshards
        )
        if len(self.groups.replicas) > 1:
            plan = replace(plan, groups=self.layout.groups, modes=self.layout.modes)
        return self.options.in_plan(plan)

    def plan_from(self, global_batch_size: int, costs: MeasuredRanks) -> ShardPlan:
        """Return the fastest plan by what the ranks measured."""
        assert self.cluster is not None
        plan = planning.plan_from(
            self.cluster,
            self._model_key,
            global_batch_size,
            costs,
            self.layout,
            micro_batches=isinstance(self.loaders.train, UnevenLoader),
        )
        return self.options.in_plan(plan)

    # -- start of a fit ------------------------------------------------------------------------------------------------

    def on_train_start(self) -> None:
        """Check the loss and measure the ranks on the first samples, and plan."""
        self._check_single_loader()
        self.instruments.at_step(self._trainer.global_step)
        if lightning_adapter.batches_to_skip(self._trainer):
            self.companions.begin_in_mid_epoch()
        if self.companions.searching:
            self.companions.begin_search()  # of a learning rate; the fit itself comes after it
        else:
            self._opening.run(self.loaders.train)
        if self.plan is not None and not self.plan_is_given:
            assert self.cluster is not None
            shares = ", ".join(str(share) for share in self.plan.batch_shares)
            rank_zero_info(
                f"hetero_fsdp: {self.cluster.describe()}; batch shares {shares} of {self.plan.global_batch_size}"
            )
        self.rebalancer.begin_fit()
        self._begin_to_count()

    def teardown(self) -> None:
        """Take our hooks off the module."""
        if hasattr(self, "gradients"):
            self.gradients.close()
        if self._forwards is not None:
            self._forwards.close()
        super().teardown()
