"""What known devices are capable of: memory, and the dense peak per dtype, each with its source.

"Peak" is what the vendor states for *dense* matrices with a multiply-add counted as 2; where the vendor
prints a figure with 2:4 sparsity (twice the dense one), it is halved here and the source says so. For fp32
it is what plain fp32 matrix products may reach (matrix units on AMD, where there are some; CUDA cores on
NVIDIA, TF32 having its own entry); for fp64 it includes tensor or matrix cores. On GeForce cards, fp16 and
fp8 are the rates with fp32 accumulation, the one that torch uses. A dtype that a device has no fast path or
no published figure for is absent.

Memory is the vendor's "GB" read as 10**9 bytes. Devices report a little more (an "80 GB" H100 79 GiB, which
is 85 * 10**9 bytes), so a plan made from presets never counts on bytes that are not there.

Names match exactly after dropping vendor words and punctuation: "NVIDIA A10G" is not an A10, and a laptop
or MIG variant is not the full card. A name that is not listed gives ``None`` and must be measured.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass

_SHEET = "NVIDIA {} data sheet"
_UNCHECKED = ": memory; its peaks could not be checked against a second source and are left out"
_SPARSE = "NVIDIA {} data sheet; tensor figures are printed with sparsity, halved here"


@dataclass(frozen=True)
class DevicePreset:
    """A known device.

    Args:
        type: the name that cluster files use ("A100-40GB").
        memory_bytes: memory in bytes, from the vendor's figure.
        peaks: dense peak in FLOP/s by dtype: fp64, fp32, tf32, fp16, bf16, fp8, where there is one.
        source: where the figures come from.
        aliases: what ``torch.cuda.get_device_name`` prints for it, and other common names.
    """

    type: str
    memory_bytes: int
    peaks: Mapping[str, float]
    source: str
    aliases: tuple[str, ...]


def _preset(kind: str, memory_gb: float, tflops: Mapping[str, float], source: str, *aliases: str) -> DevicePreset:
    peaks = {dtype: value * 1e12 for dtype, value in tflops.items()}
    return DevicePreset(kind, round(memory_gb * 1e9), peaks, source, aliases)


# One row per device: type, memory in GB, dense TFLOP/s by dtype, source, names.
_HOPPER_SXM = {"fp64": 67, "fp32": 67, "tf32": 494.7, "fp16": 989.4, "bf16": 989.4, "fp8": 1978.9}
_H100 = "NVIDIA H100 Tensor Core GPU Architecture white paper, dense figures"
_A100 = {"fp64": 19.5, "fp32": 19.5, "tf32": 156, "fp16": 312, "bf16": 312}
_GA102 = "NVIDIA Ampere GA102 GPU Architecture white paper, appendix, dense figures"
_ADA = "NVIDIA Ada GPU Architecture white paper, appendix, dense figures"
_TURING = "NVIDIA Turing GPU Architecture white paper, appendix, reference clocks"
_CDNA2 = "AMD Instinct MI200 series data sheet"
_CDNA3 = "AMD Instinct {} data sheet, figures without sparsity"

_ROWS = (
    # Blackwell
    _preset(
        "B200",
        180,
        {"fp64": 37, "fp32": 75, "tf32": 1100, "fp16": 2250, "bf16": 2250, "fp8": 4500},
        "NVIDIA HGX B200 data sheet, per GPU (an eighth); tensor figures with sparsity, halved",
        "NVIDIA B200",
        "B200-180GB",
    ),
    _preset(
        "GB200",
        186,
        {"fp64": 40, "fp32": 80, "tf32": 1250, "fp16": 2500, "bf16": 2500, "fp8": 5000},
        "NVIDIA GB200 NVL72 data sheet, per GPU; tensor figures with sparsity, halved",
        "NVIDIA GB200",
    ),
    _preset(
        "RTX-5090",
        32,
        {"fp32": 104.8, "tf32": 104.8, "fp16": 209.5, "bf16": 209.5, "fp8": 419},
        # Reviews print 838 for fp16: with sparsity and fp16 accumulation, so four times this one.
        "NVIDIA RTX Blackwell GPU Architecture white paper, appendix, dense figures with fp32 accumulation",
        "NVIDIA GeForce RTX 5090",
    ),
    # Hopper
    _preset("H200", 141, _HOPPER_SXM, _SPARSE.format("H200"), "NVIDIA H200", "H200-SXM", "H200-141GB"),
    _preset("H200-NVL", 141, {}, _SHEET.format("H200") + _UNCHECKED, "NVIDIA H200 NVL"),
    _preset(
        "H100-SXM",
        80,
        _HOPPER_SXM,
        _H100,
        "NVIDIA H100 80GB HBM3",
        "H100-SXM5",
        "H100-SXM5-80GB",
        "H100-SXM-80GB",
    ),
    _preset(
        "H100-PCIe",
        80,
        {"fp64": 51.2, "fp32": 51.2, "tf32": 378, "fp16": 756, "bf16": 756, "fp8": 1513},
        _H100,
        "NVIDIA H100 PCIe",
        "H100-PCIe-80GB",
    ),
    # Revisions of the data sheet differ: per GPU the figures of the SXM module, or about 0.85 of them.
    _preset("H100-NVL", 94, {}, _SHEET.format("H100") + _UNCHECKED, "NVIDIA H100 NVL"),
    _preset(
        "GH200-96GB",
        96,
        _HOPPER_SXM,
        "NVIDIA GH200 Grace Hopper Superchip data sheet; tensor figures with sparsity, halved",
        "NVIDIA GH200 480GB",
        "GH-96",
    ),
    # Ada
    _preset(
        "L4",
        24,
        {"fp32": 30.3, "tf32": 60, "fp16": 121, "bf16": 121, "fp8": 242.5},
        _SPARSE.format("L4"),
        "NVIDIA L4",
    ),
    _preset(
        "L40",
        48,
        {"fp32": 90.5, "tf32": 90.5, "fp16": 181.05, "bf16": 181.05, "fp8": 362},
        _SHEET.format("L40") + ", figures without sparsity",
        "NVIDIA L40",
    ),
    _preset(
        "L40S",
        48,
        {"fp32": 91.6, "tf32": 183, "fp16": 362.05, "bf16": 362.05, "fp8": 733},
        _SHEET.format("L40S") + ", figures without sparsity",
        "NVIDIA L40S",
    ),
    _preset(
        "RTX-6000-Ada",
        48,
        {"fp32": 91.1, "tf32": 182.1, "fp16": 364.2, "bf16": 364.2, "fp8": 728.5},
        "NVIDIA RTX 6000 Ada Generation data sheet (fp8 with sparsity, halved) and Ada white paper",
        "NVIDIA RTX 6000 Ada Generation",
    ),
    _preset(
        "RTX-4090",
        24,
        {"fp32": 82.6, "tf32": 82.6, "fp16": 165.2, "bf16": 165.2, "fp8": 330.3},
        _ADA,
        "NVIDIA GeForce RTX 4090",
    ),
    _preset(
        "RTX-4080",
        16,
        {"fp32": 48.7, "tf32": 48.7, "fp16": 97.5, "bf16": 97.5, "fp8": 194.9},
        _ADA,
        "NVIDIA GeForce RTX 4080",
    ),
    # Ampere
    _preset(
        "A100-40GB",
        40,
        _A100,
        _SHEET.format("A100") + ", figures without sparsity",
        "NVIDIA A100-SXM4-40GB",
        "NVIDIA A100-PCIE-40GB",
        "A100-SXM-40GB",
        "A100-40",
    ),
    _preset(
        "A100-80GB",
        80,
        _A100,
        _SHEET.format("A100") + ", figures without sparsity",
        "NVIDIA A100-SXM4-80GB",
        "NVIDIA A100 80GB PCIe",
        "NVIDIA A100-PCIE-80GB",
        "A100-SXM-80GB",
        "A100-80",
    ),
    _preset(
        "A30",
        24,
        {"fp64": 10.3, "fp32": 10.3, "tf32": 82, "fp16": 165, "bf16": 165},
        _SHEET.format("A30") + ", figures without sparsity",
        "NVIDIA A30",
    ),
    _preset(
        "A40",
        48,
        {"fp32": 37.4, "tf32": 74.8, "fp16": 149.7, "bf16": 149.7},
        _SHEET.format("A40") + ", figures without sparsity",
        "NVIDIA A40",
    ),
    _preset(
        "A10",
        24,
        {"fp32": 31.2, "tf32": 62.5, "fp16": 125, "bf16": 125},
        _SHEET.format("A10") + ", figures without sparsity",
        "NVIDIA A10",
    ),
    _preset(
        "A6000",
        48,
        {"fp32": 38.7, "tf32": 77.4, "fp16": 154.8, "bf16": 154.8},
        _GA102,
        "NVIDIA RTX A6000",
        "RTX-A6000",
    ),
    _preset(
        "A5000",
        24,
        {},
        _SHEET.format("RTX A5000") + _UNCHECKED,
        "NVIDIA RTX A5000",
    ),
    _preset(
        "RTX-3090",
        24,
        {"fp32": 35.6, "tf32": 35.6, "fp16": 71, "bf16": 71},
        _GA102,
        "NVIDIA GeForce RTX 3090",
    ),
    _preset(
        "RTX-3080",
        10,
        {"fp32": 29.8, "tf32": 29.8, "fp16": 59.5, "bf16": 59.5},
        _GA102,
        "NVIDIA GeForce RTX 3080",
    ),
    # Turing, Volta, Pascal
    _preset("T4", 16, {"fp32": 8.1, "fp16": 65}, _SHEET.format("T4"), "Tesla T4", "NVIDIA T4"),
    _preset(
        "Titan-RTX",
        24,
        {"fp32": 16.3, "fp16": 130.5},
        # tomshardware.com/news/nvidia-titan-rtx-specs-pricing,38184.html gives 16.3 and 130
        "NVIDIA Titan RTX product page (130 tensor TFLOPS); as Quadro RTX 6000, the same chip, in " + _TURING,
        "NVIDIA TITAN RTX",
    ),
    _preset(
        "Quadro-RTX-8000",
        48,
        {"fp32": 16.3, "fp16": 130.5},
        "NVIDIA Quadro RTX 8000 data sheet: 130.5 tensor TFLOPS, with fp16 or fp32 accumulation",
        "Quadro RTX 8000",
    ),
    _preset("RTX-2080-Ti", 11, {"fp32": 13.4, "fp16": 53.8}, _TURING, "NVIDIA GeForce RTX 2080 Ti", "RTX-2080Ti"),
    _preset(
        "V100-16GB",
        16,
        {"fp64": 7.8, "fp32": 15.7, "fp16": 125},
        _SHEET.format("V100") + ", SXM2",
        "Tesla V100-SXM2-16GB",
        "V100-16",
    ),
    _preset(
        "V100-32GB",
        32,
        {"fp64": 7.8, "fp32": 15.7, "fp16": 125},
        _SHEET.format("V100") + ", SXM2",
        "Tesla V100-SXM2-32GB",
        "Tesla V100-SXM3-32GB",
        "V100-32",
    ),
    _preset(
        "V100-PCIe-16GB",
        16,
        {"fp64": 7, "fp32": 14, "fp16": 112},
        _SHEET.format("V100") + ", PCIe",
        "Tesla V100-PCIE-16GB",
    ),
    _preset(
        "V100-PCIe-32GB",
        32,
        {"fp64": 7, "fp32": 14, "fp16": 112},
        _SHEET.format("V100") + ", PCIe",
        "Tesla V100-PCIE-32GB",
    ),
    _preset(
        "V100S-PCIe-32GB",
        32,
        {"fp64": 8.2, "fp32": 16.4, "fp16": 130},
        _SHEET.format("V100") + ", V100S PCIe",
        "Tesla V100S-PCIE-32GB",
    ),
    _preset(
        "P100",
        16,
        {"fp64": 4.7, "fp32": 9.3, "fp16": 18.7},
        _SHEET.format("Tesla P100") + ", PCIe",
        "Tesla P100-PCIE-16GB",
        "P100-PCIe",
    ),
    _preset(
        "P100-SXM2",
        16,
        {"fp64": 5.3, "fp32": 10.6, "fp16": 21.2},
        _SHEET.format("Tesla P100") + ", SXM2",
        "Tesla P100-SXM2-16GB",
    ),
    _preset("P40", 24, {"fp32": 12}, _SHEET.format("Tesla P40"), "Tesla P40"),
    # AMD
    _preset(
        "MI100",
        32,
        {"fp64": 11.5, "fp32": 46.1, "fp16": 184.6, "bf16": 92.3},
        "AMD Instinct MI100 data sheet",
        "AMD Instinct MI100",
    ),
    _preset(
        "MI210",
        64,
        {"fp64": 45.3, "fp32": 45.3, "fp16": 181, "bf16": 181},
        "AMD Instinct MI210 data sheet",
        "AMD Instinct MI210",
    ),
    _preset(
        "MI250X-GCD",
        64,
        {"fp64": 47.85, "fp32": 47.85, "fp16": 191.5, "bf16": 191.5},
        _CDNA2 + ", MI250X, halved: a device is one of the card's two dies (GCD)",
        "AMD Instinct MI250X",
        "MI250X",
    ),
    _preset(
        "MI250-GCD",
        64,
        {"fp64": 45.25, "fp32": 45.25, "fp16": 181.05, "bf16": 181.05},
        _CDNA2 + ", MI250, halved: a device is one of the card's two dies (GCD)",
        "AMD Instinct MI250",
        "MI250",
    ),
    _preset(
        "MI300X",
        192,
        {"fp64": 163.4, "fp32": 163.4, "tf32": 653.7, "fp16": 1307.4, "bf16": 1307.4, "fp8": 2614.9},
        _CDNA3.format("MI300X"),
        "AMD Instinct MI300X",
        "AMD Instinct MI300X OAM",
    ),
    _preset(
        "MI300A",
        128,
        {"fp64": 122.6, "fp32": 122.6, "tf32": 490.3, "fp16": 980.6, "bf16": 980.6, "fp8": 1961.2},
        # 228 CUs x 2.1 GHz x (256, 256, 1024, 2048, 2048, 4096) FLOP per clock and CU, the rates of
        # rocm.docs.amd.com, "AMD Instinct MI300 series microarchitecture"
        _CDNA3.format("MI300A"),
        "AMD Instinct MI300A",
    ),
    _preset(
        "MI325X",
        256,
        {"fp64": 163.4, "fp32": 163.4, "tf32": 653.7, "fp16": 1307.4, "bf16": 1307.4, "fp8": 2614.9},
        # awesomeagents.ai/hardware/amd-mi325x repeats all of them; the same 304 CUs and clock as the MI300X
        _CDNA3.format("MI325X"),
        "AMD Instinct MI325X",
    ),
)

PRESETS: Mapping[str, DevicePreset] = {preset.type: preset for preset in _ROWS}

DTYPES = ("fp64", "fp32", "tf32", "fp16", "bf16", "fp8")
_DTYPE_NAMES = {"float64": "fp64", "float32": "fp32", "float16": "fp16", "half": "fp16", "bfloat16": "bf16"}
_VENDOR_WORDS = frozenset({"nvidia", "amd", "instinct", "tesla", "geforce"})


def preset_for(name: str | None) -> DevicePreset | None:
    """The preset of a device by its type ("A100-40GB") or what it calls itself ("NVIDIA A100-SXM4-40GB").

    Returns:
        The preset, or ``None`` for a name that is not known or not unique ("A100" has two memory sizes).
    """
    return _BY_KEY.get(_key(name)) if name else None


def peak_flops_per_s(name: str | None, dtype: str) -> float | None:
    """Dense peak in FLOP/s of the device called ``name``, or ``None`` where none is known.

    Args:
        name: as in :func:`preset_for`.
        dtype: "fp64", "fp32", "tf32", "fp16", "bf16", "fp8" or torch's name ("bfloat16").
    """
    preset = preset_for(name)
    return None if preset is None else preset.peaks.get(_DTYPE_NAMES.get(dtype, dtype))


def near_names(name: str, count: int = 3) -> list[str]:
    """Known types that begin with ``name``, then those that resemble it, for error messages."""
    lowered = {kind.lower(): kind for kind in PRESETS}
    begin = [kind for kind in lowered if _key(kind).startswith(_key(name))]
    alike = difflib.get_close_matches(name.lower(), lowered, n=count, cutoff=0.5)
    return [lowered[kind] for kind in dict.fromkeys([*begin, *alike])][:count]


def _key(name: str) -> str:
    words = re.split(r"[^a-z0-9]+", name.lower())
    return " ".join(word for word in words if word and word not in _VENDOR_WORDS)


def _by_key() -> dict[str, DevicePreset]:
    table: dict[str, DevicePreset] = {}
    for preset in _ROWS:
        for name in (preset.type, *preset.aliases):
            other = table.setdefault(_key(name), preset)
            assert other is preset, f"{name!r} names both {other.type} and {preset.type}"
    return table


_BY_KEY = _by_key()
