"""What the docs name is there: files, headings, commands, tests; the quick start's files are what it says of them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from lightning_hetero.cli import COMMANDS
from lightning_hetero.cluster import Cluster

ROOT = Path(__file__).parents[1]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
INLINE_CODE = re.compile(r"`([^`\n]+)`")
LINK = re.compile(r"\]\(([^)\s]+)\)")


@cache
def tracked() -> frozenset[str]:
    """All files that git tracks, and their folders."""
    if not (ROOT / ".git").exists():
        pytest.skip("no checkout: what is tracked is not known")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    files = [Path(name) for name in listed.split("\0") if name]
    return frozenset(str(path) for file in files for path in (file, *file.parents))


@cache
def pages() -> dict[str, str]:
    """Every tracked page, by its path."""
    return {name: (ROOT / name).read_text() for name in sorted(tracked()) if name.endswith(".md")}


def headings(text: str) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    lines = re.findall(r"^#+ (.*)$", FENCE.sub("", text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", line.lower()).replace(" ", "-") for line in lines}


def dead_links(page: str, text: str, files: frozenset[str], known: dict[str, str]) -> list[str]:
    """Relative links of a page that lead nowhere."""
    dead = []
    for target in LINK.findall(INLINE_CODE.sub("", FENCE.sub("", text))):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        name = os.path.normpath(Path(page).parent / path) if path else page
        if name not in files or (anchor and anchor not in headings(known.get(name, ""))):
            dead.append(f"{page}: {target}")
    return dead


def named(pattern: str, *, blocks: bool = True) -> set[tuple[str, str]]:
    """What a pattern finds in code on any page, with the page; in code within a line alone without ``blocks``."""
    found = set()
    for page, text in pages().items():
        code = [block for _, block in FENCE.findall(text) if blocks] + INLINE_CODE.findall(FENCE.sub("", text))
        found |= {(page, match) for piece in code for match in re.findall(pattern, piece)}
    return found


def test_relative_links_lead_to_what_git_tracks() -> None:
    assert [link for page, text in pages().items() for link in dead_links(page, text, tracked(), pages())] == []


def test_dead_links_are_found() -> None:
    text = "# A page\n[a](a.md) [b](b.md) [c](#a-page) [d](#no-page) [e](a.md#one--two) [f](a.md#gone) `[g](g.md)`"
    known = {"docs/a.md": "## One & two"}
    assert dead_links("docs/x.md", text, frozenset({"docs/a.md", "docs/x.md"}), {"docs/x.md": text, **known}) == [
        "docs/x.md: b.md",
        "docs/x.md: #no-page",
        "docs/x.md: a.md#gone",
    ]


def test_modules_and_scripts_that_are_run_are_there() -> None:
    modules = named(r"python -m (benchmarks[\w.]*)")
    assert len(modules) > 5
    missing = [(page, name) for page, name in modules if f"{name.replace('.', '/')}/__main__.py" not in tracked()]
    scripts = named(r"python ((?:examples|benchmarks|tests)/\S+\.py)")
    assert scripts
    assert missing + [(page, name) for page, name in scripts if name not in tracked()] == []


def test_commands_are_there() -> None:
    commands = named(r"(?:lightning-hetero|-m lightning_hetero) ([a-z]\w*)")
    assert {name for _, name in commands} >= {"doctor", "plan", "report"}
    assert [(page, name) for page, name in commands if name not in COMMANDS] == []


def test_tests_that_are_named_are_there() -> None:
    sources = {name: (ROOT / name).read_text() for name in tracked() if re.match(r"tests/\w+\.py$", name)}
    defined = set(re.findall(r"^def (test_\w+)", "\n".join(sources.values()), re.MULTILINE))
    defined |= {Path(name).stem for name in sources}
    names = named(r"\b(test_\w+)", blocks=False)
    assert len(names) > 20
    assert [(page, name) for page, name in names if name not in defined] == []


def test_every_page_is_in_the_index() -> None:
    index = pages()["docs/README.md"]
    linked = {os.path.normpath(Path("docs") / target) for target in LINK.findall(index)}
    mine = {page for page in pages() if page.startswith("docs/") and page != "docs/README.md"}
    assert mine - linked == set()


# -- the quick start ---------------------------------------------------------------------------------------------------


def quick_start(folder: Path) -> list[str]:
    """Write the quick start's cluster file and script into a folder; return its lines for the shell."""
    blocks = FENCE.findall(pages()["docs/quick_start.md"])
    kinds = [kind for kind, _ in blocks]
    for kind, name in (("yaml", "cluster.yaml"), ("python", "train.py")):
        (folder / name).write_text(blocks[kinds.index(kind)][1])
    return [line for kind, block in blocks if kind == "bash" for line in block.splitlines()]


def test_the_quick_starts_files_can_be_read(tmp_path: Path) -> None:
    lines = quick_start(tmp_path)
    assert Cluster.from_yaml(tmp_path / "cluster.yaml").world_size == 2
    compile((tmp_path / "train.py").read_text(), "train.py", "exec")
    assert any("python train.py hetero_fsdp" in line for line in lines)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_the_quick_start_runs(tmp_path: Path) -> None:
    lines = quick_start(tmp_path)
    runs = [line for line in lines if "train.py" in line or line.startswith("lightning-hetero report")]
    assert len(runs) == 3
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "LIGHTNING_HETERO_CACHE": "off"}
    for line in runs:
        command = line.replace("python ", f"{sys.executable} ").replace(
            "lightning-hetero ", f"{sys.executable} -m lightning_hetero "
        )
        done = subprocess.run(
            ["bash", "-c", command], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=180
        )
        assert done.returncode == 0, done.stdout + done.stderr
        if "train.py" in line:
            (accuracy,) = re.findall(r"^validation accuracy (\S+)", done.stdout, re.MULTILINE)
            assert float(accuracy) > 0.9
    assert (tmp_path / "lightning_logs" / "version_0" / "report" / "report.html").is_file()
