"""How a model is trained, as far as a plan depends on it: batch, precision, optimizer."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from lightning_hetero.errors import HeteroError, raise_all
from lightning_hetero.simulator.memory import StateBytes

# Lightning's names: bytes of a stored value, of a gathered one (and its gradient), of one in the reduce-scatter.
# Under the mixed ones Lightning casts inside the operators (autocast): what is gathered stays in 32 bits.
_PRECISIONS = {
    "64-true": (8, 8, 8),
    "32-true": (4, 4, 4),
    "bf16-true": (2, 2, 2),
    "16-true": (2, 2, 2),
    "bf16-mixed": (4, 4, 4),
    "16-mixed": (4, 4, 4),
}
# Values of optimizer state per parameter.
_OPTIMIZERS = {"adamw": 2, "adam": 2, "sgd-momentum": 1, "rmsprop": 1, "adagrad": 1, "sgd": 0}


@dataclass(frozen=True)
class Training:
    """How a model is trained.

    Args:
        global_batch_size: samples per optimizer step over all ranks, at least 1.
        precision: one of Lightning's names: "64-true", "32-true", "bf16-true", "16-true", "bf16-mixed", "16-mixed".
        optimizer: "adamw", "adam", "sgd-momentum", "rmsprop", "adagrad" or "sgd".

    Raises:
        HeteroError: listing every value that is not one of these.
    """

    global_batch_size: int
    precision: str = "32-true"
    optimizer: str = "adamw"

    def __post_init__(self) -> None:
        batch = self.global_batch_size
        problems = []
        if not isinstance(batch, int) or isinstance(batch, bool) or batch < 1:
            problems.append(f"global_batch_size is {batch!r}: give a whole number of samples, 1 or more")
        problems += [
            f"{name} is {value!r}: give one of {', '.join(known)}"
            for name, value, known in (
                ("precision", self.precision, _PRECISIONS),
                ("optimizer", self.optimizer, _OPTIMIZERS),
            )
            if value not in known
        ]
        raise_all(HeteroError, "the training cannot be planned", problems)

    @cached_property  # searches ask thousands of times
    def state(self) -> StateBytes:
        """Bytes per parameter of each state."""
        stored, gathered, reduced = _PRECISIONS[self.precision]
        optimizer = stored * _OPTIMIZERS[self.optimizer]
        return StateBytes(stored, stored, optimizer, gathered, reduced)
