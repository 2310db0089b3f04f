"""Importing the package imports neither torch nor Lightning, and still registers its names."""

from __future__ import annotations

import subprocess
import sys

import pytest

BOTH = """
from lightning.pytorch.strategies import StrategyRegistry
assert "hetero_fsdp" in StrategyRegistry.available_strategies()
assert type(StrategyRegistry.get("hetero_fsdp")) is lightning_hetero.HeteroFSDPStrategy
assert lightning_hetero.HeteroFSDPStrategy.strategy_name == "hetero_fsdp"
assert lightning_hetero.EmulatedDevices.__name__ == "EmulatedDevices"
"""

ORDERS = {
    "ours first": f"import lightning_hetero{BOTH}",
    "Lightning first": f"import lightning.pytorch, lightning_hetero{BOTH}",
    "looked for in between": f"import lightning_hetero, importlib.util\n"
    f"assert importlib.util.find_spec('lightning.pytorch') is not None{BOTH}",
    "the strategy itself": f"import lightning_hetero\nfrom lightning_hetero.strategies import HeteroFSDPStrategy{BOTH}",
    "the callbacks": f"import lightning_hetero\nfrom lightning_hetero.callbacks import EmulatedDevices{BOTH}",
    "light": """
import sys, lightning_hetero, lightning_hetero.planner
heavy = [name for name in ("torch", "lightning", "timm", "matplotlib") if name in sys.modules]
assert not heavy, heavy
""",
    "no such name": """
import lightning_hetero
try:
    lightning_hetero.Nothing
except AttributeError as error:
    assert "lightning_hetero" in str(error) and "Nothing" in str(error)
else:
    raise AssertionError
""",
    "an import that fails": """
import sys
from lightning_hetero.late import after_import
calls = []
after_import("json.tool", lambda: calls.append(1))
after_import("json.nothing", lambda: calls.append(2))
try:
    import json.nothing
except ModuleNotFoundError:
    pass
assert calls == []
import json.tool
import json.tool
assert calls == [1]
after_import("json.tool", lambda: calls.append(3))
assert calls == [1, 3]
""",
}


QUICK = ("light", "no such name", "an import that fails")
"""without Lightning, which takes ten seconds; that its registry knows the names, tests of launchers show, too"""


@pytest.mark.parametrize(
    "source",
    [pytest.param(source, id=name, marks=[] if name in QUICK else pytest.mark.slow) for name, source in ORDERS.items()],
)
def test_names_are_registered(source: str) -> None:
    result = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, timeout=100)
    assert result.returncode == 0, result.stderr
