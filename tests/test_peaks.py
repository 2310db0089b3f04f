"""The table of known devices, and how names find their row."""

import pytest

from lightning_hetero.cluster.peaks import DTYPES, PRESETS, near_names, peak_flops_per_s, preset_for


@pytest.mark.parametrize(
    ("printed", "kind"),
    [
        ("NVIDIA H200", "H200"),
        ("NVIDIA H200 NVL", "H200-NVL"),
        ("NVIDIA H100 80GB HBM3", "H100-SXM"),
        ("NVIDIA H100 PCIe", "H100-PCIe"),
        ("NVIDIA A100-SXM4-40GB", "A100-40GB"),
        ("NVIDIA A100-PCIE-40GB", "A100-40GB"),
        ("NVIDIA A100-SXM4-80GB", "A100-80GB"),
        ("NVIDIA A100 80GB PCIe", "A100-80GB"),
        ("NVIDIA L4", "L4"),
        ("NVIDIA L40", "L40"),
        ("NVIDIA L40S", "L40S"),
        ("NVIDIA RTX A6000", "A6000"),
        ("NVIDIA RTX 6000 Ada Generation", "RTX-6000-Ada"),
        ("NVIDIA GeForce RTX 3090", "RTX-3090"),
        ("NVIDIA GeForce RTX 4090", "RTX-4090"),
        ("NVIDIA GeForce RTX 2080 Ti", "RTX-2080-Ti"),
        ("NVIDIA TITAN RTX", "Titan-RTX"),
        ("Tesla V100-SXM2-16GB", "V100-16GB"),
        ("Tesla V100-SXM2-32GB", "V100-32GB"),
        ("Tesla T4", "T4"),
        ("Tesla P40", "P40"),
        ("Tesla P100-PCIE-16GB", "P100"),
        ("AMD Instinct MI250X", "MI250X-GCD"),
        ("AMD Instinct MI300X", "MI300X"),
        ("NVIDIA B200", "B200"),
        ("a100-40gb", "A100-40GB"),
    ],
)
def test_what_torch_prints_finds_its_row(printed, kind):
    preset = preset_for(printed)
    assert preset is not None
    assert preset.type == kind


@pytest.mark.parametrize(
    "name",
    [
        "NVIDIA A10G",  # not an A10
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA A100-SXM4-40GB MIG 3g.20gb",
        "AMD Instinct MI250X / MI250",  # some drivers print one name for two devices
        "A100",  # two memory sizes
        "H100",
        "fast",
        "NVIDIA",
        "",
        None,
    ],
)
def test_an_unknown_name_is_not_guessed(name):
    assert preset_for(name) is None
    assert peak_flops_per_s(name, "bf16") is None


@pytest.mark.parametrize(
    ("name", "dtype", "tflops"),
    [
        ("H200", "bf16", 989.4),
        ("H200", "bfloat16", 989.4),
        ("A100-80GB", "bf16", 312),
        ("A100-40GB", "tf32", 156),
        ("L40S", "bf16", 362.05),
        ("RTX-4090", "bf16", 165.2),
        ("V100-16GB", "fp16", 125),
        ("T4", "fp16", 65),
        ("MI250X", "bf16", 191.5),
        ("MI300X", "bf16", 1307.4),
        # 228 compute units at 2.1 GHz, 2048 FLOP per clock each; fp64 256
        ("MI300A", "bf16", 228 * 2.1e-3 * 2048),
        ("MI300A", "fp64", 228 * 2.1e-3 * 256),
    ],
)
def test_dense_peaks(name, dtype, tflops):
    assert peak_flops_per_s(name, dtype) == pytest.approx(tflops * 1e12, rel=3e-4)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("V100-16GB", "bf16"),
        ("T4", "tf32"),
        ("A100-80GB", "fp8"),
        # whose figures could not be checked: no MFU rather than a wrong one, and not that of the SXM module
        ("H100-NVL", "bf16"),
        ("NVIDIA H200 NVL", "bf16"),
        ("A5000", "fp16"),
    ],
)
def test_what_a_device_lacks_is_absent(name, dtype):
    assert peak_flops_per_s(name, dtype) is None


@pytest.mark.parametrize("preset", PRESETS.values(), ids=PRESETS)
def test_every_row_is_whole_and_consistent(preset):
    assert preset_for(preset.type) is preset
    assert all(preset_for(alias) is preset for alias in preset.aliases)
    assert 10e9 <= preset.memory_bytes <= 300e9
    assert "sheet" in preset.source or "white paper" in preset.source
    assert set(preset.peaks) <= set(DTYPES)
    assert all(1e12 < peak < 6e15 for peak in preset.peaks.values())
    # Narrower types are never slower, and a dense fp8 peak is about twice the 16-bit one: a figure with
    # sparsity that slipped in would break the ratio.
    order = [preset.peaks[dtype] for dtype in ("fp32", "tf32", "fp16", "fp8") if dtype in preset.peaks]
    assert order == sorted(order)
    if "fp8" in preset.peaks:
        assert preset.peaks["fp8"] / preset.peaks["bf16"] == pytest.approx(2, rel=0.03)
    if "tf32" in preset.peaks:
        assert preset.peaks["fp16"] / preset.peaks["tf32"] == pytest.approx(2, rel=0.03)


def test_near_names_for_errors():
    assert near_names("A100") == ["A100-40GB", "A100-80GB", *near_names("A100")[2:]]
    assert "RTX-4090" in near_names("RTX4090")
    assert near_names("zzzzzz") == []
