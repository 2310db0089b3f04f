"""The doctor's ways between ranks: real sockets, real ranks, and such as do not answer."""

from __future__ import annotations

import json
import os
import socket
import time
from contextlib import redirect_stdout
from io import StringIO
from typing import Any

import pytest
import torch

from lightning_hetero.cli import main
from lightning_hetero.cli.launch import launched
from lightning_hetero.doctor import RankFacts, examine, gather
from lightning_hetero.doctor.meeting import Meeting
from lightning_hetero.doctor.place import Place
from lightning_hetero.doctor.reach import Listener, greeting, knock, try_peers
from lightning_hetero.errors import HeteroError
from tests import cli_runs
from tests.harness import WarmRanks


def closed_port() -> int:
    """A port at which nobody listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_a_peer_that_answers_and_one_that_does_not():
    own = RankFacts(0, "localhost", port=1)
    with Listener(1) as listener:
        there = RankFacts(1, "localhost", address="127.0.0.1", port=listener.port)
        gone = RankFacts(2, "localhost", address="127.0.0.1", port=closed_port())
        unnamed = RankFacts(3, "no-such-host.invalid", address="127.0.0.1", port=listener.port)
        wrong = RankFacts(4, "localhost", address="127.0.0.1", port=listener.port)
        reaches = {each.peer: each for each in try_peers(own, [own, there, gone, unnamed, wrong], 2.0)}
    assert set(reaches) == {1, 2, 3, 4}
    assert (reaches[1].by_name, reaches[1].by_address) == (None, None)
    assert (reaches[2].by_name, reaches[2].by_address) == ("Connection refused", "Connection refused")
    assert "'no-such-host.invalid' is not known here" in reaches[3].by_name
    # rank 1 is at the port, not rank 3 or 4
    assert reaches[3].by_address == reaches[4].by_name == "another program answers there"
    assert reaches[2].seconds < 2.0
    error = next(f for f in examine([own, gone], list(reaches.values())[1:2]) if "cannot reach" in f.what)
    assert (error.level, error.check) == ("error", "reach")
    assert f"0 -> 2 (port {gone.port}): Connection refused" in error.what
    assert "open all ports" in error.next_step


def test_a_listener_that_says_nothing_is_not_waited_for():
    with socket.create_server(("127.0.0.1", 0)) as silent:
        began_s = time.monotonic()
        said = knock("127.0.0.1", silent.getsockname()[1], greeting(0), 0.2)
        assert said == "no answer within 0.2 s"
        assert 0.2 <= time.monotonic() - began_s < 2.0


def test_a_closed_listener_answers_no_more():
    with Listener(0) as listener:
        port = listener.port
        assert knock("127.0.0.1", port, greeting(0), 2.0) is None
    assert knock("127.0.0.1", port, greeting(0), 2.0) == "Connection refused"


def doctor(*arguments: str, environment: dict[str, str] | None = None) -> tuple[int, str]:
    os.environ.update(environment or {})
    out = StringIO()
    with redirect_stdout(out):
        status = main(["doctor", *arguments])
    return status, out.getvalue()


def doctor_with_a_deaf_rank() -> tuple[int, str]:
    """The last rank tells a port at which it does not listen."""
    if os.environ["RANK"] == "2":
        listens = Listener.__init__

        def deaf(self: Listener, rank: int) -> None:
            listens(self, rank)
            self.port = closed_port()

        Listener.__init__ = deaf  # type: ignore[method-assign]
    return doctor("--json", "--timeout", "2")


def doctor_without_the_last() -> tuple[int, str] | None:
    last = int(os.environ["WORLD_SIZE"]) - 1
    return None if os.environ["RANK"] == str(last) else doctor("--wait", "1.5")


def doctor_with_old_nccl() -> tuple[int, str]:
    if os.environ["RANK"] == "1":
        gather.socket.gethostname = lambda: "localhost"
        gather.versions = lambda report: {**versions(report), "torch": "1.0.0"}
    return doctor()


versions = gather.versions


def test_all_ranks_reach_each_other(ranks: WarmRanks):
    outcomes = ranks.run(3, doctor, "--json", "--workers", "0", process_group=False)
    assert [status for status, _ in outcomes] == [0, 0, 0]
    assert [text for _, text in outcomes[1:]] == ["", ""]
    told = json.loads(outcomes[0][1])
    assert told["can_start"] is True
    assert [each["rank"] for each in told["ranks"]] == [0, 1, 2]
    pairs = {(each["rank"], each["peer"]) for each in told["reaches"]}
    assert pairs == {(a, b) for a in range(3) for b in range(3) if a != b}
    assert {each["level"] for each in told["findings"]} <= {"note", "warning"}


def test_a_rank_that_does_not_listen_is_told_pair_by_pair(ranks: WarmRanks):
    outcomes = ranks.run(3, doctor_with_a_deaf_rank, process_group=False)
    assert [status for status, _ in outcomes] == [1, 1, 1]
    told = json.loads(outcomes[0][1])
    errors = [each for each in told["findings"] if each["level"] == "error"]
    assert len(errors) == 1
    assert errors[0]["check"] == "reach"
    assert "0 -> 2 (port " in errors[0]["what"]
    assert "1 -> 2 (port " in errors[0]["what"]
    assert "Connection refused" in errors[0]["what"]


def test_a_rank_that_does_not_come_is_named(ranks: WarmRanks):
    outcomes = ranks.run(3, doctor_without_the_last, process_group=False)
    assert outcomes[0][0] == outcomes[1][0] == 1
    assert "rank 2 of 3 did not come within 1.5 s" in outcomes[0][1]
    assert "training cannot start: 1 error" in outcomes[0][1]


def test_versions_of_other_nodes_are_compared(ranks: WarmRanks):
    outcomes = ranks.run(2, doctor_with_old_nccl, process_group=False)
    assert [status for status, _ in outcomes] == [1, 1]
    assert "error    versions: node localhost (rank 1)" in outcomes[0][1]
    assert "1.0.0 on node localhost (rank 1)" in outcomes[0][1]


def test_rank_0_that_is_not_there(monkeypatch, capsys):
    variables = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "127.0.0.1"}
    for name, value in {**variables, "MASTER_PORT": str(closed_port())}.items():
        monkeypatch.setenv(name, value)
    assert main(["doctor", "--wait", "1"]) == 1
    out = capsys.readouterr().out
    assert (
        f"cannot reach 127.0.0.1:{os.environ['MASTER_PORT']}, where ranks meet, within 1 s (Connection refused)" in out
    )
    assert "next: see that rank 0 was started" in out


def test_a_port_that_is_taken(monkeypatch, capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        variables = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
        for name, value in {**variables, "MASTER_PORT": str(taken.getsockname()[1])}.items():
            monkeypatch.setenv(name, value)
        assert main(["doctor", "--wait", "1"]) == 1
    out = capsys.readouterr().out
    assert "cannot open 127.0.0.1:" in out
    assert "give a MASTER_PORT that is free" in out


def test_rank_0_that_says_no_more():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    first = Meeting(Place(0, 2, 0, "127.0.0.1", port), 2.0)
    second = Meeting(Place(1, 2, 1, "127.0.0.1", port), 2.0)
    first.give("facts", {"a": 1})
    assert second.collect("facts", [0, 1], 0.1) == {0: {"a": 1}}
    with pytest.raises(HeteroError, match=r"rank 0 did not say how it ended within 0\.1 s"):
        second.conclusion(0.1)
    first.give("status", 1)
    assert second.conclusion(1.0) == 1
    del first  # and the store with it
    with pytest.raises(HeteroError, match="was lost"):
        second.collect("more", [0], 1.0)


@pytest.fixture
def alone(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "SLURM_NTASKS"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.usefixtures("alone")
def test_alone(capsys):
    assert main(["doctor", "--workers", "0"]) == 0
    out = capsys.readouterr().out
    assert "not checked: there is one process alone" in out
    assert "training can start: 0 errors" in out
    if not torch.cuda.is_available():
        assert "note     architectures, dtypes, busy, clocks: node " in out
        assert out.count("torch sees no GPU there") == 1
    assert "looked at devices, versions" in out
    assert "in part or not at all: reach" in out


@pytest.mark.usefixtures("alone")
def test_who_this_rank_is(monkeypatch):
    assert launched() is None
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert launched() is None
    variables = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "n0", "MASTER_PORT": "29500"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert launched() == Place(3, 4, 1, "n0", 29500)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "2")
    assert launched() == Place(3, 4, 1, "n0", 29500, hosted=True, attempt="2")
    monkeypatch.setenv("RANK", "4")
    with pytest.raises(HeteroError, match="RANK is 4: with WORLD_SIZE=4"):
        launched()
    monkeypatch.setenv("RANK", "x")
    monkeypatch.delenv("MASTER_PORT")
    with pytest.raises(HeteroError) as raised:
        launched()
    assert "RANK is 'x'" in str(raised.value)
    assert "MASTER_PORT is not set" in str(raised.value)


@pytest.mark.usefixtures("alone")
def test_who_this_rank_is_under_slurm(monkeypatch):
    variables = {
        "SLURM_NTASKS": "4",
        "SLURM_NTASKS_PER_NODE": "2",
        "SLURM_PROCID": "3",
        "SLURM_LOCALID": "1",
        "SLURM_NODEID": "1",
        "SLURM_NODELIST": "node[07-08]",
        "SLURM_JOB_ID": "123456",
        "SLURM_JOB_NAME": "train",
    }
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert launched() == Place(3, 4, 1, "node07", 3456 + 15000)
    # Lightning has set both, and ranks started later would have gone there
    assert "MASTER_ADDR" not in os.environ
    assert "MASTER_PORT" not in os.environ
    monkeypatch.delenv("SLURM_NTASKS_PER_NODE")
    with pytest.raises(HeteroError, match="ntasks-per-node"):
        launched()


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--workers", "-1"], "'-1': write a whole number, 0 or more"),
        (["--batch-bytes", "64"], "'64' has no unit"),
        (["--tensors", "0"], "'0': write a whole number, 1 or more"),
        (["--wait", "soon"], "'soon': write a number of seconds above 0"),
        (["--timeout", "0"], "'0': write a number of seconds above 0"),
        (["--precision", "half"], "invalid choice: 'half'"),
    ],
)
def test_wrong_arguments(arguments: list[str], expected: str, capsys: Any):
    assert expected in cli_runs.failed(capsys, lambda: main(["doctor", *arguments]))


@pytest.mark.slow
def test_under_torchrun(tmp_path):
    import subprocess
    import sys
    from pathlib import Path

    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["-m", "lightning_hetero", "doctor", "--json", "--workers", "0"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    root = Path(__file__).parent.parent
    run = subprocess.run(command, capture_output=True, text=True, timeout=110, cwd=root, env=environment)
    assert run.returncode == 0, run.stderr
    assert len(json.loads(run.stdout)["reaches"]) == 2


def doctor_that_nobody_reads() -> int:
    class Closed(StringIO):
        def write(self, text: str) -> int:
            raise OSError("nobody reads")

    with redirect_stdout(Closed()):
        return main(["doctor", "--json", "--workers", "0"])


def test_the_others_hear_how_it_ended_even_if_nobody_reads_it(ranks: WarmRanks):
    assert ranks.run(2, doctor_that_nobody_reads, process_group=False) == [2, 0]
