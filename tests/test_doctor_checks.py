"""The doctor's checks, on facts of machines that are not at hand."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from lightning_hetero.doctor import (
    DeviceFacts,
    DriverView,
    Finding,
    LimitFacts,
    RankFacts,
    can_start,
    examine,
)
from lightning_hetero.doctor.architectures import runs_on
from lightning_hetero.doctor.places import ranks_text
from lightning_hetero.doctor.reach import Reach
from lightning_hetero.errors import HeteroError
from lightning_hetero.profiler.busy import DeviceUser

GIB, MIB = 2**30, 2**20
ROOMY = LimitFacts(10, 2**20, 2**20, 64 * GIB, 64 * GIB, cores=16)
SOFTWARE = {
    "lightning_hetero": "0.1.0, code aaaaaaaaaaaa",
    "python": "3.11.4",
    "torch": "2.14.1+cu130",
    "lightning": "2.6.6",
    "cuda": "13.0",
    "nccl": "2.30.7",
    "driver": "580.65.06",
}
ARCHITECTURES = ("sm_70", "sm_80", "sm_90", "sm_120")


def gpu(name: str = "NVIDIA H200", architecture: str = "sm_90", index: int = 0, **driver: object) -> DeviceFacts:
    uuid = f"{name}-{index}"
    seen = DriverView(**{"uuid": f"GPU-{uuid}", "taken_bytes": 0, "utilisation": 0.0, "mode": "Default", **driver})
    kind = "rocm" if architecture.startswith("gfx") else "cuda"
    return DeviceFacts(index, name, kind, architecture, uuid, 80 * GIB, seen)


def rank(number: int, node: str = "a", device: DeviceFacts | None = None, **changed: object) -> RankFacts:
    device = device or gpu(index=number)
    software = SOFTWARE
    if device.kind == "rocm":
        software = {
            **{k: v for k, v in SOFTWARE.items() if k not in ("cuda", "nccl", "driver")},
            "torch": "2.14.1+rocm7.0",
        }
        software |= {"rocm": "7.0", "rccl": "2.27.7", "amdgpu": "6.12.12"}
    facts = RankFacts(
        number,
        node,
        local_rank=number,
        pid=1000 + number,
        versions=software,
        architectures=("gfx90a", "gfx942") if device.kind == "rocm" else ARCHITECTURES,
        devices=(device,),
        visible_devices=8,
        driver_devices=8,
        limits=ROOMY,
        port=5000 + number,
    )
    return replace(facts, **changed)


def mesh(*ranks: RankFacts) -> list[Reach]:
    """Every rank reaches every other one."""
    pairs = ((a, b) for a in ranks for b in ranks if a.rank != b.rank)
    return [Reach(a.rank, b.rank, b.node, b.port or 0, None, None, None, 0.001) for a, b in pairs]


def found(*ranks: RankFacts, **options: object) -> list[Finding]:
    return examine(ranks, mesh(*ranks), **options)


def the_one(findings: list[Finding]) -> Finding:
    assert len(findings) == 1, findings
    return findings[0]


def test_a_sound_cluster_has_no_findings():
    assert found(rank(0), rank(1), rank(2, "b"), rank(3, "b")) == []


def test_facts_survive_json():
    users = (DeviceUser(7, "python", None),)
    device = gpu(users=users, slowed_by=("hw_slowdown",), power_limit_w=300.0)
    facts = rank(3, device=device, unchecked={"driver": "x"}, environment={"NCCL_SOCKET_IFNAME": "eth0"})
    assert RankFacts.from_dict(json.loads(json.dumps(facts.to_dict()))) == facts
    bare = RankFacts(0, "a")
    assert RankFacts.from_dict(json.loads(json.dumps(bare.to_dict()))) == bare
    # another version of this package knows other things
    other = {
        "rank": 1,
        "node": "b",
        "devices": [{**gpu().__dict__, "driver": None, "new": 1}],
        "limits": {**ROOMY.__dict__, "new": 1},
    }
    read = RankFacts.from_dict(other)
    assert (read.rank, read.devices[0].name, read.limits) == (1, "NVIDIA H200", ROOMY)


def test_two_nodes_with_different_nccl_cannot_start():
    old = {**SOFTWARE, "nccl": "2.27.3"}
    findings = found(rank(0), rank(1), rank(2, "b", versions=old))
    finding = the_one(findings)
    assert (finding.level, finding.check, finding.where) == ("error", "versions", "node b (rank 2)")
    assert "nccl differs: 2.30.7 on node a (ranks 0-1); 2.27.3 on node b (rank 2)" in finding.what
    assert "refuses" in finding.what
    assert "NCCL 2.30.7" in finding.next_step
    assert not can_start(findings)


@pytest.mark.parametrize(
    ("name", "version", "level", "shown"),
    [
        ("torch", "2.11.0+cu130", "error", "torch differs: 2.14.1 on"),
        ("lightning_hetero", "0.1.0, code bbbbbbbbbbbb", "error", "code bbbbbbbbbbbb on node b"),
        ("torch", "2.14.1+cu128", "warning", "torch build differs: cu130 on node a (ranks 0-1); cu128 on"),
        ("cuda", "12.8", "warning", "cuda differs: 13.0"),
        ("driver", "550.1", "warning", "driver differs"),
        ("lightning", "2.6.1", "warning", "lightning differs"),
        ("python", "3.12.0", "warning", "python differs: 3.11 on"),
    ],
)
def test_other_versions_that_differ(name, version, level, shown):
    finding = the_one(found(rank(0), rank(1), rank(2, "b", versions={**SOFTWARE, name: version})))
    assert (finding.level, finding.check, finding.where) == (level, "versions", "node b (rank 2)")
    assert shown in finding.what
    assert finding.next_step


def test_a_patch_of_python_is_no_difference():
    assert found(rank(0), rank(1, versions={**SOFTWARE, "python": "3.11.9"})) == []


def test_processors_do_not_need_one_nccl():
    cpu = {"devices": (), "visible_devices": 0, "driver_devices": 0}
    findings = found(rank(0, **cpu), rank(1, **cpu, versions={**SOFTWARE, "nccl": "2.27.3"}))
    assert [finding.level for finding in findings] == ["note"] * 4
    assert all(not finding.checked and "torch sees no GPU there" in finding.what for finding in findings)
    assert {finding.check for finding in findings} == {"architectures", "dtypes", "busy", "clocks"}


def test_a_gpu_whose_torch_has_no_nccl():
    without = {name: version for name, version in SOFTWARE.items() if name != "nccl"}
    finding = the_one(found(rank(0), rank(1, versions=without)))
    assert (finding.level, finding.where) == ("error", "node a (rank 1)")
    assert "no NCCL" in finding.what


def test_a_wheel_up_to_sm_90_on_a_device_of_sm_120():
    device = gpu("NVIDIA GeForce RTX 5090", "sm_120")
    wheel = ("sm_70", "sm_80", "sm_90")
    finding = the_one(found(rank(0), rank(1, "b", device, architectures=wheel), precision="bf16-mixed"))
    assert (finding.level, finding.check) == ("error", "architectures")
    assert finding.where == "node b (rank 1), GPU 0 (NVIDIA GeForce RTX 5090)"
    assert "it is sm_120, and torch 2.14.1+cu130 was built for sm_70, sm_80, sm_90" in finding.what
    assert "sm_120" in finding.next_step


@pytest.mark.parametrize(
    ("architectures", "device", "expected"),
    [
        (("sm_80",), "sm_86", "yes"),  # code runs on later minor versions
        (("sm_86",), "sm_80", "no"),  # and not on earlier ones
        (("sm_80",), "sm_90", "no"),
        (("compute_80",), "sm_90", "compiled"),
        (("compute_90",), "sm_80", "no"),
        (("sm_90a",), "sm_90", "yes"),
        (("sm_100a",), "sm_103", "no"),  # bound to one device
        (("sm_100f",), "sm_103", "yes"),  # a family
        (("sm_100",), "sm_120", "no"),
        (("compute_90a",), "sm_100", "no"),
        (("compute_80", "sm_90"), "sm_90", "yes"),
        (("gfx90a", "gfx942"), "gfx942", "yes"),
        (("gfx90a:xnack-",), "gfx90a", "yes"),
        (("gfx90a",), "gfx1100", "no"),
    ],
)
def test_which_code_runs_where(architectures, device, expected):
    assert runs_on(architectures, gpu("x", device)) == expected


def test_code_that_the_driver_compiles_is_a_warning():
    finding = the_one(found(rank(0, architectures=("compute_80",)), rank(1)))
    assert (finding.level, finding.where) == ("warning", "node a (rank 0), GPU 0 (NVIDIA H200)")
    finding = the_one(found(rank(0, architectures=()), rank(1)))
    assert (finding.level, finding.checked) == ("note", False)


def test_cuda_and_rocm_in_one_group_is_impossible():
    amd = gpu("AMD Instinct MI300X", "gfx942")
    findings = found(rank(0), rank(1, "b", amd))
    errors = [finding for finding in findings if finding.level == "error"]
    finding = the_one(errors)
    assert finding.check == "devices"
    assert "CUDA on node a (rank 0), ROCm on node b (rank 1): impossible in one group" in finding.what
    assert findings[0] == finding  # errors first


def test_a_v100_has_no_bf16():
    volta = gpu("Tesla V100-SXM2-16GB", "sm_70")
    findings = found(rank(0), rank(1, "b", volta))
    by_level = {finding.level: finding for finding in findings if "bf16" in finding.what}
    assert by_level["warning"].where == "node b (rank 1)"
    assert "Tesla V100-SXM2-16GB has no fast bf16, NVIDIA H200 has: bf16 is emulated there" in by_level["warning"].what
    assert "16-mixed" in by_level["warning"].next_step
    assert {finding.what.split(" no fast ")[1][:4] for finding in findings} == {"bf16", "tf32", "fp8,"}
    assert can_start(findings)
    # what will be used is looked at alone
    assert the_one(found(rank(0), rank(1, "b", volta), precision="bf16-true")).level == "warning"
    assert found(rank(0), rank(1, "b", volta), precision="16-mixed") == []
    assert the_one(found(rank(0, device=volta), precision="bf16-mixed")[:1]).check == "dtypes"


def test_all_devices_alike_lack_what_none_will_use():
    volta = [rank(number, device=gpu("Tesla V100-SXM2-16GB", "sm_70", number)) for number in range(2)]
    assert found(*volta) == []
    assert "Tesla V100-SXM2-16GB has no fast bf16: " in the_one(found(*volta, precision="bf16-mixed")).what


def test_devices_without_known_peaks_are_not_passed_over():
    finding = the_one(found(rank(0), rank(1, device=gpu("NVIDIA Something New", index=1))))
    assert (finding.level, finding.checked, finding.check) == ("note", False, "dtypes")
    assert "'NVIDIA Something New'" in finding.what


def test_a_precision_that_is_none():
    with pytest.raises(HeteroError, match="precision is 'half'"):
        examine([rank(0)], precision="half")


def test_a_busy_device():
    users = (DeviceUser(77, "python train.py", 30 * GIB), DeviceUser(1001, "own rank", GIB))
    finding = the_one(found(rank(0), rank(1, device=gpu(index=1, users=users, taken_bytes=31 * GIB, utilisation=0.98))))
    assert (finding.level, finding.check) == ("warning", "busy")
    assert "31 GiB of 80 GiB taken, by python train.py (process 77, 30 GiB)" in finding.what
    assert "own rank" not in finding.what
    assert "computing 98% of the last moment" in finding.what
    assert found(rank(0), rank(1, device=gpu(index=1, taken_bytes=GIB, utilisation=0.02))) == []


def test_a_capped_gpu():
    device = gpu(index=1, power_limit_w=450.0, default_power_limit_w=700.0)
    finding = the_one(found(rank(0), rank(1, device=device)))
    assert (finding.level, finding.check) == ("warning", "clocks")
    assert "capped at 450 W, 64% of the default 700 W" in finding.what
    assert "-pl 700" in finding.next_step
    assert found(rank(0), rank(1, device=gpu(index=1, power_limit_w=700.0, default_power_limit_w=700.0))) == []


def test_low_clocks_and_a_device_that_is_slowed_down():
    device = gpu(index=1, clock_mhz=900.0, default_clock_mhz=1590.0, slowed_by=("hw_thermal_slowdown",))
    clock, slowed = found(rank(0), rank(1, device=device))
    assert "900 MHz, the default is 1590 MHz" in clock.what
    assert "slowed down now: hw_thermal_slowdown" in slowed.what


def test_a_prohibited_device():
    finding = the_one(found(rank(0), rank(1, device=gpu(index=1, mode="Prohibited"))))
    assert (finding.level, finding.check) == ("error", "devices")


def test_a_driver_that_says_nothing_is_told_of():
    silent = replace(gpu(index=1), driver=None)
    why = {"driver": "nvidia-smi is not installed"}
    busy, clocks = found(rank(0), rank(1, device=silent, unchecked=why))
    assert (busy.check, clocks.check) == ("busy", "clocks")
    for finding in (busy, clocks):
        assert finding.what == "not checked: nvidia-smi is not installed"
        assert (finding.checked, finding.where) == (False, "node a (rank 1)")


def test_ranks_without_a_device_of_their_own():
    crowded = rank(1, devices=(), visible_devices=1, environment={"CUDA_VISIBLE_DEVICES": "0"})
    error = next(finding for finding in found(rank(0), crowded) if finding.level == "error")
    assert "local rank 1 has no GPU of its own: this process sees 1, with CUDA_VISIBLE_DEVICES='0'" in error.what
    blind = rank(1, "b", devices=(), visible_devices=0, driver_devices=0)
    error = next(finding for finding in found(rank(0), blind) if finding.level == "error")
    assert (error.where, "no GPU here" in error.what) == ("node b (rank 1)", True)
    unusable = rank(1, devices=(), visible_devices=2, unchecked={"GPU 1": "CUDA error: device is busy"})
    errors = [finding.what for finding in found(rank(0), unusable) if finding.level == "error"]
    assert any("GPU 1 cannot be used: CUDA error: device is busy" in what for what in errors)


def test_gpus_that_torch_does_not_see():
    says = ("CUDA initialization: The NVIDIA driver on your system is too old",)
    facts = rank(0, devices=(), visible_devices=0, driver_devices=4, torch_says=says)
    warning = next(finding for finding in examine([facts]) if finding.level == "warning")
    assert "the driver lists 4 GPUs, torch 2.14.1+cu130, built for 13.0, sees none" in warning.what
    assert says[0] in warning.what
    assert can_start(examine([facts]))


def test_two_ranks_on_one_gpu():
    error = next(f for f in found(rank(0, device=gpu()), rank(1, device=gpu())) if f.level == "error")
    assert (error.check, error.where) == ("devices", "node a (ranks 0-1)")
    assert "one and the same GPU" in error.what
    assert found(rank(0, device=gpu()), rank(1, "b", device=gpu())) == []  # of that name on two machines


def test_pairs_that_do_not_reach_each_other():
    facts = [rank(0), rank(1), rank(2, "b")]
    reaches = mesh(*facts)
    for index, reach in enumerate(reaches):
        if (reach.rank, reach.peer) in ((0, 2), (1, 2)):
            reaches[index] = replace(reach, by_name="no answer within 5 s", by_address="no route", address="10.0.0.2")
        elif (reach.rank, reach.peer) == (2, 0):
            reaches[index] = replace(reach, by_name="the name 'a' is not known here")
    lost, by_address = examine(facts, reaches)
    assert (lost.level, lost.check, lost.where) == ("error", "reach", "from node a to node b")
    assert (
        "0 -> 2 (port 5002), 1 -> 2 (port 5002): no answer within 5 s; by its address 10.0.0.2: no route" in lost.what
    )
    assert (by_address.level, by_address.where) == ("warning", "from node b to node a")


def test_ranks_that_do_not_come():
    facts = [rank(0), rank(2, "b")]
    finding = the_one(examine(facts, mesh(*facts), missing=[1, 3], waited_s=60))
    assert (finding.level, finding.check, finding.where) == ("error", "reach", "ranks 1, 3")
    assert "ranks 1, 3 of 4 did not come within 60 s" in finding.what
    assert "MASTER_ADDR" in finding.next_step
    alone = the_one(examine([rank(0)], [], missing=[1], waited_s=5))
    assert "rank 1 of 2 did not come within 5 s" in alone.what


def test_a_rank_that_ends_in_the_middle():
    facts = [rank(0), rank(1)]
    finding = the_one(examine(facts, mesh(*facts)[:1]))
    assert (finding.level, finding.where) == ("error", "node a (rank 1)")


def test_a_name_that_means_the_loopback():
    facts = [rank(0, own_address="127.0.1.1"), rank(1, "b", own_address="10.0.0.2")]
    finding = the_one(found(*facts))
    assert (finding.level, finding.where) == ("warning", "node a (rank 0)")
    assert "127.0.1.1" in finding.what
    assert "GLOO_SOCKET_IFNAME" in finding.next_step
    assert found(rank(0, own_address="127.0.1.1"), rank(1)) == []  # on one machine it does no harm
    set_up = replace(facts[0], environment={"GLOO_SOCKET_IFNAME": "eth0"})
    assert found(set_up, facts[1]) == []


def test_alone_there_is_no_peer():
    finding = the_one(examine([rank(0)]))
    assert (finding.checked, finding.check) == (False, "reach")
    assert "torchrun or srun" in finding.next_step


def test_ranks_are_told_shortly():
    assert ranks_text([3]) == "rank 3"
    assert ranks_text([5, 0, 1, 2, 2]) == "ranks 0-2, 5"
