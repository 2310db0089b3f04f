"""Fixtures of the whole suite."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from tests.harness.filters import IGNORED_WARNINGS
from tests.harness.pool import WarmRanks


def pytest_configure(config: pytest.Config) -> None:
    """The same warnings are ignored here and in the ranks; nothing measured is kept from test to test."""
    os.environ["LIGHTNING_HETERO_CACHE"] = "off"
    # the same examples in every run; HYPOTHESIS_PROFILE=explore looks for new ones
    settings.register_profile("reproducible", derandomize=True)
    settings.register_profile("explore", max_examples=500)
    settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "reproducible"))
    for text in IGNORED_WARNINGS:
        config.addinivalue_line("filterwarnings", text)


_OF_A_RANK = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


@pytest.fixture(autouse=True)
def a_launchers_variables_are_put_back() -> Iterator[None]:
    """What a later test starts would go looking for the place that they name."""
    before = {name: os.environ.get(name) for name in _OF_A_RANK}
    yield
    for name, value in before.items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value


_CRASHES = pytest.StashKey[list[str]]()


@pytest.fixture(scope="session")
def ranks(pytestconfig: pytest.Config) -> WarmRanks:
    """Warm gloo ranks: ``ranks.run(world_size, fn, *args)``; see tests/harness."""
    filters = tuple(pytestconfig.getini("filterwarnings"))
    made = WarmRanks(Path(str(pytestconfig.rootpath)), filters)
    pytestconfig.stash[_CRASHES] = made.crashes
    return made


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Tell of runs that were run again because a rank had broken memory."""
    for crash in config.stash.get(_CRASHES, []):
        terminalreporter.section("run again: a rank broke memory")
        terminalreporter.write_line(crash)
