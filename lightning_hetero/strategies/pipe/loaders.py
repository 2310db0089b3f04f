"""The user's loaders, as pipelines read them: each pipeline its share of a global batch, once."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import TYPE_CHECKING, Any, cast

from lightning.pytorch.trainer.states import TrainerFn
from torch.utils.data import BatchSampler, DataLoader

from lightning_hetero.data import UnevenLoader, batch_size_of, can_be_split, default_seed
from lightning_hetero.errors import DataError
from lightning_hetero.kept import UsersBatches, length_of
from lightning_hetero.plan import PipelinePlan, even_parts
from lightning_hetero.strategies import lightning_adapter
from lightning_hetero.strategies.loaders import EVAL_STAGES
from lightning_hetero.strategies.pipe.nested import cut_whole
from lightning_hetero.strategies.pipe.reading import Reader

if TYPE_CHECKING:
    from lightning_hetero.strategies.pipeline import HeteroPipelineStrategy


class PipeLoaders:
    """Turns the user's loaders into ones of pipelines.

    A pipeline is to the sampler what a rank is elsewhere: it has its samples of each global batch. One of its ranks
    reads them and hands them on: the last, or the first where batches are the user's own.

    Args:
        strategy: whose plan says the shares.
        global_batch_size: as the user gave it.
    """

    def __init__(self, strategy: HeteroPipelineStrategy, global_batch_size: int | None) -> None:
        self.strategy = strategy
        self._asked = global_batch_size
        self.global_batch_size = global_batch_size
        self.train: UnevenLoader | WholeBatches | None = None
        self._plan: PipelinePlan | None = None
        self._made_for_evaluation = False  # without knowing what global batch a fit has
        self.train_sizes: deque[tuple[int, ...]] = deque()
        self.eval_sizes: deque[tuple[int, ...]] = deque()

    def use_plan(self, plan: PipelinePlan) -> None:
        """Read by this plan from now on.

        Raises:
            DataError: if it was made for another global batch than is asked for.
        """
        if self._asked is not None and self._asked != plan.global_batch_size:
            raise DataError(
                f"global_batch_size={self._asked}, but the plan was made for {plan.global_batch_size}: leave one out"
            )
        self._plan = plan
        self.global_batch_size = plan.global_batch_size
        module = self.strategy.lightning_module
        fitting = module is None or module.trainer.state.fn == TrainerFn.FITTING
        self._made_for_evaluation = not (fitting or self.strategy.plan_is_given or self._asked is not None)

    def keep_global_batch(self, saved: int) -> None:
        """Take a checkpoint's global batch, unless another one was asked for; before anything is planned."""
        if self._asked is None:
            self._asked = self.global_batch_size = saved

    def process(self, loader: Any) -> Any:
        """Return what Lightning is to iterate in place of ``loader``."""
        strategy = self.strategy
        assert strategy.lightning_module is not None
        trainer = strategy.lightning_module.trainer
        evaluating = trainer.state.stage in EVAL_STAGES
        loader = lightning_adapter.without_index_tracking(loader)
        announce = self.eval_sizes.append if evaluating else self.train_sizes.append
        made: UnevenLoader | WholeBatches
        if can_be_split(loader) and not lightning_adapter.users_samplers_kept(trainer):
            made = self._split(loader, evaluating, announce, predicting=trainer.predicting)
        else:
            whole = WholeBatches if length_of(loader) is None else SizedWholeBatches
            made = whole(self, loader, announce, training=not evaluating)
        if not evaluating:
            made.on_start = self.train_sizes.clear
            self.train = made
        return made

    def _split(self, loader: DataLoader[Any], evaluating: bool, announce: Any, predicting: bool) -> UnevenLoader:
        strategy = self.strategy
        size = cast(BatchSampler, loader.batch_sampler).batch_size * strategy.world_size
        if not evaluating:
            self._refuse_another_batch(size)
            size = self.global_batch_size = self.global_batch_size or size
        made = UnevenLoader(
            loader,
            rank=0,
            global_batch_size=size,
            split=self._shares,
            seed=default_seed(),
            announce=announce,
            agree=strategy.gather_numbers,
            micro_batches=None if evaluating else self._micro_batches,
            micro_samples=None if evaluating else lambda: self.plan.micro_batch_size,
            share=self.share,
        )
        sampler = made.uneven
        made.on_iteration = lambda: setattr(sampler, "rank", strategy.pipeline_index())
        if predicting:
            lightning_adapter.track_indices(made)
        return made

    def _refuse_another_batch(self, size: int) -> None:
        """A plan that this run has made holds for its global batch alone; without a word it would go on with that."""
        if self._plan is None or self._asked is not None or self.strategy.plan_is_given:
            return
        if size == self.global_batch_size:
            return
        if self._made_for_evaluation:
            raise DataError(
                "the model was cut when it was evaluated, before it was known that its global "
                f"batch is to be {size}: pass global_batch_size={size} to the strategy, or fit first"
            )
        raise DataError(
            f"the model was cut for a global batch of {self.global_batch_size} in an earlier fit, and this training "
            f"loader's batches make one of {size}: give it batches as large as before, pass "
            f"global_batch_size={self.global_batch_size} to keep that one, or build module and Trainer anew"
        )

    def _shares(self, samples: int) -> tuple[int, ...]:
        # before there is a plan, it is made from an evaluation's first batch, whole
        return (samples,) if self._plan is None else self._plan.split(samples)

    @property
    def plan(self) -> PipelinePlan:
        """The plan, which is there before the first batch is read."""
        assert self._plan is not None
        return self._plan

    def _micro_batches(self) -> int:
        return self.plan.pipelines[self.strategy.pipeline_index()].micro_batches

    def share(self, batches: Iterable[Any]) -> Iterator[Any]:
        """Batches that a pipeline's last rank reads, which is done first with a step and so reads ahead."""
        return self.strategy.assembly.reader.batches(batches)

    def read_ahead(self) -> None:
        """Have the next training batch read, where that is asked of no stream (on all ranks alike)."""
        if isinstance(self.train, UnevenLoader):
            self.strategy.assembly.reader.read_ahead()

    def first_batch(self, samples: int) -> Any:
        """A batch of so many samples from the start of the training data, and nothing taken from it."""
        loader = self.train
        if loader is None:
            return None
        if isinstance(loader, WholeBatches):
            return loader.first_batch()
        order = loader.uneven.order
        indices = order.indices(0)[:samples]
        dataset: Any = loader.loader.dataset
        fetch = getattr(dataset, "__getitems__", None)
        collate: Any = loader.loader.collate_fn
        return collate(fetch(indices) if callable(fetch) else [dataset[i] for i in indices])

    def skip(self, batches: int, epoch: int) -> None:
        """Go on in the middle of an epoch, where a resumed fit is."""
        if batches and isinstance(self.train, UnevenLoader):
            self.train.skip(epoch, batches)


class WholeBatches(UsersBatches):
    """A loader whose batches are the user's own: each pipeline's first rank reads its own, whole, and cuts them.

    Args:
        loaders: of the strategy.
        loader: the user's.
        announce: takes every pipeline's samples of each batch.
        training: whether batches are cut into micro-batches.
    """

    def __init__(self, loaders: PipeLoaders, loader: Any, announce: Any, training: bool) -> None:
        super().__init__(loader)
        self._loaders = loaders
        self._announce, self._training = announce, training
        self._begun: Iterable[Any] | None = None  # with its first batch still in it

    def first_batch(self) -> Any:
        """The first batch, without taking it from who iterates next."""
        iterator = iter(self.loader)
        first = next(iterator, None)
        self._begun = iterator if first is None else chain([first], iterator)
        return first

    def __iter__(self) -> Iterator[Any]:
        self.on_start()
        strategy = self._loaders.strategy
        source, self._begun = self.loader if self._begun is None else self._begun, None
        for batch in Reader(strategy.assembly.first_hand).batches(source):
            size = batch_size_of(batch)
            sizes = strategy.sizes_of_pipelines(size)
            if min(sizes) < 0:
                return
            self._announce(sizes)
            yield self._cut(batch, size) if self._training else batch
        strategy.sizes_of_pipelines(-1)

    def _cut(self, batch: Any, samples: int) -> Any:
        count = -(-samples // self._loaders.plan.micro_batch_size)
        return cut_whole(batch, samples, even_parts(samples, count))


class SizedWholeBatches(WholeBatches):
    """The same, where the length is known: the shortest over the ranks, since all run as many steps."""

    def __init__(self, loaders: PipeLoaders, loader: Any, announce: Any, training: bool) -> None:
        super().__init__(loaders, loader, announce, training)
        self._length = min(loaders.strategy.gather_numbers(len(loader)))

    def __len__(self) -> int:
        return self._length
