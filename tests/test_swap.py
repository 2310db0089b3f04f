"""Whenever a process dies while one checkpoint takes another one's place, a whole one is found under the name."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from lightning_hetero import swap

PARTS = ("a", "b", "meta.pt")

# Runs without torch, and forks once for every line that is executed: the child kills itself there.
KILLS = textwrap.dedent(
    """
    import os, shutil, signal, sys
    from pathlib import Path
    from lightning_hetero import swap
    from tests.test_swap import make, content

    folder, kinds, can_swap = Path(sys.argv[1]), sys.argv[2].split(","), sys.argv[3] == "True"
    if not can_swap:
        swap._swap = lambda one, other: False
    files = {swap.__file__, shutil.__file__}

    def die_at(line):
        left = [line]
        def trace(frame, event, arg):
            if frame.f_code.co_filename not in files:
                return None
            if event == "line":
                left[0] -= 1
                if left[0] == 0:
                    os.kill(os.getpid(), signal.SIGKILL)
            return trace
        sys.settrace(trace)

    line = 0
    while True:
        line += 1
        place = folder / str(line)
        place.mkdir()
        make(place / "x.ckpt", "old", kinds[0])
        make(place / ".x.ckpt.tmp", "new", kinds[1])
        child = os.fork()
        if child == 0:
            die_at(line)
            swap.put_in_place(place / ".x.ckpt.tmp", place / "x.ckpt")
            sys.settrace(None)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        found = content(swap.find(place / "x.ckpt"))
        # the next save, by a new process
        swap.remove(place / ".x.ckpt.tmp")
        make(place / ".x.ckpt.tmp", "next", kinds[1])
        swap.put_in_place(place / ".x.ckpt.tmp", place / "x.ckpt")
        left = sorted(p.name for p in place.iterdir() if not p.name.endswith(".remains"))
        print(line, found, content(swap.find(place / "x.ckpt")), ",".join(left), flush=True)
        if os.WIFEXITED(status):
            assert os.WEXITSTATUS(status) == 0
            break
    """
)


def make(path: Path, text: str, kind: str) -> None:
    if kind == "file":
        path.write_text(text)
        return
    path.mkdir()
    for part in PARTS:
        (path / part).write_text(text)


def content(path: Path) -> str:
    """What all parts say, or what is wrong."""
    if path.is_file():
        return path.read_text()
    texts = [(path / part).read_text() if (path / part).exists() else "missing" for part in PARTS]
    return texts[0] if len(set(texts)) == 1 else f"broken:{texts}"


@pytest.mark.parametrize("can_swap", [True, False])
@pytest.mark.parametrize(
    "kinds",
    ["folder,folder", "file,file", *(pytest.param(k, marks=pytest.mark.slow) for k in ("file,folder", "folder,file"))],
)
def test_killed_at_every_line(tmp_path: Path, kinds: str, can_swap: bool) -> None:
    root = str(Path(__file__).parents[1])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([root, os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-c", KILLS, str(tmp_path), kinds, str(can_swap)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    assert len(lines) > 3
    found = [line[1] for line in lines]
    # first the old one, then the new one, and never anything else
    assert set(found) <= {"old", "new"}, done.stdout
    assert found == sorted(found, reverse=True), done.stdout
    assert (found[0], found[-1]) == ("old", "new")
    assert {(line[2], line[3]) for line in lines} == {("next", "x.ckpt")}, done.stdout


def test_names_are_exchanged_at_once_here(tmp_path: Path) -> None:
    """Otherwise the cases above would not differ."""
    make(tmp_path / "a", "a", "folder")
    make(tmp_path / "b", "b", "file")
    assert swap._swap(tmp_path / "a", tmp_path / "b")
    assert (content(tmp_path / "a"), content(tmp_path / "b")) == ("b", "a")
    assert not swap._swap(tmp_path / "a", tmp_path / "missing")


def test_what_is_removed_is_gone(tmp_path: Path) -> None:
    make(tmp_path / "folder", "x", "folder")
    make(tmp_path / "file", "x", "file")
    (tmp_path / "link").symlink_to(tmp_path / "folder")
    for name in ("link", "missing", "file"):
        swap.remove(tmp_path / name)
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]
    swap.remove(tmp_path / "folder")
    assert not list(tmp_path.iterdir())
