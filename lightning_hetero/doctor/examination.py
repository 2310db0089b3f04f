"""All checks, from facts to findings."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_hetero.doctor import architectures, busy, clocks, devices, dtypes, limits, reach, versions
from lightning_hetero.doctor.facts import RankFacts
from lightning_hetero.doctor.finding import LEVELS, Finding, not_checked
from lightning_hetero.doctor.limits import LoaderNeeds
from lightning_hetero.doctor.places import grouped, places
from lightning_hetero.doctor.reach import Reach

CHECKS = (
    reach.CHECK,
    devices.CHECK,
    versions.CHECK,
    architectures.CHECK,
    dtypes.CHECK,
    busy.CHECK,
    clocks.CHECK,
    limits.CHECK,
)
"""names of all checks, in the order in which they are told"""

_OF_GPUS = (architectures.CHECK, dtypes.CHECK, busy.CHECK, clocks.CHECK)
_OF_DRIVERS = (busy.CHECK, clocks.CHECK)


def examine(
    ranks: Sequence[RankFacts],
    reaches: Sequence[Reach] = (),
    *,
    missing: Sequence[int] = (),
    waited_s: float = 0.0,
    precision: str | None = None,
    needs: LoaderNeeds | None = None,
) -> list[Finding]:
    """What stands in the way of a training on these ranks; errors first.

    Args:
        ranks: facts of all ranks that came.
        reaches: who tried to reach whom.
        missing: ranks that did not come.
        waited_s: how long they were waited for, in seconds.
        precision: of the training, as ``Trainer(precision=...)`` takes it.
        needs: of its loader.

    Raises:
        HeteroError: for a precision that is not known.
    """
    found = [
        *reach.check_reach(ranks, reaches, missing, waited_s),
        *devices.check_devices(ranks),
        *versions.check_versions(ranks),
        *architectures.check_architectures(ranks),
        *dtypes.check_dtypes(ranks, precision),
        *busy.check_busy(ranks),
        *clocks.check_clocks(ranks),
        *limits.check_limits(ranks, needs),
        *unlooked(ranks),
    ]
    return sorted(found, key=lambda each: (LEVELS.index(each.level), CHECKS.index(each.check)))


def unlooked(ranks: Sequence[RankFacts]) -> list[Finding]:
    """Checks of GPUs for which there was nothing to look at, and why."""
    found = []
    bare = [facts for facts in ranks if not facts.has_gpu]
    if bare:
        said = sorted({line for facts in bare for line in facts.torch_says})
        why = "torch sees no GPU there" + (f" ({'; '.join(said)})" if said else "")
        found += [not_checked(check, places(bare), why) for check in _OF_GPUS]
    silent = [facts for facts in ranks if any(device.driver is None for device in facts.devices)]
    for why, those in grouped(silent, lambda facts: facts.unchecked.get("driver", "the driver says nothing")).items():
        found += [not_checked(check, places(those), why) for check in _OF_DRIVERS]
    for facts in ranks:
        found += [
            Finding("error", devices.CHECK, places([facts]), f"{what} cannot be used: {why}", "see nvidia-smi or dmesg")
            for what, why in facts.unchecked.items()
            if what.startswith("GPU ")
        ]
    return found
