"""A small file cache of what was measured: one JSON file per key, in the user's cache folder."""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from lightning_hetero.cluster import Device
from lightning_hetero.profiler.calls import dtype_name
from lightning_hetero.profiler.memory import tensors_in
from lightning_hetero.profiler.structure import structure_hash
from lightning_hetero.records import write_json

SCHEMA = 2

VARIABLE = "LIGHTNING_HETERO_CACHE"
"""environment variable: the folder of the cache, or ``off``"""

MAX_AGE_S = 7 * 24 * 3600.0
"""older measurements are taken again: drivers, clocks and neighbours change"""

_log = logging.getLogger("lightning_hetero")

T = TypeVar("T")


@dataclass(frozen=True)
class CacheKey:
    """What a measurement depends on; two that are equal may share one.

    Args:
        model: its name.
        parameters: their number.
        structure: :func:`~lightning_hetero.profiler.structure.structure_hash` of the module.
        inputs: shape and dtype of every tensor of a batch, per sample ("float32[3, 224, 224]").
        dtype: precision of the training ("32-true", "bf16-mixed").
        device_type: by which the device is planned.
        device: its UUID, else what it calls itself, else its type.
        emulated_flops_per_s: speed that it really emulates; ``None`` for a real device.
        conditions: whatever else a measurement depends on, as texts (ranks, checkpointing, optimizer).
        torch: version of torch.
    """

    model: str
    parameters: int
    structure: str
    inputs: tuple[str, ...]
    dtype: str
    device_type: str
    device: str
    emulated_flops_per_s: float | None = None
    conditions: Mapping[str, str] = field(default_factory=dict)
    torch: str = torch.__version__

    @classmethod
    def of(
        cls,
        model: str,
        module: nn.Module,
        batch: Any,
        *,
        dtype: str,
        device: Device,
        emulate: bool = False,
        conditions: Mapping[str, object] | None = None,
    ) -> CacheKey:
        """The key of a module, a batch and a device.

        Args:
            model: name of the model.
            module: sharded or not.
            batch: as a step takes it; its tensors' shapes without the first dimension count.
            dtype: precision of the training.
            device: of this rank.
            emulate: whether it is emulated.
            conditions: whatever else the measurement depends on; values are compared as texts.
        """
        return cls(
            model=model,
            parameters=sum(parameter.numel() for parameter in module.parameters()),
            structure=structure_hash(module),
            inputs=tuple(f"{dtype_name(each.dtype)}{list(each.shape[1:])}" for each in tensors_in(batch)),
            dtype=dtype,
            device_type=device.type,
            device=device.uuid or device.name or device.type,
            emulated_flops_per_s=device.actual_speed_flops_per_s if emulate else None,
            conditions={name: str(value) for name, value in (conditions or {}).items()},
        )

    def to_dict(self) -> dict[str, Any]:
        """As plain data."""
        return asdict(self) | {"inputs": list(self.inputs), "conditions": dict(self.conditions)}

    @property
    def file_name(self) -> str:
        """Of the file that holds its measurement."""
        text = json.dumps(self.to_dict(), sort_keys=True)
        return f"{hashlib.sha256(text.encode()).hexdigest()[:32]}.json"


class MeasurementCache:
    """Measurements by :class:`CacheKey`.

    Files are written whole or not at all, so that processes may share a folder. Nothing here raises: a file that is
    broken, too old or unreadable counts as none, with a line in the log, and one that cannot be written is left out.

    Args:
        folder: where the files are; by default ``$LIGHTNING_HETERO_CACHE``, else ``$XDG_CACHE_HOME/lightning_hetero``,
            else ``~/.cache/lightning_hetero``. ``off`` keeps nothing.
        max_age_s: seconds after which a measurement is taken again.
    """

    def __init__(self, folder: str | os.PathLike[str] | None = None, max_age_s: float = MAX_AGE_S) -> None:
        chosen = os.environ.get(VARIABLE) or None if folder is None else os.fspath(folder)
        self.folder: Path | None
        if chosen is not None:
            self.folder = None if chosen == "off" else Path(chosen).expanduser()
        else:
            base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
            self.folder = Path(base).expanduser() / "lightning_hetero"
        self.max_age_s = max_age_s

    def load(self, key: CacheKey, build: Callable[..., T]) -> T | None:
        """The measurement of ``key``, or ``None``.

        Args:
            key: what it depends on.
            build: called with the stored values by name (a dataclass); one that raises ``TypeError`` or
                ``ValueError`` makes the file count as broken.
        """
        if self.folder is None:
            return None
        path = self.folder / key.file_name
        try:
            return self._read(path, key, build)
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            _log.warning("measurements in %s are not used (%s: %s): measured again", path, type(error).__name__, error)
            return None

    def store(self, key: CacheKey, measured: Mapping[str, float | int | None]) -> None:
        """Keep a measurement: plain numbers by name, as ``dataclasses.asdict`` gives them."""
        if self.folder is None:
            return
        data = {"schema": SCHEMA, "written_s": time.time(), "key": key.to_dict(), "measured": dict(measured)}
        try:
            write_json(self.folder / key.file_name, data)
        except (OSError, ValueError) as error:
            _log.warning("measurements are not kept in %s (%s: %s)", self.folder, type(error).__name__, error)

    def _read(self, path: Path, key: CacheKey, build: Callable[..., T]) -> T | None:
        data = json.loads(path.read_text(encoding="utf-8"))
        if data["schema"] != SCHEMA:
            raise ValueError(f"schema is {data['schema']!r}, this version reads {SCHEMA}")
        if data["key"] != json.loads(json.dumps(key.to_dict())):
            raise ValueError("it is of another key")
        age_s = time.time() - data["written_s"]
        if not 0 <= age_s <= self.max_age_s:
            raise ValueError(f"it is {age_s / 86400:.1f} days old")
        for name, value in data["measured"].items():
            number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
            if value is not None and not (number and value >= 0):
                raise ValueError(f"{name} is {value!r}")
        return build(**data["measured"])
