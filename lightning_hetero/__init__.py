"""Train one model at the summed speed of unequal devices, under PyTorch Lightning.

Importing this package registers the strategy names::

    import lightning_hetero
    Trainer(strategy="hetero_fsdp").fit(model, data)

Planning needs no torch: without it, the cluster, costs, plan, planner and simulator parts still import and work.
"""

from __future__ import annotations

from lightning_hetero.cluster import Cluster, Device, Link
from lightning_hetero.costs import ModelCosts
from lightning_hetero.errors import HeteroError
from lightning_hetero.plan import PipelinePlan, ShardPlan

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
try:
    import lightning_hetero.profiler.devices  # noqa: F401  (gives Cluster.discover() its function)
    from lightning_hetero.callbacks import EmulatedDevices
    from lightning_hetero.strategies import HeteroFSDPStrategy, register
except ModuleNotFoundError as missing:
    # only these two may be missing; anything else is a fault to be seen
    if missing.name is None or missing.name.split(".")[0] not in ("torch", "lightning"):
        raise
else:
    register()
    __all__ += ["EmulatedDevices", "HeteroFSDPStrategy"]
