"""Measure how fast a device multiplies matrices."""

from __future__ import annotations

import statistics
import time

import torch

MATMUL_DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}

_TARGET_S = 0.05
_REPEATS = 5
_FIRST_SIZE = 256
_MULTIPLE = 64  # tensor cores and vector units want whole tiles


def matmul_flops_per_s(device: torch.device, dtype: torch.dtype, free_bytes: int) -> float:
    """Measured speed of square matrix products, in FLOP/s with a multiply-add counted as 2.

    The size is chosen so that one product takes about 50 ms, as far as an eighth of the free memory allows;
    after a warm-up the median of five is taken. The random state of the caller is left as it was.

    Args:
        device: a CUDA device or the processor, used with as many threads as torch is set to.
        dtype: of factors and product.
        free_bytes: memory that may be used.
    """
    largest = max(int((free_bytes / 8 / 3 / dtype.itemsize) ** 0.5), _MULTIPLE)
    size = min(_FIRST_SIZE, largest)
    # Small products run below full speed, so the estimate of the size is repeated from where it led.
    for _ in range(6):
        seconds = _matmul_s(size, device, dtype, repeats=2)
        wanted = int(size * (_TARGET_S / seconds) ** (1 / 3)) // _MULTIPLE * _MULTIPLE
        # No more than fourfold at a time: from a size that is all overhead, the estimate overshoots.
        following = min(max(wanted, _MULTIPLE), 4 * size, largest)
        if abs(following - size) <= size // 8:
            break
        size = following
    flops_per_s = 2 * size**3 / _matmul_s(size, device, dtype, repeats=_REPEATS)
    if device.type == "cuda":
        torch.cuda.empty_cache()  # the matrices are large, and other processes may share the device
    return flops_per_s


def _matmul_s(size: int, device: torch.device, dtype: torch.dtype, repeats: int) -> float:
    """Median seconds of one product of two ``size`` x ``size`` matrices, after one that is not timed."""
    generator = torch.Generator(device).manual_seed(0)
    left, right = (
        torch.randn(size, size, device=device, dtype=torch.float32, generator=generator).to(dtype) for _ in range(2)
    )
    product = torch.empty(size, size, device=device, dtype=dtype)
    taken = []
    with torch.no_grad():
        for _ in range(1 + repeats):
            wait_for(device)
            start_s = time.perf_counter()
            torch.mm(left, right, out=product)
            wait_for(device)
            taken.append(time.perf_counter() - start_s)
    return statistics.median(taken[1:])


def wait_for(device: torch.device) -> None:
    """Wait until a CUDA device has done all that it was given; a CPU has."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
