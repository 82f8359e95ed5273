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
    """Words of the driver's name for the device, in lower case, all of which must occur in it."""
    half_precision: float
    """Peak of the 16-bit tensor cores that add in FP32, which torch's products use."""
    has_bfloat16: bool
    """Whether that is the peak of bfloat16 too; cards before Ampere compute float16 alone."""
    single_precision: float
    """Peak of FP32 with TF32 off (torch's default)."""
    memory_bytes: int | None
    """Memory as it is sold; None where one name stands for several sizes."""

    def flops(self, dtype: torch.dtype) -> float | None:
        """Returns matrix-product operations per second; None for a type that its tensor cores or torch do not have."""
        by_dtype = {
            torch.bfloat16: self.half_precision if self.has_bfloat16 else None,
            torch.float16: self.half_precision,
            torch.float32: self.single_precision,
        }
        peak = by_dtype.get(dtype)
        return None if peak is None else peak * 1e12

    def require_flops(self, dtype: torch.dtype) -> float:
        """Returns the operations per second of `flops`. Raises: ConfigError for a type that the device lacks."""
        peak = self.flops(dtype)
        if peak is None:
            raise ConfigError(f"{self.name} does not compute {str(dtype).removeprefix('torch.')}: name another device")
        return peak


def _peak(
    name: str,
    *words: str,
    half: float,
    single: float,
    gigabytes: int | None,
    has_bfloat16: bool = True,
) -> DevicePeak:
    return DevicePeak(
        name=name,
        words=words or tuple(name.split("-")),
        half_precision=half,
        has_bfloat16=has_bfloat16,
        single_precision=single,
        memory_bytes=None if gigabytes is None else gigabytes * 10**9,
    )


DEVICE_PEAKS = (
    _peak("h100-pcie", half=756.0, single=51.2, gigabytes=80),
    _peak("h100-nvl", half=835.5, single=60.0, gigabytes=94),
    _peak("h100", "h100", "hbm3", half=989.4, single=66.9, gigabytes=80),
    _peak("h200-nvl", half=835.5, single=60.0, gigabytes=141),
    _peak("h200", half=989.4, single=66.9, gigabytes=141),
    _peak("gh200", half=989.4, single=66.9, gigabytes=None),
    _peak("h20", half=148.0, single=44.0, gigabytes=96),
    _peak("b200", half=2250.0, single=75.0, gigabytes=180),
    _peak("b300", half=2250.0, single=75.0, gigabytes=288),
    _peak("a100-40gb", half=312.0, single=19.5, gigabytes=40),
    _peak("a100-80gb", half=312.0, single=19.5, gigabytes=80),
    _peak("a100", half=312.0, single=19.5, gigabytes=None),
    _peak("a30", half=165.0, single=10.3, gigabytes=24),
    _peak("a10", half=125.0, single=31.2, gigabytes=24),
    _peak("a40", half=149.7, single=37.4, gigabytes=48),
    _peak("rtx-a6000", half=154.8, single=38.7, gigabytes=48),
    _peak("l4", half=121.0, single=30.3, gigabytes=24),
    _peak("l40", half=181.05, single=90.5, gigabytes=48),
    _peak("l40s", half=362.05, single=91.6, gigabytes=48),
    _peak("rtx-6000-ada", half=364.2, single=91.1, gigabytes=48),
    _peak("rtx-3090", half=71.0, single=35.6, gigabytes=24),
    _peak("rtx-4080", half=97.5, single=48.7, gigabytes=16),
    _peak("rtx-4090", half=165.2, single=82.6, gigabytes=24),
    _peak("rtx-5080", half=112.6, single=56.3, gigabytes=16),
    _peak("rtx-5090", half=209.5, single=104.8, gigabytes=32),
    _peak("t4", half=65.0, single=8.1, gigabytes=16, has_bfloat16=False),
    _peak("v100-pcie", half=112.0, single=14.0, gigabytes=None, has_bfloat16=False),
    _peak("v100", "v100", "sxm2", half=125.0, single=15.7, gigabytes=None, has_bfloat16=False),
    _peak("mi300x", half=1307.4, single=163.4, gigabytes=192),
)
"""The known devices; the first entry counts whose words all occur in a device's name.

Dense: without the factor of two that data sheets print for structured sparsity. Sources: NVIDIA's H100 architecture
white paper (table 2); data sheets of H100 NVL, H200, H200 NVL, GH200, HGX B200 and B300, A100, A30, A10, A40, L4, L40,
L40S, T4 and V100; the white papers of GA102 (RTX 3090, RTX A6000), Ada (RTX 4080 and 4090; RTX 6000 Ada: the one for
professionals) and RTX Blackwell (RTX 5080 and 5090), whose 16-bit peaks are those "with FP32 accumulate": on GeForce
half of what is printed for FP16 accumulation; AMD's data sheet of MI300X. NVIDIA publishes no data sheet of H20: its
figures are those that vendors of servers print. Peaks of TF32 are not listed, because nothing here turns it on.
"""

_OTHER_CARDS = frozenset(("mig", "ti", "super", "laptop", "d", "max", "3e"))
"""Words that turn the name of a card into another card's, or into a slice of it (MIG)."""


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
    words = set(device_name.lower().replace("-", " ").split())
    if words & _OTHER_CARDS:
        return None
    return next((peak for peak in DEVICE_PEAKS if words.issuperset(peak.words)), None)


def find_device_peak(name: str) -> DevicePeak:
    """Returns the device that people or its driver call `name`, in any case: RTX4090 or NVIDIA GeForce RTX 4090.

    Raises: ConfigError that lists the known ones.
    """
    known = {peak.name: peak for peak in DEVICE_PEAKS}
    short = {_letters(word): peak for word, peak in known.items()}
    found = short.get(_letters(name)) or known_device(name)
    if found is None:
        raise ConfigError(f"the peak of a device '{name}' is not known; {nearest(name.lower(), tuple(known))}")
    return found


def _letters(name: str) -> str:
    return "".join(letter for letter in name.lower() if letter.isalnum())
