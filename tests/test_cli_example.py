"""The LightningCLI example trains by its YAML file."""

from __future__ import annotations

import runpy
import sys
import warnings
from pathlib import Path
from typing import Any

from tests.harness import WarmRanks

EXAMPLE = Path(__file__).parents[1] / "examples" / "cli"
PAIR = """
schema: 1
name: pair
emulate: true
nodes:
  - name: n
    devices: [{type: fast, memory: 2 GiB, speed: 2 GFLOP/s}, {type: slow, memory: 2 GiB, speed: 1 GFLOP/s}]
"""


def _main(*arguments: str) -> Any:
    sys.argv = [str(EXAMPLE / "main.py"), "fit", "--config", str(EXAMPLE / "config.yaml"), *arguments]
    # Lightning 2.6 asks jsonargparse in a way that its newest version deprecates, and advises on loggers
    warnings.simplefilter("ignore")
    return runpy.run_path(sys.argv[0])["main"]()


def _fit(cluster: str) -> dict[str, Any]:
    short = ["--trainer.max_epochs", "1", "--trainer.limit_train_batches", "4", "--trainer.limit_val_batches", "1"]
    quiet = ["--trainer.enable_progress_bar", "false", "--trainer.num_sanity_val_steps", "1"]
    strategy = [f"--trainer.strategy.init_args.cluster={cluster}", "--trainer.strategy.init_args.global_batch_size=24"]
    cli = _main(*strategy, *short, *quiet)
    return {
        "strategy": type(cli.trainer.strategy).__name__,
        "rebalances": cli.trainer.strategy.rebalance_is_asked,
        "shares": cli.trainer.strategy.plan.batch_shares,
        "steps": cli.trainer.global_step,
        "wrote": [path.name for path in Path.cwd().rglob("metrics.jsonl")],
    }


def test_it_trains_as_the_file_says(ranks: WarmRanks, tmp_path: Path) -> None:
    (tmp_path / "pair.yaml").write_text(PAIR)
    first, second = ranks.run(2, _fit, str(tmp_path / "pair.yaml"), process_group=False)
    assert first["strategy"] == "HeteroFSDPStrategy"
    assert first["rebalances"]
    assert sum(first["shares"]) == 24
    assert first["shares"] == second["shares"]
    assert first["steps"] == 4
    assert first["wrote"] == ["metrics.jsonl"]


def test_a_wrong_argument_in_the_file_is_told(ranks: WarmRanks) -> None:
    wrong = "--trainer.strategy.init_args.global_batch_size=many"
    ((status, kind, message),) = ranks.run_outcomes(1, _main, wrong, process_group=False)
    assert (status, kind, message) == ("error", "SystemExit", "2")  # with the argument's name on standard error
