"""What runs beside a fit works in several shard groups as on one device: averages, ties, manual steps."""

from __future__ import annotations

import pytest

from tests.companion_fits import CASES, Groups, train_all
from tests.harness import WarmRanks
from tests.test_fsdp_exactness import alike

SHARES = (2, 1, 0, 1)
"""one rank has no sample at all"""

GROUPS: dict[str, Groups] = {"1,3": ((0,), (1, 2, 3)), "2,2": ((0, 1), (2, 3))}
"""crossing by ownership, and FSDP2's own hybrid sharding"""

NAMES = [name for name in CASES if "kept gathered" not in name]
"""all but those that bring a plan of their own"""

FIRST = {
    "1,3": ["averages of every step", "blocks tied", "two networks by hand, toggled", "own parameters by hand"],
    "2,2": ["stochastic weight averaging", "two networks by hand"],
}


def check(ranks: WarmRanks, layout: str, names: list[str]) -> None:
    reference = train_all(None, names)
    for results in ranks.run(4, train_all, SHARES, names, GROUPS[layout], timeout=300):
        for name, result in results.items():
            try:
                alike(result, reference[name])
            except AssertionError as error:
                raise AssertionError(f"{name}: {error}") from None


@pytest.mark.slow
@pytest.mark.parametrize("layout", GROUPS)
def test_fits_in_groups_are_one_devices(ranks: WarmRanks, layout: str) -> None:
    check(ranks, layout, FIRST[layout])


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("layout", GROUPS)
def test_all_fits_in_groups_are_one_devices(ranks: WarmRanks, layout: str) -> None:
    check(ranks, layout, NAMES)
