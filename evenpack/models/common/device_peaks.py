"""The peak and the memory of the device that a model runs on."""

from dataclasses import dataclass

import torch

from evenpack.config import nearest
from evenpack.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class DevicePeak:
    """Dense peaks of one device, in TFLOP/s, and its memory."""

    name: str
    """The name that people use for it."""
    words: tuple[str, ...]
    """Parts of the driver's name for the device, all of which must occur in it."""
    half_precision: float
    """Peak of the 16-bit tensor cores."""
    single_precision: float
    """Peak of FP32 with TF32 off (torch's default)."""
    memory_bytes: int | None
    """Memory as it is sold; None where one name stands for several sizes."""
    memory_bandwidth: float | None
    """Peak of that memory in TB/s; None where one name stands for several."""

    def flops(self, dtype: torch.dtype) -> float | None:
        """Returns matrix-product operations per second; None unless the type is bfloat16, float16 or float32."""
        by_dtype = {
            torch.bfloat16: self.half_precision,
            torch.float16: self.half_precision,
            torch.float32: self.single_precision,
        }
        return by_dtype[dtype] * 1e12 if dtype in by_dtype else None


def _peak(
    name: str, *words: str, half: float, single: float, gigabytes: int | None, bandwidth: float | None
) -> DevicePeak:
    return DevicePeak(
        name=name,
        words=words,
        half_precision=half,
        single_precision=single,
        memory_bytes=None if gigabytes is None else gigabytes * 10**9,
        memory_bandwidth=bandwidth,
    )


DEVICE_PEAKS = (
    _peak("h100-pcie", "H100", "PCIe", half=756.0, single=51.2, gigabytes=80, bandwidth=2.0),
    _peak("h100-nvl", "H100", "NVL", half=835.5, single=60.0, gigabytes=94, bandwidth=3.9),
    _peak("h100", "H100", "HBM3", half=989.4, single=66.9, gigabytes=80, bandwidth=3.35),
    _peak("h200-nvl", "H200", "NVL", half=835.5, single=60.0, gigabytes=141, bandwidth=4.8),
    _peak("h200", "H200", half=989.4, single=66.9, gigabytes=141, bandwidth=4.8),
    _peak("gh200", "GH200", half=989.4, single=66.9, gigabytes=None, bandwidth=None),
    _peak("b200", "B200", half=2250.0, single=75.0, gigabytes=180, bandwidth=8.0),
    _peak("a100-40gb", "A100", "40GB", half=312.0, single=19.5, gigabytes=40, bandwidth=1.555),
    _peak("a100-80gb", "A100", "80GB", half=312.0, single=19.5, gigabytes=80, bandwidth=2.039),
    _peak("a100", "A100", half=312.0, single=19.5, gigabytes=None, bandwidth=None),
)
"""The known devices; the first entry counts whose words all occur in a device's name.

Sources, without sparsity's factor of two: NVIDIA's H100 architecture white paper (table 2), data sheets of H100 NVL,
H200, H200 NVL, GH200, HGX B200 and A100.
"""


def device_peak_flops(device_name: str, dtype: torch.dtype) -> float | None:
    """Returns the dense peak of one device in operations per second, or None where it is not known.

    Args:
        device_name: as `torch.cuda.get_device_name()` gives it. A slice of a card (MIG) has no known peak.
        dtype: of the matrix products: bfloat16, float16 or float32.
    """
    device = known_device(device_name)
    return None if device is None else device.flops(dtype)


def known_device(device_name: str) -> DevicePeak | None:
    """Returns the device that the driver calls `device_name`; None if it is unknown, or a slice of a card (MIG)."""
    words = device_name.replace("-", " ").split()
    if "MIG" in words:
        return None
    return next((peak for peak in DEVICE_PEAKS if all(word in words for word in peak.words)), None)


def find_device_peak(name: str) -> DevicePeak:
    """Returns the device that people call `name`, in any case. Raises: ConfigError that lists the known ones."""
    known = {peak.name: peak for peak in DEVICE_PEAKS}
    found = known.get(name.lower())
    if found is None:
        raise ConfigError(f"the peak of a device '{name}' is not known; {nearest(name.lower(), tuple(known))}")
    return found
