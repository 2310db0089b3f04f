"""The strategies: what runs a plan under Lightning."""

from lightning.pytorch.strategies import StrategyRegistry

from lightning_hetero.strategies.fsdp import HeteroFSDPStrategy

__all__ = ["HeteroFSDPStrategy", "register"]


def register() -> None:
    """Give the strategies their names for ``Trainer(strategy=...)``; a second call changes nothing."""
    for strategy in (HeteroFSDPStrategy,):
        if strategy.strategy_name not in StrategyRegistry.available_strategies():
            StrategyRegistry.register(
                strategy.strategy_name, strategy, description=(strategy.__doc__ or "").splitlines()[0]
            )
