"""The scripts in examples/launch start what they say, and it trains."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LAUNCH = ROOT / "examples" / "launch"
TRAIN = [
    "examples/vit_digits.py",
    "--cluster",
    str(LAUNCH / "two_and_one.yaml"),
    "--epochs",
    "1",
    "--min-accuracy",
    "0",
]

pytestmark = pytest.mark.skipif(shutil.which("bash") is None, reason="no bash")

SRUN = """#!/usr/bin/env bash
# What SLURM's manual says of the options that are used: the command runs on that node, as the one task of a step.
for ((i = 1; i <= $#; i++)); do [[ ${!i} == --* ]] || break; done
options=("${@:1:i-1}") command=("${@:i}")
export SLURM_NTASKS=1 SLURM_NPROCS=1 SLURM_PROCID=0 SLURM_LOCALID=0 SLURM_NODEID=0 SLURM_NNODES=1 SLURM_STEP_ID=$RANDOM
export STEP_OPTIONS="${options[*]}"
exec "${command[@]}"
"""

SCONTROL = """#!/usr/bin/env bash
[[ "$1 $2" == 'show hostnames' ]] || exit 1
tr ',' '\\n' <<<"$3"
"""

NOTES = """#!/usr/bin/env bash
# In the place of python: notes how it was started, and ends as FAILS says for its node.
echo "$STEP_OPTIONS | $*" >>"$NOTED"
[[ "$*" == *"--node-rank ${FAILS:-none} "* ]] && exit 3
[[ -z ${FAILS:-} ]] || exec sleep 60
"""


def environment(tmp_path: Path, **variables: str) -> dict[str, str]:
    for name, text in {"srun": SRUN, "scontrol": SCONTROL, "notes": NOTES}.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "RANK", "WORLD"))}
    paths = {"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    job = {
        "SLURM_JOB_ID": "123456",
        "SLURM_JOB_NAME": "mixed",
        "SLURM_HET_SIZE": "2",
        "SLURM_NTASKS": "1",
        "SLURM_JOB_NODELIST_HET_GROUP_0": "localhost",
        "SLURM_JOB_NODELIST_HET_GROUP_1": "127.0.0.1",
        "NOTED": str(tmp_path / "noted"),
        "PYTHON": sys.executable,
    }
    return {**clean, **paths, **job, **variables}


def submit(tmp_path: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", str(LAUNCH / "mixed_nodes.sbatch"), *arguments],
        env=environment(tmp_path, **variables),
        cwd=ROOT,
        text=True,
        capture_output=True,
        timeout=110,
    )


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def test_srun_starts_one_torchrun_on_each_node(tmp_path: Path) -> None:
    nodes = {"SLURM_JOB_NODELIST_HET_GROUP_0": "h1", "SLURM_JOB_NODELIST_HET_GROUP_1": "a1,a2"}
    done = submit(tmp_path, "train.py", "--epochs", "3", PYTHON=str(tmp_path / "notes"), PROCESSES="8 4", **nodes)
    assert (done.returncode, done.stderr) == (0, "")
    expected = [
        f"--het-group={component} --nodelist={node} --nodes=1 --ntasks=1 --cpu-bind=none | -m torch.distributed.run "
        f"--rdzv-backend static --nnodes 3 --node-rank {rank} --nproc-per-node {processes} "
        "--master-addr h1 --master-port 18456 train.py --epochs 3"
        for rank, (component, node, processes) in enumerate([(0, "h1", 8), (1, "a1", 4), (1, "a2", 4)])
    ]
    assert sorted((tmp_path / "noted").read_text().splitlines()) == sorted(expected)


def test_all_gpus_of_a_node_where_nothing_is_said(tmp_path: Path) -> None:
    assert submit(tmp_path, "train.py", PYTHON=str(tmp_path / "notes")).returncode == 0
    assert (tmp_path / "noted").read_text().count("--nproc-per-node gpu ") == 2


@pytest.mark.parametrize("node", ["0", "1"])
def test_a_node_that_fails_ends_the_others(tmp_path: Path, node: str) -> None:
    done = submit(tmp_path, "train.py", PYTHON=str(tmp_path / "notes"), FAILS=node)
    assert done.returncode == 3  # in much less than the 60 s of the other one


@pytest.mark.parametrize(
    ("script", "arguments", "words"),
    [
        ("mixed_nodes.sbatch", [], "usage: "),
        ("run_mixed_nodes.sh", ["0", "2"], "usage: "),
    ],
)
def test_what_is_missing_is_told(tmp_path: Path, script: str, arguments: list[str], words: str) -> None:
    command = ["bash", str(LAUNCH / script), *arguments]
    done = subprocess.run(command, env=environment(tmp_path), text=True, capture_output=True)
    assert done.returncode == 2
    assert words in done.stderr


def test_a_job_that_is_not_heterogeneous_is_told(tmp_path: Path) -> None:
    variables = environment(tmp_path)
    del variables["SLURM_HET_SIZE"]
    command = ["bash", str(LAUNCH / "mixed_nodes.sbatch"), "train.py"]
    done = subprocess.run(command, env=variables, text=True, capture_output=True)
    assert done.returncode != 0
    assert "SLURM_HET_SIZE: is not set: submit this with sbatch" in done.stderr


@pytest.mark.slow
def test_two_nodes_of_two_and_one_process_train(tmp_path: Path) -> None:
    variables = environment(tmp_path, MASTER_PORT=free_port())
    commands = [["bash", str(LAUNCH / "run_mixed_nodes.sh"), *node, *TRAIN] for node in (["0", "2"], ["1", "1"])]
    with (tmp_path / "second").open("w") as second:
        other = subprocess.Popen(commands[1], env=variables, cwd=ROOT, stdout=second, stderr=second)
        try:
            done = subprocess.run(commands[0], env=variables, cwd=ROOT, text=True, capture_output=True, timeout=110)
            assert done.returncode == 0, done.stderr + (tmp_path / "second").read_text()
            assert other.wait(timeout=20) == 0
        finally:
            other.kill()
    assert "2 x fast, 1 x slow on 2 nodes (emulated)" in done.stdout + done.stderr
    assert "validation accuracy" in done.stdout


@pytest.mark.slow
def test_a_heterogeneous_job_trains(tmp_path: Path) -> None:
    job_id = str(int(free_port()) - 15000 + 10000 * 7)  # the script makes the port of the job's number
    done = submit(tmp_path, *TRAIN, PROCESSES="2 1", SLURM_JOB_ID=job_id)
    assert done.returncode == 0, done.stderr
    assert "2 x fast, 1 x slow on 2 nodes (emulated)" in done.stdout + done.stderr
    assert "validation accuracy" in done.stdout
