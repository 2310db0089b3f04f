"""The strategies: what runs a plan under Lightning."""

from lightning_hetero.strategies.auto import HeteroAutoStrategy
from lightning_hetero.strategies.fsdp import HeteroFSDPStrategy
from lightning_hetero.strategies.pipeline import HeteroPipelineStrategy
from lightning_hetero.strategies.rebalance import Rebalance

__all__ = ["HeteroAutoStrategy", "HeteroFSDPStrategy", "HeteroPipelineStrategy", "Rebalance"]
