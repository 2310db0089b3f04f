"""Clusters that come with the package, by name: starting points, with the source of every number in each file."""

from __future__ import annotations

import os
from functools import lru_cache
from pathlib import Path

from lightning_hetero.cluster.cluster import Cluster
from lightning_hetero.errors import ClusterError

FOLDER = Path(__file__).parent / "bundled"


@lru_cache(maxsize=1)
def bundled_names() -> tuple[str, ...]:
    """The names, in alphabetical order."""
    return tuple(sorted(path.stem for path in FOLDER.glob("*.yaml")))


def load_cluster(name: str | os.PathLike[str]) -> Cluster:
    """A cluster from a file, or a bundled one by its name; a file of that name comes first.

    Args:
        name: path of a cluster file, or one of :func:`bundled_names`.

    Raises:
        ClusterError: if it is neither; or listing every problem of the file.
    """
    path = Path(name)
    if not path.exists() and str(name) in bundled_names():
        path = FOLDER / f"{name}.yaml"
    elif not path.exists():
        known = ", ".join(bundled_names())
        raise ClusterError(
            f"cluster file {path} does not exist (looked in {path.absolute().parent}), and no bundled cluster has this "
            f"name: give the path of a cluster file, or one of {known}"
        )
    return Cluster.from_yaml(path)
