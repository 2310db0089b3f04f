"""Read a cluster file. Every problem is found before one error lists them all."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from lightning_hetero.cluster.device import Device
from lightning_hetero.cluster.link import Fabric, Link
from lightning_hetero.cluster.peaks import near_names, preset_for
from lightning_hetero.cluster.speed_change import SpeedChange, schedule_problems
from lightning_hetero.errors import ClusterError, HeteroError
from lightning_hetero.records import Record, boolean, integer, number, optional, read_text, shown, text
from lightning_hetero.units import parse_bytes, parse_bytes_per_s, parse_flops_per_s, parse_seconds

SCHEMA = 1

_NEXT_STEP = "give the path of a cluster file, or make one with Cluster.discover().to_yaml(path)"


@dataclass(frozen=True)
class Content:
    """What a cluster file says; the fields are those of ``Cluster``."""

    name: str
    devices: tuple[Device, ...]
    within_node: Link | None
    between_nodes: Link | None
    emulate: bool
    within_pair: Link | None


def read_file(path: Path) -> tuple[Content, str]:
    """What a YAML file says, and how to name it in errors; raises ``ClusterError`` listing every problem."""
    content = read_text(path, "cluster file", ClusterError, _NEXT_STEP)
    try:
        data = yaml.load(content, Loader=_UniqueKeys)
    except yaml.YAMLError as error:
        raise ClusterError(f"cluster file {path} is not YAML: {_one_line(error)}: correct that line") from None
    return read_data(data, f"cluster file {path}"), f"cluster file {path}"


def read_data(data: object, source: str) -> Content:
    """What the plain data of a cluster file says; ``source`` names it in the error."""
    record = Record(source, ClusterError)
    top = record.mapping(data, "", ["schema", "name", "nodes"], ["emulate", "links"])
    if top is None:
        record.finish()
        raise AssertionError("a record that is no mapping must have been refused")
    if "schema" in top and top["schema"] != SCHEMA:
        record.note("schema", f"is {shown(top['schema'])}: this version reads schema {SCHEMA}, write schema: 1")
    name = record.take(top, "name", "", text, "")
    emulate = record.take(top, "emulate", "", boolean, False)
    devices = _read_nodes(record, top["nodes"], emulate) if "nodes" in top else []
    links = _read_links(record, top.get("links"))
    record.finish()
    return Content(name, tuple(devices), emulate=emulate, **links)


def _read_nodes(record: Record, value: object, emulate: bool) -> list[Device]:
    devices: list[Device] = []
    places: dict[str, str] = {}
    for place, item in record.items(value, "nodes", "node"):
        node = record.mapping(item, place, ["name", "devices"])
        if node is None:
            continue
        name = record.take(node, "name", place, text, "")
        if name and name in places:
            record.note(f"{place}.name", f"{name!r} is also the name of {places[name]}: give every node its own")
        places.setdefault(name, place)
        if "devices" in node:
            for device_place, entry in record.items(node["devices"], f"{place}.devices", "device"):
                devices += _read_devices(record, entry, device_place, name, emulate)
    return devices


def _read_devices(record: Record, value: object, place: str, node: str, emulate: bool) -> list[Device]:
    """The devices of one entry: ``count`` equal ones. Empty if a problem was noted."""
    noted = len(record.problems)
    known = ["count", "memory", "speed", "true_speed", "speed_schedule", "name", "uuid"]
    entry = record.mapping(value, place, ["type"], known)
    if entry is None:
        return []
    kind = record.take(entry, "type", place, text, "")
    count = record.take(entry, "count", place, integer(1), 1)
    memory = record.take(entry, "memory", place, parse_bytes, None)
    speed = record.take(entry, "speed", place, parse_flops_per_s, None)
    true_speed = record.take(entry, "true_speed", place, parse_flops_per_s, None)
    schedule = _read_schedule(record, entry, place)
    name = record.take(entry, "name", place, optional(text), None)
    uuid = record.take(entry, "uuid", place, optional(text), None)
    preset = preset_for(kind)
    if "memory" not in entry:
        memory = preset.memory_bytes if preset else None
        if kind and preset is None:
            near = near_names(kind)
            hint = f" or use a known type (nearest: {', '.join(near)})" if near else " (the type is not a known one)"
            record.note(place, f"key 'memory' is missing: write one, such as memory: 2 GiB,{hint}")
    if emulate and "speed" not in entry:
        record.note(place, "key 'speed' is missing: with emulate: true write one, such as speed: 6 GFLOP/s")
    if schedule and not emulate:
        record.note(f"{place}.speed_schedule", "only emulated devices follow one: leave it out, or set emulate: true")
    if uuid is not None and count > 1:
        record.note(f"{place}.uuid", f"{uuid!r} is given for count {count}: write one entry per device")
    if len(record.problems) > noted or memory is None:
        return []
    return [Device(kind, node or "?", memory, speed, true_speed, name, uuid, schedule)] * count


def _read_schedule(record: Record, entry: dict[str, Any], place: str) -> tuple[SpeedChange, ...]:
    if entry.get("speed_schedule") is None:
        return ()
    noted, found = len(record.problems), []
    for item_place, item in record.items(entry["speed_schedule"], f"{place}.speed_schedule", "change"):
        change = record.mapping(item, item_place, ["step", "factor"]) or {}
        step = record.take(change, "step", item_place, integer(0), 0)
        factor = record.take(change, "factor", item_place, _positive, 1.0)
        found.append(SpeedChange(step, factor))
    if len(record.problems) == noted:
        for problem in schedule_problems(found):
            record.note(place, problem)
    return tuple(found)


def _positive(value: object) -> float:
    factor = number(0)(value)
    if factor == 0:
        raise HeteroError("0 is not valid: write a number above 0, such as 0.5")
    return factor


_LINKS = ("within_pair", "within_node", "between_nodes")


def _read_links(record: Record, value: object) -> dict[str, Link | None]:
    links = None if value is None else record.mapping(value, "links", [], _LINKS)
    return {key: _read_link(record, links or {}, key) for key in _LINKS}


def _read_link(record: Record, links: dict[str, Any], key: str) -> Link | None:
    if links.get(key) is None:
        return None
    place = f"links.{key}"
    shared = ["nics", "half_bandwidth_nodes"] if key == "between_nodes" else []
    link = record.mapping(links[key], place, ["bandwidth", "latency"], shared)
    if link is None:
        return None
    bandwidth = record.take(link, "bandwidth", place, parse_bytes_per_s, None)
    latency = record.take(link, "latency", place, parse_seconds, None)
    nics = record.take(link, "nics", place, integer(1), 1)
    half = record.take(link, "half_bandwidth_nodes", place, _positive, None)
    if bandwidth is None or latency is None:
        return None
    return Fabric(bandwidth, latency, nics, half) if set(shared) & set(link) else Link(bandwidth, latency)


class _UniqueKeys(yaml.SafeLoader):
    """YAML's own loader keeps the last of two equal keys without a word."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if key.value in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key.value!r} is written twice", key.start_mark
                )
            if isinstance(key.value, str):
                seen.add(key.value)
        return super().construct_mapping(node, deep)


def _one_line(error: yaml.YAMLError) -> str:
    mark = getattr(error, "problem_mark", None)
    problem = getattr(error, "problem", None) or str(error).splitlines()[0]
    return f"{problem} in line {mark.line + 1}, column {mark.column + 1}" if mark else problem
