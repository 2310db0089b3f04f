"""Where a result was made."""

from __future__ import annotations

import os
import platform
import subprocess
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path


def environment() -> dict[str, str | int]:
    """Return versions, processor, cores, commit and time."""
    return {
        **{name: version(name) for name in ("torch", "lightning", "timm")},
        "python": platform.python_version(),
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)),
        "load_average_1min": f"{os.getloadavg()[0]:.2f}",
        "commit": _commit(),
        "time_utc": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }


def _cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or "unknown"


def _commit() -> str:
    def git(*args: str) -> str:
        folder = Path(__file__).parent
        return subprocess.run(["git", *args], cwd=folder, capture_output=True, text=True, check=True).stdout.strip()

    try:
        return git("rev-parse", "HEAD") + (" with changes" if git("status", "--porcelain") else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
