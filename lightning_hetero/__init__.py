"""Train one model at the summed speed of unequal devices, under PyTorch Lightning.

Importing this package registers the strategy names::

    import lightning_hetero
    Trainer(strategy="hetero_fsdp").fit(model, data)

It imports neither torch nor Lightning by itself: names are registered once Lightning is imported, before or after.
Planning needs no torch: without it, the cluster, costs, plan, planner and simulator parts still import and work.
"""

from __future__ import annotations

from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from lightning_hetero.cluster import Cluster, Device, Link, discovery
from lightning_hetero.costs import ModelCosts
from lightning_hetero.errors import HeteroError
from lightning_hetero.late import after_import
from lightning_hetero.plan import PipelinePlan, ShardPlan

if TYPE_CHECKING:
    from lightning_hetero.callbacks import (
        EmulatedDevices,
        RankEnergy,
        RankMemory,
        RankThroughput,
        StragglerMonitor,
    )
    from lightning_hetero.strategies import (
        HeteroAutoStrategy,
        HeteroFSDPStrategy,
        HeteroPipelineStrategy,
        Rebalance,
    )

__version__ = "0.1.0"

__all__ = [
    "Cluster",
    "Device",
    "HeteroError",
    "Link",
    "ModelCosts",
    "PipelinePlan",
    "ShardPlan",
    "__version__",
]

_LATER = {
    "EmulatedDevices": "callbacks",
    "HeteroAutoStrategy": "strategies",
    "HeteroFSDPStrategy": "strategies",
    "HeteroPipelineStrategy": "strategies",
    "RankEnergy": "callbacks",
    "RankMemory": "callbacks",
    "RankThroughput": "callbacks",
    "Rebalance": "strategies",
    "StragglerMonitor": "callbacks",
}
"""names that need torch and Lightning, and where they are"""

_STRATEGIES = {
    "hetero_fsdp": ("HeteroFSDPStrategy", "FSDP2 with batch shares by measured speed"),
    "hetero_auto": ("HeteroAutoStrategy", "hetero_fsdp or hetero_pipe, whichever is predicted faster"),
    "hetero_pipe": ("HeteroPipelineStrategy", "a model cut into pipeline stages by measured time and memory"),
}
"""names for ``Trainer(strategy=...)``"""


def __getattr__(name: str) -> Any:
    if name in _LATER:
        return getattr(import_module(f"{__name__}.{_LATER[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _register_strategies() -> None:
    """Tell Lightning the names; what they stand for is imported when a Trainer asks for it."""
    registry = import_module("lightning.pytorch.strategies").StrategyRegistry
    for name, (strategy, description) in _STRATEGIES.items():
        if name not in registry.available_strategies():
            registry.register(name, partial(_make, strategy), description=description)


def _make(strategy: str, **arguments: Any) -> Any:
    return __getattr__(strategy)(**arguments)


def _discover(*, dtype: str, measure_speed: bool, measure_links: bool) -> Cluster:
    devices = import_module(f"{__name__}.profiler.devices")
    found: Cluster = devices.discover(dtype=dtype, measure_speed=measure_speed, measure_links=measure_links)
    return found


if find_spec("torch") is not None and find_spec("lightning") is not None:
    __all__ += [
        "EmulatedDevices",
        "HeteroAutoStrategy",
        "HeteroFSDPStrategy",
        "HeteroPipelineStrategy",
        "RankEnergy",
        "RankMemory",
        "RankThroughput",
        "Rebalance",
        "StragglerMonitor",
    ]
    discovery.register(_discover)
    after_import("lightning.pytorch", _register_strategies)
