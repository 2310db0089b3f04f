"""Costs files: written, read and checked."""

import json
from dataclasses import replace

import pytest

from lightning_hetero.costs import InputShape, ModelCosts, TimingPoint, UnitCost, UnitTiming
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


def test_everything_optional_reads_back_too(tmp_path):
    points = (TimingPoint(1, 1e-3, 2e-3), TimingPoint(4, 3e-3, 7e-3))
    unit = replace(COSTS.units[0], timings={"H200": UnitTiming.fitted(points)}, is_block=False, shared_parameters=7)
    inputs = (InputShape((3, 224, 224), "bfloat16"), InputShape((), "int64"))
    costs = ModelCosts("vit", (unit,), "bfloat16", 8000, inputs, {"H200": "NVIDIA H200"})
    costs.save(tmp_path / "c.json")
    assert ModelCosts.load(tmp_path / "c.json") == costs == ModelCosts.from_dict(costs.to_dict())
    assert costs.units[0].timings["H200"].points == points


def test_a_file_without_the_optional_fields_still_loads():
    """What the first version wrote."""
    timing = {f"{phase}_{part}_s": 1.0 for phase in ("forward", "backward") for part in ("fixed", "per_sample")}
    numbers = dict.fromkeys(("forward_flops", "backward_flops", "kept_activation_bytes", "output_bytes"), 1)
    unit = {"name": "a", "parameters": 3, **numbers, "timings": {"fast": timing}, "is_block": True}
    costs = ModelCosts.from_dict({"schema": 1, "model": "m", "dtype": "float32", "loss_bytes": 0, "units": [unit]})
    assert costs == ModelCosts("m", (UnitCost("a", 3, 1, 1, 1, 1, {"fast": UnitTiming(1, 1, 1, 1)}),))


def fitted(*points):
    timing = UnitTiming.fitted([TimingPoint(*point) for point in points])
    assert len(timing.points) == len(points)
    return timing.forward_fixed_s, timing.forward_per_sample_s, timing.backward_fixed_s, timing.backward_per_sample_s


def test_a_line_is_found_exactly():
    assert fitted((1, 3.0, 7.0), (2, 5.0, 10.0), (4, 9.0, 16.0)) == pytest.approx((1, 2, 4, 3))


def test_one_size_says_nothing_of_the_fixed_part():
    assert fitted((4, 8.0, 12.0)) == pytest.approx((0, 2, 0, 3))
    assert fitted((4, 8.0, 12.0), (4, 8.0, 12.0)) == pytest.approx((0, 2, 0, 3))


def test_no_part_is_negative():
    # forward grows faster than the samples, backward shrinks
    forward_fixed, forward_slope, backward_fixed, backward_slope = fitted((1, 1.0, 2.0), (2, 3.0, 1.0))
    assert (forward_fixed, backward_slope) == (0, 0)
    assert 1.0 < forward_slope < 1.5
    assert 1.0 < backward_fixed < 2.0


def test_a_disturbed_large_size_does_not_spoil_the_small_ones():
    """Deviations count relative to the time: 10 % at 64 samples weigh as much as 10 % at 1."""
    timing = UnitTiming.fitted([TimingPoint(n, (1 + n) * (1.1 if n == 64 else 1.0), 0.0) for n in (1, 2, 4, 8, 64)])
    assert all(timing.forward_s(n) == pytest.approx(1 + n, rel=0.06) for n in (1, 2, 4, 8))


@pytest.mark.parametrize("points", [[], [TimingPoint(0, 1.0, 1.0)], [TimingPoint(1, -1.0, 1.0)]])
def test_nothing_to_fit(points):
    with pytest.raises(HeteroError, match="cannot be fitted"):
        UnitTiming.fitted(points)


def test_further_devices_join():
    slow = replace(COSTS, units=tuple(replace(u, timings={"slow": TIMING, "new": TIMING}) for u in COSTS.units))
    slow = replace(slow, devices={"new": "NVIDIA New"})
    both = COSTS.with_timings_of(slow)
    assert both.units[0].timings == {"slow": TIMING, "new": TIMING}
    assert both.units[1].timings["slow"] == UnitTiming(0, 1, 0, 2)
    assert both.devices == {"new": "NVIDIA New"}
    assert both.timed_types == ("slow", "new")
    assert COSTS.timed_types == ()


def test_costs_of_something_else_do_not_join():
    other = replace(COSTS, dtype="bfloat16", inputs=(InputShape((3,), "float32"),), units=COSTS.units[:1])
    with pytest.raises(HeteroError) as caught:
        COSTS.with_timings_of(other)
    for difference in ("dtype: 'float32' and 'bfloat16'", "inputs", "parameters: 2100 and 100", "units"):
        assert difference in str(caught.value)


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
        (
            lambda data: data.update(inputs=[{"shape": [-1], "dtype": "float32"}]),
            "inputs[0].shape: [0] -1 is not valid",
        ),
        (lambda data: data.update(devices=["H200"]), "devices: is ['H200'], not a mapping"),
        (
            lambda data: data["units"][1]["timings"]["fast"].update(
                points=[{"samples": 0, "forward_s": 1.0, "backward_s": 1.0}]
            ),
            "units[1].timings['fast'].points[0].samples: 0 is not valid",
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
