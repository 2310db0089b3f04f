"""Do something once a module has been imported, without importing it."""

from __future__ import annotations

import importlib.abc
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


def after_import(name: str, call: Callable[[], object]) -> None:
    """Call ``call`` at the end of the first import of ``name``; at once if that is imported already.

    Args:
        name: full name of a module.
        call: what to do; its errors come out of the import.
    """
    if sys.modules.get(name) is not None:
        call()
    else:
        sys.meta_path.insert(0, _AfterImport(name, call))


class _AfterImport(importlib.abc.MetaPathFinder):
    """Finds one module as the other finders do, and has its loader call back at the end."""

    def __init__(self, name: str, call: Callable[[], object]) -> None:
        self.name, self.call = name, call

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: Any = None) -> ModuleSpec | None:
        if fullname != self.name:
            return None
        others = (finder for finder in sys.meta_path if finder is not self)
        spec = next((found for finder in others if (found := finder.find_spec(fullname, path, target))), None)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        # on this loader alone, which stays what it is: others ask it for sources and resources
        def exec_module(module: ModuleType) -> None:
            execute(module)
            # looking for a module is not importing it, so only now
            if self in sys.meta_path:
                sys.meta_path.remove(self)
                self.call()

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
