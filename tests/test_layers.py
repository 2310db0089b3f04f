"""The layers of docs/architecture.md: a file imports from layers above it, or acyclically within its own."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = "lightning_hetero"
ROOT = Path(__file__).parent.parent / PACKAGE

# Level of every file or folder of the package; a new one must be added here.
LEVELS = {
    "errors": 0,
    "units": 0,
    "records": 0,
    "late": 0,
    "swap": 0,
    "cluster": 1,
    "costs": 1,
    "metrics": 1,
    "schedule": 1,
    "plan": 1,
    "simulator": 2,
    "membership": 2,
    "planner": 2,
    "models": 3,
    "profiler": 3,
    "doctor": 3,
    "emulation": 3,
    "emulation_report": 3,
    "ownership": 2,
    "collate": 3,
    "data": 3,
    "kept": 3,
    "checkpoint": 3,
    "strategies": 4,
    "callbacks": 4,
    "report": 5,
    "cli": 5,
    "__init__": 6,
    "__main__": 6,
}

# Third-party packages that a level may import, besides the standard library; None is no limit.
ALLOWED: dict[int, set[str] | None] = {
    0: set(),
    1: {"yaml"},
    2: {"numpy"},
    3: {"numpy", "yaml", "torch", "timm"},
    4: None,
    5: None,
    6: None,
}
ONLY_IN = {"matplotlib": "report"}
# The only files that may use what torch and Lightning keep to themselves.
ADAPTERS = {
    "strategies/callback_adapter.py",
    "strategies/lightning_adapter.py",
    "strategies/results_adapter.py",
    "strategies/torch_adapter.py",
}
# torch documents this class for extensions and publishes it under no other name.
PUBLISHED = {"torch.utils._python_dispatch.TorchDispatchMode"}
UPSTREAM = {"torch", "lightning", "pytorch_lightning", "lightning_fabric"}

FILES = sorted(path for path in ROOT.rglob("*.py") if "__pycache__" not in path.parts)
IDS = [str(path.relative_to(ROOT)) for path in FILES]


def area(module: str) -> str:
    """The entry of LEVELS that a module of the package belongs to."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else "__init__"


def module_of(path: Path) -> str:
    parts = [PACKAGE, *path.relative_to(ROOT).with_suffix("").parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_of(tree: ast.AST, module: str, is_package: bool) -> list[tuple[str, int]]:
    """``(full name, line)`` of everything imported, wherever in the file, except for type checking only."""
    found = []
    stack = [tree]
    while stack:
        node = stack.pop()
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            stack += node.orelse
            continue
        if isinstance(node, ast.Import):
            found += [(alias.name, node.lineno) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = module.split(".")
                parents = parents[: len(parents) - node.level + is_package]
                base = ".".join([*parents, *([base] if base else [])])
            found += [(f"{base}.{alias.name}", node.lineno) for alias in node.names]
        stack += ast.iter_child_nodes(node)
    return found


def own_module(name: str) -> str:
    """The module of the package that an imported name is or is in."""
    path = ROOT.joinpath(*name.split(".")[1:])
    return name if path.is_dir() or path.with_suffix(".py").exists() else name.rpartition(".")[0]


def breaches(source: str, module: str, is_package: bool = False) -> list[str]:
    """Every import that the layer map forbids, with its line."""
    level = LEVELS[area(module)]
    allowed = ALLOWED[level]
    found = []
    for name, line in imports_of(ast.parse(source), module, is_package):
        top = name.split(".")[0]
        if top == PACKAGE:
            imported = own_module(name)
            if LEVELS.get(area(imported), 99) > level:
                found.append(f"line {line}: {module} (layer {level}) imports {imported}, from a layer below")
        elif top in sys.stdlib_module_names:
            continue
        elif allowed is not None and top not in allowed:
            found.append(f"line {line}: {module} (layer {level}) imports {name}, which this layer does without")
        elif top in ONLY_IN and area(module) != ONLY_IN[top]:
            found.append(f"line {line}: {module} imports {name}, which only {ONLY_IN[top]}/ may")
    return found


def private_uses(source: str) -> list[str]:
    """Imports of, and attributes through, names with a leading underscore of torch or Lightning."""
    tree = ast.parse(source)
    found = [
        f"line {line}: {name}"
        for name, line in imports_of(tree, PACKAGE, True)
        if name.split(".")[0] in UPSTREAM and name not in PUBLISHED
        if any(is_private(part) for part in name.split("."))
    ]
    bound = {"torch"}
    for node in ast.walk(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            origin = getattr(node, "module", None) or ""
            bound |= {
                alias.asname or alias.name.split(".")[0]
                for alias in node.names
                if (origin or alias.name).split(".")[0] in UPSTREAM
            }
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            chain = ast.unparse(node)
            if chain.split(".")[0] in bound:
                found.append(f"line {node.lineno}: {chain}")
    return found


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


@pytest.mark.parametrize("path", FILES, ids=IDS)
def test_imports_only_from_layers_above(path):
    module = module_of(path)
    assert area(module) in LEVELS, f"{module} is in no layer: add it to LEVELS and docs/architecture.md"
    assert breaches(path.read_text(), module, path.name == "__init__.py") == []


@pytest.mark.parametrize("path", FILES, ids=IDS)
def test_what_torch_and_lightning_keep_to_themselves_is_used_in_adapters_only(path):
    if path.relative_to(ROOT).as_posix() not in ADAPTERS:
        assert private_uses(path.read_text()) == []


def test_no_import_cycle():
    graph = {}
    for path in FILES:
        module = module_of(path)
        names = [name for name, _ in imports_of(ast.parse(path.read_text()), module, path.name == "__init__.py")]
        graph[module] = {own_module(name) for name in names if name.split(".")[0] == PACKAGE} - {module}
    done, open_now = set(), []

    def visit(module: str) -> None:
        assert module not in open_now, " -> ".join([*open_now[open_now.index(module) :], module])
        if module in done:
            return
        open_now.append(module)
        for imported in sorted(graph.get(module, ())):
            visit(imported)
        open_now.pop()
        done.add(module)

    for module in graph:
        visit(module)
    assert len(done) >= len(FILES)


@pytest.mark.parametrize(
    ("source", "module"),
    [
        ("from lightning_hetero.plan import ShardPlan", "lightning_hetero.errors"),
        ("from lightning_hetero import planner", "lightning_hetero.plan"),
        ("def f():\n    import torch", "lightning_hetero.planner.batch"),
        ("from ..profiler import devices", "lightning_hetero.cluster.cluster"),
        ("import lightning.pytorch as pl", "lightning_hetero.data"),
        ("import numpy", "lightning_hetero.units"),
        ("import matplotlib.pyplot as plt", "lightning_hetero.strategies.fsdp"),
        ("from lightning_hetero import Cluster", "lightning_hetero.strategies.fsdp"),
    ],
)
def test_the_check_finds_a_breach(source, module):
    assert len(breaches(source, module)) == 1


@pytest.mark.parametrize(
    "source",
    [
        "from lightning.pytorch.strategies.fsdp import _MixedPrecision",
        "from torch.distributed.fsdp._fully_shard import FSDPModule",
        "import torch._dynamo",
        "import torch\ntorch._C._get_tracing_state()",
        "import torch.distributed as dist\ndist.distributed_c10d._get_default_group()",
    ],
)
def test_the_check_finds_private_names(source):
    assert private_uses(source)


@pytest.mark.parametrize(
    "source", ["import torch\ntorch.__version__", "from __future__ import annotations\nself._x = 1"]
)
def test_the_check_lets_pass_what_is_public(source):
    assert private_uses(source) == []


PLAN_SOMETHING = """
import sys
for name in ("torch", "lightning", "timm", "matplotlib"):
    sys.modules[name] = None
import lightning_hetero.cluster, lightning_hetero.costs, lightning_hetero.plan, lightning_hetero.simulator
from lightning_hetero.cluster import Cluster, Device
from lightning_hetero.planner import plan_one_group
devices = tuple(Device(kind, "n", 2**31, None) for kind in ("fast", "slow"))
plan = plan_one_group(Cluster("c", devices), global_batch_size=9, seconds_per_sample=[1.0, 2.0])
print(plan.batch_shares)
try:
    Cluster.discover()
except ValueError as error:
    print("torch" in str(error))
"""


def test_plans_with_torch_blocked():
    result = subprocess.run(
        [sys.executable, "-c", PLAN_SOMETHING], capture_output=True, text=True, timeout=60, cwd=ROOT.parent
    )
    assert result.stderr == ""
    assert result.stdout == "(6, 3)\nTrue\n"


IMPORT_ALONE = """
import os, sys
import lightning.pytorch, torch.distributed.fsdp, torch.profiler, timm  # once; what is tested is the order of ours
for name in list(sys.modules):
    if name.split(".")[0] == "lightning_hetero":
        del sys.modules[name]
for package in sys.argv[1:]:
    child = os.fork()
    if not child:
        __import__(package)
        os._exit(0)
    if os.waitpid(child, 0)[1]:
        sys.exit(f"{package} cannot be imported first")
"""


@pytest.mark.slow
def test_each_package_can_be_imported_first():
    """A cycle through a package's ``__init__`` shows with some order of imports only."""
    packages = [f"{PACKAGE}.{path.parent.name}" for path in FILES if path.name == "__init__.py" and path.parent != ROOT]
    subprocess.run(
        [sys.executable, "-c", IMPORT_ALONE, *sorted({*packages} - {f"{PACKAGE}.pipe", f"{PACKAGE}.chains"})],
        check=True,
    )
