"""``--cluster``: a file, or a cluster that comes with the package; and devices as a command line has them."""

from __future__ import annotations

import argparse
import re
from dataclasses import replace

from lightning_hetero.cluster import Cluster, Device
from lightning_hetero.cluster.bundled_clusters import bundled_names
from lightning_hetero.cluster.peaks import near_names, preset_for
from lightning_hetero.costs import ModelCosts
from lightning_hetero.errors import HeteroError
from lightning_hetero.units import format_flops_per_s, parse_flops_per_s

_DEVICES = re.compile(r"([1-9][0-9]*)x([^@]+?)(?:@(.+))?")


def add_cluster_argument(parser: argparse.ArgumentParser) -> None:
    """Add ``--cluster``."""
    parser.add_argument(
        "--cluster",
        required=True,
        metavar="FILE|NAME",
        help='cluster file (YAML), of "discover" or written by hand; or one that comes with the package, by public '
        f"figures: {', '.join(bundled_names())}",
    )


def devices_of(text: str, node: str, cluster: Cluster, costs: ModelCosts | None = None) -> list[Device]:
    """The devices of a node to be added, from ``8xA100-80GB`` or ``4xL4@40TFLOP/s``.

    A type that the cluster has is taken as there; it has no second speed. Of another one memory is the known type's,
    and speed what is written behind the ``@``, unless the costs have its seconds.

    Args:
        text: number, type and, where it is needed, speed.
        node: name of the new node.
        cluster: whose types are known.
        costs: whose seconds may stand in for a speed.

    Raises:
        HeteroError: if the text cannot be read, memory or speed are not known, or the cluster has the type with another
            speed; with what to write.
    """
    found = _DEVICES.fullmatch(text.strip())
    if found is None:
        raise HeteroError(f"{text!r} is no node: write number and type, such as 8xA100-80GB, or 4xL4@40TFLOP/s")
    count, preset = int(found[1]), preset_for(found[2])
    kind = found[2].strip() if preset is None else preset.type
    try:
        speed = None if found[3] is None else parse_flops_per_s(found[3])
    except HeteroError as error:
        raise HeteroError(f"{text!r}: {error}") from None
    like = next((device for device in cluster.devices if device.type == kind), None)
    if like is not None:
        if speed not in (None, like.speed_flops_per_s):
            has = "no speed" if like.speed_flops_per_s is None else format_flops_per_s(like.speed_flops_per_s)
            raise HeteroError(
                f"{text!r}: {kind} of cluster {cluster.name!r} has {has}, and plans take one speed for each type: "
                "leave the speed out, or write a cluster file that gives these devices a type of their own"
            )
        return [replace(like, node=node, uuid=None)] * count
    if preset is None:
        near = near_names(kind)
        hint = f"; nearest known ones: {', '.join(near)}" if near else ""
        raise HeteroError(
            f"{text!r}: type {kind!r} is neither in cluster {cluster.name!r} nor known, so its memory is not{hint}; "
            "write a known type, or a cluster file that has it"
        )
    if speed is None and (costs is None or kind not in costs.timed_types):
        raise HeteroError(
            f"{text!r}: the speed of {kind} is not known: write what it reaches, such as "
            f"{count}x{kind}@100TFLOP/s, or give costs that were measured on it"
        )
    return [Device(kind, node, preset.memory_bytes, speed)] * count
