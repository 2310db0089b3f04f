"""``python -m lightning_hetero`` is ``lightning-hetero``."""

import sys

from lightning_hetero.cli import main

sys.exit(main())
