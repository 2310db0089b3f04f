"""The strategies: what runs a plan under Lightning."""

from lightning_hetero.strategies.fsdp import HeteroFSDPStrategy

__all__ = ["HeteroFSDPStrategy"]
