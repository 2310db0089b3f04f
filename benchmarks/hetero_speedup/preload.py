"""What the ranks' fork server imports once for all arms. Imports nothing heavy itself, so that it can come first."""

from __future__ import annotations

import multiprocessing
from multiprocessing import forkserver

PRELOAD = [
    "torch",
    "torch._dynamo",
    "torch.distributed.fsdp",
    "lightning.pytorch",
    "timm",
    "sklearn.datasets",
    "benchmarks.hetero_speedup.arms",
]


def preload(*modules: str) -> None:
    """Start the fork server now, with further modules to import; before the first arm starts.

    It imports beside whatever the conductor does until then.
    """
    PRELOAD.extend(module for module in modules if module not in PRELOAD)
    multiprocessing.get_context("forkserver").set_forkserver_preload(PRELOAD)
    forkserver.ensure_running()
