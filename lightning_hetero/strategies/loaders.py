"""Which samples each rank reads: the user's loaders, cut by the plan's shares."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any, cast

from lightning.pytorch.trainer.states import RunningStage
from lightning.pytorch.utilities import rank_zero_info
from torch.utils.data import BatchSampler, DataLoader

from lightning_hetero.cluster import Cluster
from lightning_hetero.data import UnevenLoader, can_be_split, default_seed
from lightning_hetero.errors import DataError, UnsupportedError
from lightning_hetero.kept import KeptLoader, SizedKeptLoader, length_of
from lightning_hetero.plan import ModelKey
from lightning_hetero.strategies import lightning_adapter

if TYPE_CHECKING:
    from lightning_hetero.strategies.fsdp import HeteroFSDPStrategy

EVAL_STAGES = (
    RunningStage.VALIDATING,
    RunningStage.SANITY_CHECKING,
    RunningStage.TESTING,
    RunningStage.PREDICTING,
)
"""stages whose batches are not trained on"""


class Loaders:
    """Turns the user's loaders into uneven ones and keeps the sizes of the batches that are on their way.

    Args:
        strategy: whose plan says the shares.
        global_batch_size: as the user gave it.
    """

    def __init__(self, strategy: HeteroFSDPStrategy, global_batch_size: int | None) -> None:
        self._strategy = strategy
        self._asked = global_batch_size
        self.global_batch_size = global_batch_size
        self.train: UnevenLoader | KeptLoader | None = None
        self._train_sizes: deque[tuple[int, ...]] = deque()
        self._eval_sizes: deque[tuple[int, ...]] = deque()
        self._said: set[str] = set()

    def check_plan(self, cluster: Cluster, model: ModelKey) -> None:
        """Refuse a given plan that was made for another cluster, model or global batch."""
        plan = self._strategy.plan
        if plan is None:
            return
        plan.validate(cluster=cluster, model=model)
        if self._asked is not None and self._asked != plan.global_batch_size:
            raise DataError(
                f"global_batch_size={self._asked}, but the plan was made for {plan.global_batch_size}: leave one out"
            )
        self.global_batch_size = plan.global_batch_size

    def forget_global_batch(self) -> None:
        """Go back to what the user gave: the next training loader may say another."""
        self.global_batch_size = self._asked

    def restore_global_batch(self, saved: int) -> bool:
        """Take the global batch size of a checkpoint unless the user gave one; return whether it changed."""
        if self._asked is not None or self._strategy.plan_is_given:
            if self.global_batch_size != saved:
                rank_zero_info(
                    f"hetero_fsdp: the checkpoint was trained with a global batch of {saved}, "
                    f"this run asks for {self.global_batch_size}"
                )
            return False
        changed = self.global_batch_size not in (None, saved)
        self.global_batch_size = saved
        return changed

    # -- from Lightning's loaders to ours ------------------------------------------------------------------------------

    def process(self, loader: Any) -> Any:
        """Return what Lightning is to iterate in place of ``loader``."""
        assert self._strategy.lightning_module is not None
        trainer = self._strategy.lightning_module.trainer
        evaluating = trainer.state.stage in EVAL_STAGES
        micro_batches = self._strategy.most_micro_batches()
        announce = self._eval_sizes.append if evaluating else self._announce_train
        agree = self._strategy.gather_numbers
        loader = lightning_adapter.without_index_tracking(loader)
        if can_be_split(loader) and not lightning_adapter.users_samplers_kept(trainer):
            loader = self._split(loader, evaluating, predicting=trainer.predicting)
        else:
            self._say_kept(loader)
            if not evaluating and micro_batches > 1:
                raise UnsupportedError(
                    f"the plan cuts a step into {micro_batches} micro-batches, but the batches of "
                    f"{type(loader).__name__} are kept as each rank makes them: set micro_batches to 1 in the plan, or "
                    "use a map-style dataset"
                )
            kept = KeptLoader if length_of(loader) is None else SizedKeptLoader
            loader = kept(loader, announce=announce, agree=agree)
        if not evaluating:
            # what an epoch read ahead and did not use (a limit, a hook that returned -1) is not the next one's
            loader.on_start = self._train_sizes.clear
            self.train = loader
        return loader

    def _split(self, loader: DataLoader[Any], evaluating: bool, predicting: bool) -> UnevenLoader:
        strategy = self._strategy
        size = cast(BatchSampler, loader.batch_sampler).batch_size * strategy.world_size
        if not evaluating:
            size = self.global_batch_size = self.global_batch_size or size
        if size < strategy.world_size:
            raise DataError(
                f"the global batch of {size} samples is smaller than the number of ranks, {strategy.world_size}: "
                f"set global_batch_size to {strategy.world_size} or more, or use fewer devices"
            )
        uneven = UnevenLoader(
            loader,
            rank=strategy.global_rank,
            global_batch_size=size,
            split=strategy.split,
            seed=default_seed(),
            announce=self._eval_sizes.append if evaluating else self._announce_train,
            agree=strategy.gather_numbers,
            micro_batches=None if evaluating else strategy.micro_batches_per_step,
            split_at=None if evaluating else strategy.split_at,
        )
        if predicting:
            lightning_adapter.track_indices(uneven)
        return uneven

    def _announce_train(self, sizes: tuple[int, ...]) -> None:
        self._train_sizes.append(sizes)

    def _say_kept(self, loader: Any) -> None:
        if "kept" in self._said:
            return
        self._said.add("kept")
        rank_zero_info(
            f"hetero_fsdp keeps the batches of {type(loader).__name__} as each rank makes them (an iterable dataset, a "
            "batch sampler of your own, or use_distributed_sampler=False): each step is weighted by their sizes, and "
            "an epoch ends with the rank that has fewest. Make it give each rank other samples."
        )

    # -- sizes of the batch at hand ------------------------------------------------------------------------------------

    def next_train_sizes(self) -> tuple[int, ...]:
        """Return every rank's samples of the training batch that starts now."""
        return self._train_sizes.popleft()

    def next_eval_sizes(self) -> tuple[int, ...] | None:
        """Return every rank's samples of the evaluation batch that starts now."""
        return self._eval_sizes.popleft() if self._eval_sizes else None

    def clear(self, evaluating: bool) -> None:
        """Forget the sizes of batches that were read ahead and not used."""
        (self._eval_sizes if evaluating else self._train_sizes).clear()
