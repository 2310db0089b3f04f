"""The cache of measurements: found again under the same key only, and never in the way."""

import json
import logging
import os
import subprocess
import sys
from dataclasses import asdict, dataclass, replace

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from lightning_hetero.cluster import Device
from lightning_hetero.models.gpt import GPT, GPTConfig
from lightning_hetero.profiler.cache import CacheKey, MeasurementCache
from lightning_hetero.profiler.structure import structure_hash

DEVICE = Device("H200", "n", 2**30, 1e12, name="NVIDIA H200", uuid="GPU-1")
BATCH = {"image": torch.zeros(4, 3, 8, 8), "label": torch.zeros(4, dtype=torch.int64)}


@dataclass(frozen=True)
class Measured:
    samples: int
    step_s: float
    base_bytes: int | None = None


MEASURED = Measured(4, 0.25)


def gpt(**changes) -> GPT:
    return GPT(GPTConfig(**({"vocabulary": 11, "context": 8, "width": 8, "depth": 2, "heads": 2} | changes)))


def key(**changes) -> CacheKey:
    made = CacheKey.of("gpt", gpt(), BATCH, dtype="32-true", device=DEVICE, conditions={"ranks": 2})
    return replace(made, **changes)


@pytest.fixture
def cache(tmp_path):
    return MeasurementCache(tmp_path / "cache")


def test_found_again_in_another_object(cache):
    assert cache.load(key(), Measured) is None
    cache.store(key(), asdict(MEASURED))
    assert MeasurementCache(cache.folder).load(key(), Measured) == MEASURED
    assert [path.suffix for path in cache.folder.iterdir()] == [".json"]


def test_the_key_says_what_it_is_of():
    assert key().inputs == ("float32[3, 8, 8]", "int64[]")
    assert key().conditions == {"ranks": "2"}
    assert (key().device, key().emulated_flops_per_s) == ("GPU-1", None)
    unnamed = CacheKey.of("gpt", gpt(), BATCH, dtype="32-true", device=Device("slow", "n", 1, 3e9, 2e9), emulate=True)
    assert (unnamed.device, unnamed.emulated_flops_per_s) == ("slow", 2e9)


@pytest.mark.parametrize(
    "other",
    [
        {"model": "bert"},
        {"parameters": 7},
        {"structure": "0" * 64},
        {"inputs": ("float32[3, 8, 9]", "int64[]")},
        {"dtype": "bf16-mixed"},
        {"device_type": "H100"},
        {"device": "GPU-2"},
        {"emulated_flops_per_s": 1e9},
        {"conditions": {"ranks": "3"}},
        {"torch": "2.0"},
    ],
    ids=lambda other: next(iter(other)),
)
def test_nothing_is_taken_from_another_key(cache, other):
    cache.store(key(), asdict(MEASURED))
    assert cache.load(key(**other), Measured) is None


def test_the_structure_is_that_of_the_code_and_not_of_the_values():
    model = gpt()
    assert structure_hash(model) == structure_hash(gpt())  # other random values
    model.learning_rate = 0.1
    assert structure_hash(model) == structure_hash(gpt())
    different = [gpt(heads=4), gpt(depth=3), gpt(dropout=0.5), gpt().half(), gpt().requires_grad_(False)]
    assert len({structure_hash(each) for each in [model, *different]}) == 6


def test_other_forward_code_is_another_structure():
    class Once(nn.Linear):
        def forward(self, x):
            return super().forward(x)

    class Twice(nn.Linear):
        def forward(self, x):
            return super().forward(super().forward(x))

    Twice.__qualname__ = Once.__qualname__
    assert structure_hash(Once(4, 4)) != structure_hash(Twice(4, 4))


def test_sharding_does_not_change_the_structure(tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        model = gpt()
        before = structure_hash(model)
        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
        assert structure_hash(model) == before
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.slow
def test_every_process_finds_the_same_file():
    program = (
        "from tests.test_measurement_cache import key\nimport torch\ntorch.set_num_threads(1)\nprint(key().file_name)"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100, check=True)
    assert run.stdout.strip() == key().file_name


def spoil(cache, change):
    cache.store(key(), asdict(MEASURED))
    (path,) = cache.folder.iterdir()
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda data: data.update(schema=0), "schema is 0"),
        (lambda data: data["key"].update(parameters=1), "another key"),
        (lambda data: data.update(written_s=data["written_s"] - 8 * 24 * 3600), "8.0 days old"),
        (lambda data: data.update(written_s=data["written_s"] + 3600), "days old"),
        (lambda data: data["measured"].update(step_s=-1.0), "step_s is -1.0"),
        (lambda data: data["measured"].update(step_s="fast"), "step_s is 'fast'"),
        (lambda data: data["measured"].pop("step_s"), "step_s"),
        (lambda data: data["measured"].update(speed=1.0), "speed"),
        (lambda data: data.pop("measured"), "measured"),
    ],
)
def test_a_spoilt_file_is_measured_again_with_a_word(cache, caplog, change, reason):
    spoil(cache, change)
    with caplog.at_level(logging.WARNING, "lightning_hetero"):
        assert cache.load(key(), Measured) is None
    assert reason in caplog.text
    assert "measured again" in caplog.text
    cache.store(key(), asdict(MEASURED))
    assert cache.load(key(), Measured) == MEASURED


@pytest.mark.parametrize("content", ["", "{", "[]", "null", '{"schema": 1}', "\x00\xff"])
def test_a_broken_file_is_ignored_with_a_word(cache, caplog, content):
    cache.store(key(), asdict(MEASURED))
    (path,) = cache.folder.iterdir()
    path.write_bytes(content.encode("latin-1"))
    with caplog.at_level(logging.WARNING, "lightning_hetero"):
        assert cache.load(key(), Measured) is None
    assert str(path) in caplog.text


def test_a_folder_that_cannot_be_written_is_no_obstacle(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    cache = MeasurementCache(tmp_path / "file" / "cache")
    with caplog.at_level(logging.WARNING, "lightning_hetero"):
        cache.store(key(), asdict(MEASURED))
        assert "not kept" in caplog.text
        assert cache.load(key(), Measured) is None


def test_where_it_is(monkeypatch, tmp_path):
    monkeypatch.delenv("LIGHTNING_HETERO_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert MeasurementCache().folder == tmp_path / "lightning_hetero"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert MeasurementCache().folder == tmp_path / "home" / ".cache" / "lightning_hetero"
    monkeypatch.setenv("LIGHTNING_HETERO_CACHE", str(tmp_path / "own"))
    assert MeasurementCache().folder == tmp_path / "own"
    monkeypatch.setenv("LIGHTNING_HETERO_CACHE", "off")
    off = MeasurementCache()
    off.store(key(), asdict(MEASURED))
    assert off.load(key(), Measured) is None
    assert os.listdir(tmp_path) == []
