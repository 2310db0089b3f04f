"""Trains a small character GPT on text that every machine has: the sources of Python's standard library.

By default with hetero_pipe on the emulated cluster beside this file; its embedding is tied, so the first and the last
stage share it.

    python examples/gpt_text.py
    python examples/gpt_text.py --strategy hetero_fsdp            # or hetero_auto; "auto" is one plain process
    python examples/gpt_text.py --text path/to/file.txt
"""

from __future__ import annotations

import argparse
import sys
import sysconfig
import time
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset

from lightning_hetero.models.gpt import GPT, GPTConfig
from lightning_hetero.strategies import HeteroAutoStrategy, HeteroFSDPStrategy, HeteroPipelineStrategy

CLUSTER = Path(__file__).with_name("two_fast_two_slow.yaml")
STRATEGIES: tuple[type[Any], ...] = (HeteroPipelineStrategy, HeteroFSDPStrategy, HeteroAutoStrategy)
FILES = ("argparse.py", "ast.py", "datetime.py", "inspect.py", "logging/__init__.py", "tarfile.py", "typing.py")
CHARACTERS = "\n" + "".join(map(chr, range(32, 127)))
"""the vocabulary; any other character is read as a space"""


class Text(Dataset[tuple[Tensor, Tensor]]):
    """Pieces of a text and, for each character, the next one.

    Args:
        text: at least one piece and a character long.
        context: characters of a piece.
    """

    def __init__(self, text: str, context: int) -> None:
        known = {character: index for index, character in enumerate(CHARACTERS)}
        self.tokens = torch.tensor([known.get(character, known[" "]) for character in text])
        self.context = context

    def __len__(self) -> int:
        return (len(self.tokens) - 1) // self.context

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        piece = self.tokens[index * self.context : (index + 1) * self.context + 1]
        return piece[:-1], piece[1:]


class CharacterGPT(LightningModule):
    """The bundled GPT and nothing that knows of devices.

    Args:
        config: sizes of the GPT.
        learning_rate: of AdamW.
    """

    def __init__(self, config: GPTConfig, learning_rate: float) -> None:
        super().__init__()
        self.model = GPT(config)
        self.learning_rate = learning_rate

    def training_step(self, batch: tuple[Tensor, Tensor], batch_index: int) -> Tensor:
        """Return the mean cross-entropy of the next characters, in nats."""
        characters, following = batch
        loss = cross_entropy(self.model(characters).flatten(0, 1), following.flatten())
        self.log("train_loss", loss, prog_bar=True, on_step=True, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_index: int) -> None:
        """Log the same over the held-out text."""
        characters, following = batch
        loss = cross_entropy(self.model(characters).flatten(0, 1), following.flatten())
        self.log("val_loss", loss, prog_bar=True, sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW; matrices decay, vectors do not."""
        matrices = [p for p in self.parameters() if p.ndim > 1]
        vectors = [p for p in self.parameters() if p.ndim < 2]
        groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
        return torch.optim.AdamW(groups, lr=self.learning_rate)


def read_text(path: Path | None, characters: int) -> str:
    """The text of a file, or of some sources of the standard library, up to so many characters."""
    if path is not None:
        if not path.is_file():
            sys.exit(f"--text {path}: no such file; leave it out for the standard library's sources")
        return path.read_text(encoding="utf-8", errors="replace")[:characters]
    library = Path(sysconfig.get_paths()["stdlib"])
    sources = [library / name for name in FILES if (library / name).is_file()]
    return "".join(source.read_text(encoding="utf-8") for source in sources)[:characters]


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strategy", default="hetero_pipe", help="a strategy name of Lightning's or ours")
    parser.add_argument("--cluster", default=CLUSTER, help="cluster file for the hetero ones; 'none' to discover")
    parser.add_argument("--devices", default="auto", help="processes; an emulated cluster sets them itself")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--global-batch", type=int, default=64, help="pieces of a step over all ranks")
    parser.add_argument("--context", type=int, default=32, help="characters of a piece")
    parser.add_argument("--width", type=int, default=96)
    parser.add_argument("--depth", type=int, default=4)
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--text", type=Path, help="a text file in place of the standard library's sources")
    parser.add_argument("--characters", type=int, default=60_000, help="how much of the text is read")
    parser.add_argument("--max-loss", type=float, default=2.6, help="exit with 1 above this validation loss, in nats")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Train, print the loss; returns 1 when it is higher than asked for."""
    options = parse_arguments(arguments)
    seed_everything(options.seed)
    start_s = time.monotonic()
    text = read_text(options.text, options.characters)
    border = len(text) * 9 // 10
    train, val = Text(text[:border], options.context), Text(text[border:], options.context)
    config = GPTConfig(
        vocabulary=len(CHARACTERS), context=options.context, width=options.width, depth=options.depth, heads=4
    )
    strategy: Any = options.strategy
    ours = next((each for each in STRATEGIES if each.strategy_name == options.strategy), None)
    if ours is not None and options.cluster != "none":
        strategy = ours(options.cluster, global_batch_size=options.global_batch)
    trainer = Trainer(
        accelerator="auto" if isinstance(strategy, str) else "cpu",
        devices=options.devices,
        strategy=strategy,
        max_epochs=options.epochs,
        num_sanity_val_steps=0,
        log_every_n_steps=10,
        logger=False,
        enable_checkpointing=False,
    )
    model = CharacterGPT(config, options.learning_rate)
    trainer.fit(model, DataLoader(train, options.global_batch, shuffle=True), DataLoader(val, options.global_batch))
    loss = float(trainer.callback_metrics["val_loss"])
    if not trainer.is_global_zero:
        return 0
    taken_s = time.monotonic() - start_s
    print(f"validation loss {loss:.3f} nats a character after {options.epochs} epochs, {taken_s:.0f} s")
    if loss > options.max_loss:
        print(f"that is higher than --max-loss {options.max_loss:g}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
