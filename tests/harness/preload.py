"""What the forkserver imports before any rank is forked: everything slow, nothing that starts threads."""

import lightning.pytorch
import numpy
import pytest
import timm
import torch
import torch._dynamo  # lightning and FSDP2 import it on first use: 1 s in every rank otherwise
import torch.distributed.checkpoint
import torch.distributed.checkpoint.state_dict
import torch.distributed.fsdp
import torch.distributed.tensor
import yaml
from torch.distributed import _composable

import lightning_hetero.strategies

__all__ = ["_composable", "lightning", "lightning_hetero", "numpy", "pytest", "timm", "torch", "yaml"]
