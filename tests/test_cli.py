"""The command line: what it writes, what it shows, and that errors are one message and status 2."""

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import lightning_hetero
from lightning_hetero.cli import main, parser
from lightning_hetero.cluster import Cluster
from lightning_hetero.costs import ModelCosts
from lightning_hetero.models.gpt import GPTConfig
from lightning_hetero.models.presets import PRESETS, Preset
from lightning_hetero.profiler import busy
from lightning_hetero.profiler.busy import DeviceUse, DeviceUser
from lightning_hetero.profiler.devices import describe
from lightning_hetero.report.cluster_table import cluster_lines
from tests import cli_runs

ROOT = Path(__file__).parent.parent
TINY = GPTConfig(vocabulary=50, context=16, width=16, depth=3, heads=2)


@pytest.fixture
def tiny(monkeypatch):
    monkeypatch.setitem(PRESETS, "tiny", Preset("tiny", TINY, 10_000, "this test"))
    return "tiny"


def failed(capsys, *arguments) -> str:
    return cli_runs.failed(capsys, lambda: main(arguments))


def test_profile_measures_and_writes(tiny, tmp_path, capsys):
    out = tmp_path / "costs.json"
    arguments = ["profile", "--model", tiny, "--out", str(out), "--micro-batches", "1,2", "--repeats", "1"]
    assert main([*arguments, "--device", "cpu", "--sequence", "8"]) == 0
    costs = ModelCosts.load(out)
    kind, name = describe(torch.device("cpu"))
    assert (costs.model, costs.dtype, costs.devices) == ("tiny", "float32", {kind: name})
    assert [str(shape) for shape in costs.inputs] == ["int64[8]"]
    assert costs.timed_types == (kind,)
    assert [point.samples for point in costs.units[-1].timings[kind].points] == [1, 2]
    assert costs.loss_bytes > 2 * 8 * 50 * 4
    shown, progress = capsys.readouterr()
    assert "blocks.0 to blocks.2" in shown
    assert f"on {name}: " in shown
    assert "3 units are alike, blocks.0 to blocks.2: blocks.0 is measured for all of them" in progress
    assert f"profiling tiny on {kind}: 10 of 10: done" in progress


def test_profile_analytic_needs_no_device(tiny, tmp_path, capsys):
    out = tmp_path / "costs.json"
    assert main(["profile", "--model", tiny, "--out", str(out), "--analytic", "--dtype", "bfloat16"]) == 0
    costs = ModelCosts.load(out)
    assert (costs.dtype, costs.devices, costs.timed_types) == ("bfloat16", {}, ())
    assert sum(unit.forward_flops for unit in costs.units) > 0
    assert "no seconds were measured" in capsys.readouterr().out


def test_profile_adds_to_what_other_devices_measured(tiny, tmp_path, capsys):
    out = tmp_path / "costs.json"
    arguments = ["profile", "--model", tiny, "--out", str(out), "--repeats", "1", "--micro-batches", "1"]
    arguments += ["--device", "cpu"]
    assert main(arguments) == 0
    text = out.read_text()
    kind, _ = describe(torch.device("cpu"))
    out.write_text(text.replace(f'"{kind}"', '"other"'))
    assert main([*arguments, "--add"]) == 0
    assert set(ModelCosts.load(out).timed_types) == {"other", kind}
    capsys.readouterr()
    assert "float32' and 'bfloat16" in failed(capsys, *arguments, "--add", "--dtype", "bfloat16").replace(
        "bfloat16' and 'float32", "float32' and 'bfloat16"
    )
    assert main(arguments) == 0
    assert ModelCosts.load(out).timed_types == (kind,)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--model", "vit_2b"], "'vit_2b' is not known: give one of vit_base"),
        (["--model", "gpt_125m", "--sequence", "4096"], "gpt_125m takes 1 to 2048 tokens"),
        (["--model", "vit_base", "--sequence", "8"], "vit_base takes images"),
        (["--model", "vit_base", "--device", "cuda:99"], "--device is 'cuda:99': units are measured on one of cpu"),
        (["--model", "vit_base", "--device", "gpu"], "--device is 'gpu'"),
        (["--model", "vit_base", "--micro-batches", "1,x"], "write whole numbers of samples with commas"),
        (["--model", "vit_base", "--micro-batches", "0"], "write whole numbers of samples with commas"),
        (["--model", "vit_base", "--dtype", "int8"], "invalid choice: 'int8'"),
        (["--model", "vit_base", "--repeats", "0"], "repeats is 0"),
        ([], "the following arguments are required: --model"),
    ],
)
def test_profile_errors_are_one_message(arguments, expected, tmp_path, capsys):
    out = tmp_path / "costs.json"
    assert expected in failed(capsys, "profile", *arguments, "--out", str(out))
    assert not out.exists()


def test_files_that_cannot_be_written_or_read(tiny, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    arguments = ["profile", "--model", tiny, "--analytic", "--out"]
    assert "file" in failed(capsys, *arguments, str(tmp_path / "file" / "costs.json"))
    (tmp_path / "broken.json").write_text("{")
    assert "is not JSON" in failed(capsys, *arguments, str(tmp_path / "broken.json"), "--add")
    (tmp_path / "broken.yaml").write_text("nodes: [")
    assert "is not YAML" in failed(capsys, "discover", "--out", str(tmp_path / "broken.yaml"))
    assert (tmp_path / "broken.yaml").read_text() == "nodes: ["


def test_discover_writes_what_is_there_and_says_what_changed(tmp_path, capsys):
    if torch.cuda.is_available():
        pytest.skip("looks at the processor only")
    out = tmp_path / "cluster.yaml"
    assert main(["discover", "--out", str(out), "--no-speed", "--name", "mine"]) == 0
    cluster = Cluster.from_yaml(out)
    assert (cluster.name, cluster.world_size) == ("mine", 1)
    assert cluster.devices[0].type in capsys.readouterr().out
    out.write_text(out.read_text().replace(f"type: {cluster.devices[0].type}", "type: Abacus"))
    assert main(["discover", "--out", str(out), "--no-speed"]) == 0
    shown = capsys.readouterr().out
    assert f"since the last {out}: rank 0, Abacus on {cluster.devices[0].node}, is not there any more" in shown
    assert "is new" in shown


@pytest.mark.slow
def test_discover_under_torchrun_has_every_rank(tmp_path):
    out = tmp_path / "cluster.yaml"
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--log-dir", str(tmp_path)]
    command += ["-m", "lightning_hetero", "discover", "--no-speed", "--out", str(out)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    run = subprocess.run(command, capture_output=True, text=True, timeout=110, cwd=ROOT, env=environment)
    assert run.returncode == 0, run.stderr
    cluster = Cluster.from_yaml(out)
    assert cluster.world_size == 2
    assert cluster.within_node is not None
    assert run.stdout.count("written to") == 1


@pytest.mark.slow
def test_the_module_and_the_script_are_the_same_program():
    assert 'lightning-hetero = "lightning_hetero.cli:main"' in (ROOT / "pyproject.toml").read_text()
    command = [sys.executable, "-m", "lightning_hetero", "profile", "--help"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=100, cwd=ROOT)
    assert run.returncode == 0
    assert "usage: lightning-hetero profile" in run.stdout


def test_every_option_is_explained():
    commands = next(action for action in parser()._actions if action.choices)
    assert len(commands.choices) >= 2
    for name, command in commands.choices.items():
        assert command.description, name
        assert "examples:" in command.epilog, name
        for action in command._actions:
            assert action.help, f"{name} {action.option_strings}"


SMI = """GPU-aaaa, 4242, /usr/bin/python, a.py, 2048
GPU-aaaa, {own}, python, 100
GPU-aaaa, 77, [Not Found], [N/A]
GPU-bbbb, 78, python, 4
"""


def test_users_of_a_device_are_named(tmp_path, monkeypatch):
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\ncat <<'END'\n{SMI.format(own=os.getpid())}END\n")
    tool.chmod(tool.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    users = busy.users_of("aaaa")
    assert users == (DeviceUser(4242, "/usr/bin/python, a.py", 2**31), DeviceUser(77, "[Not Found]", None))
    assert busy.users_of("GPU-cccc") == ()
    tool.write_text("#!/bin/sh\nexit 9\n")
    assert busy.users_of("aaaa") == ()
    assert busy.users_of("aaaa", tool="no-such-tool") == ()


def test_a_busy_device_is_said_to_be_busy():
    cluster = lightning_hetero.Cluster("c", tuple(lightning_hetero.Device("H200", "n", 2**30, None) for _ in range(2)))
    uses = [
        DeviceUse(2**30, 2**30 - 2**20),
        DeviceUse(2**30, 2**29, (DeviceUser(7, "python", 2**28), DeviceUser(8, "x", None))),
    ]
    assert cluster_lines(cluster, uses) == [
        "rank 1 is busy: 512 MiB are taken, by python (process 7, 256 MiB), x (process 8)"
    ]
    many = DeviceUse(2**30, 0, tuple(DeviceUser(i, "p", None) for i in range(6)))
    assert cluster_lines(cluster, [uses[0], many])[0].endswith("p (process 3), 2 more")
