"""Put a finished file or folder in another one's place: whenever the process dies, a whole one is found."""

from __future__ import annotations

import ctypes
import os
import shutil
from pathlib import Path

_AT_FDCWD, _RENAME_EXCHANGE = -100, 2


def put_in_place(new: Path, path: Path) -> None:
    """Give ``new`` the name ``path``; what had that name is deleted last.

    Where the system can swap two names (Linux, on most file systems), a whole one is there under ``path`` at any
    moment. Elsewhere the old folder is moved aside first, where :func:`find` looks for it.
    """
    if not os.path.lexists(path) or not (new.is_dir() or path.is_dir()):
        os.replace(new, path)
    elif _swap(new, path):
        remove(new)
    else:
        remove(_aside(path))
        os.replace(path, _aside(path))
        os.replace(new, path)
    remove(_aside(path))


def find(path: Path) -> Path:
    """Return ``path``, or where it was moved by a process that died before the new one had its name."""
    old = _aside(path)
    return old if not os.path.lexists(path) and os.path.lexists(old) else path


def remove(path: Path) -> None:
    """Delete a file or folder, if it is there; under its name it is whole or gone."""
    if not os.path.lexists(path):
        return
    if path.is_symlink() or not path.is_dir():
        path.unlink()
        return
    remains = path.with_name(f".{path.name.lstrip('.')}.remains")
    shutil.rmtree(remains, ignore_errors=True)  # of a process that died here
    os.replace(path, remains)
    shutil.rmtree(remains)


def _aside(path: Path) -> Path:
    return path.with_name(f".{path.name}.old")


def _swap(one: Path, other: Path) -> bool:
    """Exchange two names at once; return False where the system or the file system cannot."""
    try:
        exchange = ctypes.CDLL(None, use_errno=True).renameat2
    except (AttributeError, OSError, TypeError):
        return False
    exchange.argtypes = [ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_uint]
    names = os.fsencode(one.absolute()), os.fsencode(other.absolute())
    return bool(exchange(_AT_FDCWD, names[0], _AT_FDCWD, names[1], _RENAME_EXCHANGE) == 0)
