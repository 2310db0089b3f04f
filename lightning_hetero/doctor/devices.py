"""Check: every rank has a device of its own, and all are of one vendor."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from lightning_hetero.doctor.facts import DeviceFacts, RankFacts
from lightning_hetero.doctor.finding import Finding
from lightning_hetero.doctor.places import device_place, grouped, places

CHECK = "devices"

_HIDING = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")


def check_devices(ranks: Sequence[RankFacts]) -> list[Finding]:
    """Vendors that cannot train together, ranks without a device, and devices that are not seen or shared."""
    return [*_vendors(ranks), *_without(ranks), *_unseen(ranks), *_shared(ranks), *_modes(ranks)]


def _vendors(ranks: Sequence[RankFacts]) -> Iterator[Finding]:
    cuda, rocm = ([r for r in ranks if any(d.kind == kind for d in r.devices)] for kind in ("cuda", "rocm"))
    if cuda and rocm:
        yield Finding(
            "error",
            CHECK,
            places(ranks),
            f"CUDA on {places(cuda)}, ROCm on {places(rocm)}: impossible in one group, since NCCL and RCCL do not talk "
            "to each other and torch is built for one of them",
            "train on the devices of one vendor: start ranks on those nodes only",
        )


def _without(ranks: Sequence[RankFacts]) -> Iterator[Finding]:
    without = [facts for facts in ranks if not facts.has_gpu]
    broken = [facts for facts in without if any(name.startswith("GPU ") for name in facts.unchecked)]
    crowded = [facts for facts in without if facts.visible_devices and facts not in broken]
    for facts in crowded:
        yield Finding(
            "error",
            CHECK,
            places([facts]),
            f"local rank {facts.local_rank} has no GPU of its own: this process sees {facts.visible_devices}"
            + _hidden_by(facts),
            "start as many ranks on this node as it has GPUs, and let each of them see all of the node's GPUs",
        )
    blind = [facts for facts in without if not facts.visible_devices]
    if blind and len(without) < len(ranks):
        yield Finding(
            "error",
            CHECK,
            places(blind),
            "no GPU here, while other ranks have one: ranks on GPUs and on processors cannot form one group",
            "see that nvidia-smi or rocm-smi lists the GPUs there and that torch is a build for them, or leave these "
            "ranks out",
        )


def _unseen(ranks: Sequence[RankFacts]) -> Iterator[Finding]:
    for facts in ranks:
        if facts.visible_devices or not facts.driver_devices:
            continue
        hidden = _hidden_by(facts)
        said = f" ({'; '.join(facts.torch_says)})" if facts.torch_says else ""
        built = facts.versions.get("cuda") or facts.versions.get("rocm")
        torch_text = f"torch {facts.versions.get('torch', '')}, built for {built or 'processors only'},"
        yield Finding(
            "warning",
            CHECK,
            places([facts]),
            f"the driver lists {facts.driver_devices} GPUs, {torch_text} sees none{hidden}{said}: "
            "training would run on the processor",
            "unset that variable to use them"
            if hidden
            else "install a torch that this driver can run, or a newer driver",
        )


def _shared(ranks: Sequence[RankFacts]) -> Iterator[Finding]:
    owners: dict[tuple[str, str], list[RankFacts]] = {}
    for facts in ranks:
        for device in facts.devices:
            if device.uuid is not None:
                owners.setdefault((facts.node, device.uuid), []).append(facts)
    for (_, uuid), those in owners.items():
        if len(those) > 1:
            yield Finding(
                "error",
                CHECK,
                places(those),
                f"they have one and the same GPU ({uuid}): NCCL refuses two ranks on a device",
                "give every rank its own: let each see all of the node's GPUs, and start one rank for each",
            )


def _modes(ranks: Sequence[RankFacts]) -> Iterator[Finding]:
    for facts, device in each_device(ranks):
        if device.driver is not None and device.driver.mode == "Prohibited":
            what = "its compute mode is Prohibited: no process may use it"
            step = f"as administrator: nvidia-smi -i {device.uuid or device.index} -c DEFAULT"
            yield Finding("error", CHECK, device_place(facts, device), what, step)


def _hidden_by(facts: RankFacts) -> str:
    named = [f"{name}={facts.environment[name]!r}" for name in _HIDING if name in facts.environment]
    return f", with {', '.join(named)}" if named else ""


def each_device(ranks: Sequence[RankFacts]) -> Iterator[tuple[RankFacts, DeviceFacts]]:
    """Every device with the facts of its rank; one that several ranks have, once."""
    seen: set[tuple[str, str | int]] = set()
    for node, here in grouped(ranks, lambda each: each.node).items():
        for facts in here:
            for device in facts.devices:
                name = device.uuid or f"rank {facts.rank} index {device.index}"
                if (node, name) not in seen:
                    seen.add((node, name))
                    yield facts, device
