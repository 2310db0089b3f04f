"""hetero_auto: plans for hetero_fsdp and for hetero_pipe, takes the one predicted faster, and says why."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info

from lightning_hetero.cluster import Cluster
from lightning_hetero.errors import HeteroError, InfeasibleError, UnsupportedError
from lightning_hetero.plan import PipelinePlan, ShardPlan
from lightning_hetero.planner.shard import plan_shard
from lightning_hetero.strategies import lightning_adapter
from lightning_hetero.strategies.base import HeteroStrategy
from lightning_hetero.strategies.fsdp import HeteroFSDPStrategy
from lightning_hetero.strategies.pipe import planning
from lightning_hetero.strategies.pipeline import HeteroPipelineStrategy
from lightning_hetero.units import format_seconds


class HeteroAutoStrategy(HeteroStrategy):
    """Chooses between :class:`HeteroFSDPStrategy` and :class:`HeteroPipelineStrategy` for a model and its devices.

    At the start of a fit every rank measures the model's units; both planners plan from that, and the strategy whose
    step is predicted to be faster takes the Trainer over (``trainer.strategy`` is that one from then on). What only one
    of them can run (manual optimization, a model without a unit chain, a model that fits one of the layouts alone) it
    gets. Where nothing is fitted, hetero_fsdp runs.

    Args:
        cluster: as both take it.
        global_batch_size: as both take it.
        fsdp: further arguments of :class:`HeteroFSDPStrategy`.
        pipe: further arguments of :class:`HeteroPipelineStrategy`.
        summary: print at the end of a fit what each rank did.
        timeout: for collectives.
        **kwargs: as every Lightning strategy takes them.

    Raises:
        HeteroError: listing every argument that is no valid one.
    """

    strategy_name = "hetero_auto"

    def __init__(
        self,
        cluster: Cluster | str | Path | None = None,
        *,
        global_batch_size: int | None = None,
        fsdp: Mapping[str, Any] | None = None,
        pipe: Mapping[str, Any] | None = None,
        summary: bool = True,
        timeout: timedelta = timedelta(minutes=30),
        **kwargs: Any,
    ) -> None:
        super().__init__(cluster, timeout=timeout, **kwargs)
        common: dict[str, Any] = {"global_batch_size": global_batch_size, "summary": summary, "timeout": timeout}
        # made now, so that bad arguments are told before any process starts
        self._fsdp = HeteroFSDPStrategy(self.cluster, **common, **(fsdp or {}))
        self._pipe = HeteroPipelineStrategy(self.cluster, **common, **(pipe or {}))
        self.reason = ""

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """Each rank loads its own part."""
        return True

    def process_dataloader(self, dataloader: object) -> object:
        """Read as pipelines would, until it is decided."""
        return self._pipe.process_dataloader(dataloader)

    def backend_for(self, device: torch.device) -> str:
        """Return what hetero_fsdp needs; it is made before anything is chosen, and does for hetero_pipe, too."""
        return self._fsdp.backend_for(device)

    def setup(self, trainer: pl.Trainer) -> None:
        """Choose, hand the Trainer over, and let the chosen one set up."""
        module = self.lightning_module
        assert module is not None
        if self.cluster is None:
            self.cluster = self.broadcast(Cluster.discover())
        watch = self._watch
        self._pipe.adopt(self)
        use_pipe, self.reason = self._choose(trainer, module)
        rank_zero_info(f"hetero_auto: {self.reason}")
        chosen: HeteroStrategy = self._pipe
        if not use_pipe:
            self._pipe.leave_environment()
            self._watch = watch
            self._fsdp.adopt(self)
            self._fsdp.companions.check()
            chosen = self._fsdp
            lightning_adapter.forget_train_dataloader(trainer)
        lightning_adapter.use_strategy(trainer, chosen)
        chosen.setup(trainer)

    def _choose(self, trainer: pl.Trainer, module: pl.LightningModule) -> tuple[bool, str]:
        """Return whether it is hetero_pipe, and why (a collective)."""
        if trainer.state.fn != TrainerFn.FITTING:
            return False, "hetero_fsdp, since nothing is trained"
        if not module.automatic_optimization:
            return False, "hetero_fsdp, since a pipeline cannot run manual optimization"
        try:
            basis = self._pipe.find_basis(trainer, module)
        except UnsupportedError as error:
            return False, f"hetero_fsdp, since the model cannot be split into stages: {error}"
        shard = self._attempt(lambda: plan_shard(basis.cluster, basis.costs, basis.training))
        pipe = self._attempt(lambda: planning.make_plan(self._pipe, basis))
        return decide(shard, pipe)

    def _attempt(self, make: Any) -> Any:
        try:
            return make()
        except InfeasibleError as error:
            return error


def decide(shard: ShardPlan | InfeasibleError, pipe: PipelinePlan | InfeasibleError) -> tuple[bool, str]:
    """Whether to run as a pipeline, and why.

    Raises:
        HeteroError: if neither fits.
    """
    if isinstance(shard, InfeasibleError) and isinstance(pipe, InfeasibleError):
        raise HeteroError(f"neither hetero_fsdp nor hetero_pipe fits.\nhetero_fsdp: {shard}\nhetero_pipe: {pipe}")
    if isinstance(shard, InfeasibleError):
        return True, f"hetero_pipe, since hetero_fsdp does not fit: {_first_line(shard)}"
    if isinstance(pipe, InfeasibleError):
        return False, f"hetero_fsdp, since hetero_pipe does not fit: {_first_line(pipe)}"
    shard_s, pipe_s = shard.predicted_step_s or 0.0, pipe.predicted_step_s or 0.0
    use_pipe = pipe_s < shard_s
    names = ("hetero_pipe", "hetero_fsdp") if use_pipe else ("hetero_fsdp", "hetero_pipe")
    less, more = sorted((shard_s, pipe_s))
    return use_pipe, (
        f"{names[0]}, since its step is predicted to take {format_seconds(less)}, and that of {names[1]} "
        f"{format_seconds(more)}"
    )


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0]
