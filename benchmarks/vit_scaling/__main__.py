"""``python -m benchmarks.vit_scaling``: the study's tables on whatever is there."""

from __future__ import annotations

import signal
import sys

from benchmarks.hetero_speedup.preload import preload

if not {"--from", "--help", "-h"} & set(sys.argv):
    preload("benchmarks.vit_scaling.arms")  # before this process imports torch, so that both do at once

from benchmarks.vit_scaling.command import main

signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that ranks are ended, too
sys.exit(main())
