"""How fast a device is: its peaks, and what has been measured of them by others. Nothing here was measured by us."""

from dataclasses import dataclass

from evenpack.errors import ConfigError
from evenpack.models.common.device_peaks import DEVICE_PEAKS, DevicePeak, find_device_peak

FLASH_ATTENTION_2_TFLOPS = {False: {512: 215.0, 1024: 254.0}, True: {512: 141.0, 1024: 192.0}}
"""Forward and backward of FlashAttention-2 on an H100 SXM, 16-bit, head size 64, by causality and sequence length.

Source: Dao 2023 (FlashAttention-2, arXiv:2307.08691), figure on H100. Operations there are 3.5 times the operations of
the forward pass, since the backward pass computes the scores again, and half of the square if causal.
"""
_COUNTED_PASSES = 3.5

MEASURED_ON = "h100"
"""The device of these rates; on others attention is taken to reach the same share of the peak."""

PRODUCT_SHARE = {"h100": 0.803, "h200": 0.803, "b200": 0.776, "a100-80gb": 0.869, "a100-40gb": 0.869}
"""Largest share of the 16-bit dense peak that matrix products of any shape reach, by device; products of a given
model reach less. Source: S. Bekman, Machine Learning Engineering, table of maximum achievable matmul FLOPS, with
torch 2.6 and 2.7.
"""
_OTHER_PRODUCT_SHARE = 0.803

BANDWIDTH_SHARE = 0.9
"""Assumed share of the peak that element-wise kernels reach on large tensors; copies on an H100 reach about that."""

KERNEL_GAP_SECONDS = 2e-6
"""Assumed time between two kernels that wait in the device's queue, with the start and the end of a kernel."""

ISSUE_SECONDS = 6e-6
"""Assumed time in which the host issues an operator from Python, autograd included; it works ahead of the device."""


@dataclass(frozen=True, kw_only=True)
class Rates:
    """What a device reaches, in the units of a second."""

    device: str
    products: float
    """Operations of matrix products per second."""
    bandwidth: float
    """Bytes per second."""
    attention_per_slot: float
    """Seconds of attention per slot and channel, in both directions."""
    attention_per_pair: float
    """Seconds per attended pair and channel; 0 if attention is at the rate of other products."""
    kernel_gap: float
    issue: float

    @classmethod
    def peak(cls, device: DevicePeak) -> "Rates":
        """Returns the peaks, at which nothing runs: attention as other products, and kernels without gaps."""
        return cls(
            device=device.name,
            products=device.half_precision * 1e12,
            bandwidth=bandwidth_of(device),
            attention_per_slot=0.0,
            attention_per_pair=0.0,
            kernel_gap=0.0,
            issue=0.0,
        )

    @classmethod
    def expected(cls, device: DevicePeak, *, causal: bool) -> "Rates":
        """Returns what is expected of a step, by the figures above."""
        slower = find_device_peak(MEASURED_ON).half_precision / device.half_precision
        per_slot, per_pair = _attention_seconds(causal=causal)
        return cls(
            device=device.name,
            products=device.half_precision * 1e12 * PRODUCT_SHARE.get(device.name, _OTHER_PRODUCT_SHARE),
            bandwidth=bandwidth_of(device) * BANDWIDTH_SHARE,
            attention_per_slot=slower * per_slot,
            attention_per_pair=slower * per_pair,
            kernel_gap=KERNEL_GAP_SECONDS,
            issue=ISSUE_SECONDS,
        )


def bandwidth_of(device: DevicePeak) -> float:
    """Returns the peak bandwidth of memory in bytes per second. Raises: ConfigError where it is not known."""
    if device.memory_bandwidth is None:
        sized = [one.name for one in DEVICE_PEAKS if one.name.startswith(f"{device.name}-")]
        raise ConfigError(
            f"the memory bandwidth of {device.name} is not known, because the name stands for several; name "
            f"{' or '.join(sized) or 'another device'}"
        )
    return device.memory_bandwidth * 1e12


def _attention_seconds(*, causal: bool) -> tuple[float, float]:
    """Returns seconds per slot and per attended pair, for one channel, that give both measured rates.

    A sequence of length l takes (slot · l + pair · pairs) seconds for each channel of the queries: what grows with l
    alone makes short sequences less efficient.
    """
    (short, slow), (long, fast) = FLASH_ATTENTION_2_TFLOPS[causal].items()
    pairs = 0.5 if causal else 1.0
    # Seconds per slot at both lengths: 3.5 passes of 4 operations for each pair, pairs · l pairs for each slot.
    at_short, at_long = (
        _COUNTED_PASSES * 4 * pairs * length / (rate * 1e12) for length, rate in ((short, slow), (long, fast))
    )
    per_pair = (at_long - at_short) / (pairs * (long - short))
    return at_short - per_pair * pairs * short, per_pair
