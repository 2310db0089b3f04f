"""Costs files: written, read and checked."""

import json

import pytest

from lightning_hetero.costs import ModelCosts, UnitCost, UnitTiming
from lightning_hetero.errors import HeteroError

TIMING = UnitTiming(1e-3, 2e-4, 2e-3, 4e-4)
COSTS = ModelCosts(
    "vit",
    (
        UnitCost("embed", 100, 1e6, 2e6, 64, 32),
        UnitCost("blocks.0", 2000, 5.5e6, 1.1e7, 4096, 32, {"fast": TIMING, "slow": UnitTiming(0, 1, 0, 2)}),
    ),
)


def refused(change):
    data = COSTS.to_dict()
    change(data)
    with pytest.raises(HeteroError) as caught:
        ModelCosts.from_dict(data, "costs file c.json")
    return str(caught.value)


def test_reads_back_equal(tmp_path):
    path = tmp_path / "costs.json"
    COSTS.save(path)
    assert ModelCosts.load(path) == COSTS
    assert json.loads(path.read_text())["schema"] == 1


def test_seconds_are_fixed_plus_per_sample():
    assert TIMING.forward_s(0) == 1e-3
    assert TIMING.forward_s(5) == pytest.approx(2e-3)
    assert TIMING.backward_s(5) == pytest.approx(4e-3)


def test_parameters_are_summed():
    assert COSTS.parameters == 2100


def test_objects_are_checked_too():
    unit = COSTS.units[0]
    with pytest.raises(HeteroError, match="no unit"):
        ModelCosts("m", ())
    with pytest.raises(HeteroError, match="'embed' is used 2 times"):
        ModelCosts("m", (unit, unit))


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda data: data.update(schema=2), "schema: is 2"),
        (lambda data: data.update(modle="x"), "unknown key 'modle': did you mean 'model'?"),
        (lambda data: data.update(units=[]), "units: is []"),
        (lambda data: data.pop("units"), "key 'units' is missing"),
        (lambda data: data["units"][0].pop("parameters"), "units[0]: key 'parameters' is missing"),
        (lambda data: data["units"][0].update(parameters=-1), "units[0].parameters: -1 is not valid"),
        (lambda data: data["units"][0].update(parameters=1.5), "units[0].parameters: 1.5 is not valid"),
        (lambda data: data["units"][1].update(forward_flops="many"), "units[1].forward_flops: 'many'"),
        (lambda data: data["units"][1].update(timings=[1]), "units[1].timings: is [1]"),
        (
            lambda data: data["units"][1]["timings"]["fast"].pop("forward_fixed_s"),
            "units[1].timings['fast']: key 'forward_fixed_s' is missing",
        ),
        (
            lambda data: data["units"][1]["timings"]["fast"].update(forward_per_sample_s=-1),
            "forward of one sample takes -0.999 s",
        ),
    ],
)
def test_bad_files_name_place_and_value(change, expected):
    message = refused(change)
    assert message.startswith("costs file c.json has 1 problem:")
    assert expected in message


def test_all_problems_at_once():
    def spoil(data):
        data["schema"] = 0
        data["units"][0]["output_bytes"] = None
        data["units"][1]["name"] = ""

    message = refused(spoil)
    assert message.startswith("costs file c.json has 3 problems:")


def test_missing_file_and_not_json(tmp_path):
    with pytest.raises(HeteroError, match=r"nowhere\.json does not exist"):
        ModelCosts.load(tmp_path / "nowhere.json")
    (tmp_path / "c.json").write_text("{'a': 1}")
    with pytest.raises(HeteroError, match=r"c\.json is not JSON"):
        ModelCosts.load(tmp_path / "c.json")
