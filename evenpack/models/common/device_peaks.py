"""The peak of the device that a model runs on."""

import torch

_PEAK_TERAFLOPS: tuple[tuple[tuple[str, ...], float, float], ...] = (
    (("H100", "PCIe"), 756.0, 51.2),
    (("H100", "NVL"), 835.5, 60.0),
    (("H100", "HBM3"), 989.4, 66.9),
    (("H200", "NVL"), 835.5, 60.0),
    (("H200",), 989.4, 66.9),
    (("GH200",), 989.4, 66.9),
    (("B200",), 2250.0, 75.0),
    (("A100",), 312.0, 19.5),
)
"""Words in the device's name, then dense peaks: 16-bit tensor cores, and FP32 with TF32 off (torch's default).

Sources, sparsity's factor of two taken out: NVIDIA's H100 architecture white paper (table 2), data sheets of H100 NVL,
H200, H200 NVL, GH200, HGX B200 and A100. The first row that matches counts.
"""


def device_peak_flops(device_name: str, dtype: torch.dtype) -> float | None:
    """Dense peak in operations a second of one device, or None where it is not known.

    Args:
        device_name: as `torch.cuda.get_device_name()` gives it. A slice of a card (MIG) has no known peak.
        dtype: of the matrix products: bfloat16, float16 or float32.
    """
    words = device_name.replace("-", " ").split()
    if "MIG" in words:
        return None
    for names, half_precision, single_precision in _PEAK_TERAFLOPS:
        if all(name in words for name in names):
            by_dtype = {torch.bfloat16: half_precision, torch.float16: half_precision, torch.float32: single_precision}
            return by_dtype[dtype] * 1e12 if dtype in by_dtype else None
    return None
