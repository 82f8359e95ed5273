"""Which attention backend can serve which request, and why not.

| backend   | devices            | dtypes     | head_dim                     | ALiBi | dropout | window          |
| --------- | ------------------ | ---------- | ---------------------------- | ----- | ------- | --------------- |
| reference | any                | any        | any                          | yes   | yes     | yes             |
| sdpa      | any                | any        | any                          | yes   | yes     | yes             |
| varlen    | CUDA, sm_80 and up | fp16, bf16 | multiple of 8, at most 256   | no    | yes     | without dropout |
| flash     | CUDA, sm_80 and up | fp16, bf16 | at most 256                  | yes   | yes     | yes             |
| flash4    | CUDA, sm_90, sm_100 | fp16, bf16 | multiple of 8, at most 128  | no    | no      | yes             |
| flex      | CUDA, sm_80 and up | any        | 16 to 256                    | yes   | no      | yes             |

The oracle `reference` is never chosen by `auto`. Nor is `flash4`, FlashAttention 4, whose gradients were not compared
on a GPU yet.

The device is queried, and flash-attn and flash-attn-4 are imported, only when a request is made.
"""

import importlib.util
import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import torch

from evenpack.errors import BackendError
from evenpack.kernels import flash, flash4, varlen

_LOGGER = logging.getLogger("evenpack")

_PREFERENCE = ("flash", "varlen", "flex", "sdpa")
"""The order in which `auto` tries backends, fastest first. `reference` is an oracle and must be requested by name."""

_WIDEST_DROPPED_ANYWHERE = 192
"""Widest head for which FlashAttention 2 has gradients with dropout on every device that it runs on."""

FUSED = ("flash", "varlen", "flex", "flash4")
"""Backends that compute all segments in one kernel and never wait for the device."""


@dataclass(frozen=True, kw_only=True)
class AttentionRequest:
    """The properties of an attention call on which the choice of a backend depends."""

    device_type: str
    """As in `torch.device.type`: cpu, cuda, ..."""
    dtype: torch.dtype
    """Type of q, k and v as the kernel receives them, after autocast."""
    head_dim: int
    causal: bool
    alibi: bool
    dropout: bool
    """Whether attention probabilities are dropped: training with a rate above zero."""
    window: bool = False
    """Whether a token sees only a window of its sequence."""

    def __str__(self) -> str:
        parts = [self.device_type, str(self.dtype).removeprefix("torch."), f"head_dim {self.head_dim}"]
        parts.append("causal" if self.causal else "bidirectional")
        parts += [
            name
            for name, wanted in (("ALiBi", self.alibi), ("dropout", self.dropout), ("window", self.window))
            if wanted
        ]
        return ", ".join(parts)


def able_backends(request: AttentionRequest) -> list[str]:
    """Returns the backends that can serve `request`, in the order of the table above."""
    return [name for name in _RULES if unavailable_reason(name, request) is None]


def unavailable_reason(backend: str, request: AttentionRequest) -> str | None:
    """Returns the reason why `backend` cannot serve `request`; None if it can.

    Raises:
        BackendError: no backend has this name.
    """
    if backend not in _RULES:
        raise BackendError(f"attention backend '{backend}' does not exist; take auto or one of {', '.join(_RULES)}")
    if not request.dtype.is_floating_point:
        return f"q, k and v are {request.dtype}, not floating-point"
    if request.device_type == "cuda" and not torch.cuda.is_available():
        return "PyTorch sees no CUDA device"
    return _RULES[backend](request)


@lru_cache(maxsize=256)
def resolve_backend(name: str, request: AttentionRequest) -> str:
    """Returns the backend that serves `request`: the one named, or for `auto` the fastest that can.

    The answer is cached, so that a call in every layer costs a dictionary look-up, and `auto` logs once per kind of
    request what it chose and why nothing faster can serve.

    Raises:
        BackendError: the named backend does not exist or cannot serve; the message says why, and which ones can.
    """
    if name != "auto":
        reason = unavailable_reason(name, request)
        if reason is not None:
            able = ", ".join(able_backends(request)) or "none"
            raise BackendError(
                f"attention backend '{name}' cannot serve ({request}): {reason}; "
                f"take attention.backend=auto or one of those that can: {able}"
            )
        return name
    reasons: dict[str, str] = {}
    for candidate in _PREFERENCE:
        reason = unavailable_reason(candidate, request)
        if reason is None:
            refused = "".join(f"; not {other}: {why}" for other, why in reasons.items())
            _LOGGER.info("attention backend auto chose %s for (%s)%s", candidate, request, refused)
            return candidate
        reasons[candidate] = reason
    refused = "; ".join(f"{other}: {why}" for other, why in reasons.items())
    raise BackendError(f"no attention backend can serve ({request}): {refused}")


def slow_choice(request: AttentionRequest, *, dropout_key: str = "model.attention_dropout") -> str | None:
    """Returns a sentence about the cost and what may help if `auto` finds no fused kernel for this request on a GPU.

    `dropout_key` is the setting that would leave out dropout. None: it finds one, or the request is for another device.
    """
    if request.device_type != "cuda" or resolve_backend("auto", request) in FUSED:
        return None
    reasons = "; ".join(f"{name}: {unavailable_reason(name, request)}" for name in _PREFERENCE if name in FUSED)
    return (
        f"attention ({request}) is left to {resolve_backend('auto', request)}, which reads segment lengths on the "
        f"host and so waits for the GPU in every layer and pass, and calls a kernel for each group of segments "
        f"({reasons}). What may help: training.precision=bf16_autocast, flash-attn (docs/gpu.md), {dropout_key}=0"
    )


def _serves_everything(request: AttentionRequest) -> str | None:
    return None


def _varlen_unavailable_reason(request: AttentionRequest) -> str | None:
    if request.alibi:
        return "PyTorch's FlashAttention has no gradients with ALiBi"
    reason = _fused_unavailable_reason(request)
    if reason is not None:
        return reason
    if request.head_dim % 8:
        return f"head_dim {request.head_dim} is not a multiple of 8"
    if not torch.backends.cuda.is_flash_attention_available():
        return "this build of PyTorch has no FlashAttention"
    if request.window:
        return varlen.window_failure(dropout=request.dropout) or varlen.cudnn_failure()
    return varlen.dropout_failure() if request.dropout else varlen.cudnn_failure()


def _flash_unavailable_reason(request: AttentionRequest) -> str | None:
    return _fused_unavailable_reason(request) or flash.import_failure()


def _flash4_unavailable_reason(request: AttentionRequest) -> str | None:
    if request.alibi or request.dropout:
        return f"FlashAttention 4 has no {'ALiBi' if request.alibi else 'dropout'}"
    reason = _fused_unavailable_reason(request)
    if reason is not None:
        return reason
    if request.head_dim % 8 or request.head_dim > 128:
        return f"head_dim {request.head_dim} is not a multiple of 8 up to 128"
    major, minor = torch.cuda.get_device_capability()
    if major not in (9, 10):
        return f"it needs compute capability 9.0 (H100, H200) or 10 (B200), this device has {major}.{minor}"
    return flash4.import_failure()


def _flex_unavailable_reason(request: AttentionRequest) -> str | None:
    if request.dropout:
        return "FlexAttention has no dropout"
    if request.device_type == "cpu":
        return "FlexAttention has no gradients on a CPU"
    reason = _device_unsuitable_reason(request)
    if reason is not None:
        return reason
    if not 16 <= request.head_dim <= 256:
        return f"head_dim {request.head_dim} is not within 16 and 256"
    return None if has_triton() else "Triton, which compiles FlexAttention, is not installed"


def has_triton() -> bool:
    """Returns whether Triton, by which PyTorch compiles for GPUs, is installed."""
    return importlib.util.find_spec("triton") is not None


def _fused_unavailable_reason(request: AttentionRequest) -> str | None:
    """Returns the reason by the limits of FlashAttention 2, which both `varlen` and `flash` use."""
    if request.device_type == "cuda" and request.dtype not in (torch.float16, torch.bfloat16):
        return f"it needs float16 or bfloat16, not {str(request.dtype).removeprefix('torch.')}"
    if request.device_type == "cuda" and request.head_dim > 256:
        return f"head_dim {request.head_dim} is above 256"
    reason = _device_unsuitable_reason(request)
    if reason is None and request.dropout and request.head_dim > _WIDEST_DROPPED_ANYWHERE:
        major, minor = torch.cuda.get_device_capability()
        if (major, minor) not in ((8, 0), (9, 0)):
            return (
                f"its backward pass has dropout at head_dim {request.head_dim} only on devices of compute capability "
                f"8.0 and 9.0, this one has {major}.{minor}"
            )
    return reason


def _device_unsuitable_reason(request: AttentionRequest) -> str | None:
    if request.device_type != "cuda":
        return f"it needs a CUDA device, not {request.device_type}"
    if torch.version.hip is not None:
        return f"it is used on NVIDIA's GPUs alone, and PyTorch {torch.__version__} is built for AMD's"
    major, minor = torch.cuda.get_device_capability()
    if major < 8:
        return f"it needs compute capability 8.0 or higher, this device has {major}.{minor}"
    return None


_RULES: dict[str, Callable[[AttentionRequest], str | None]] = {
    "reference": _serves_everything,
    "sdpa": _serves_everything,
    "varlen": _varlen_unavailable_reason,
    "flash": _flash_unavailable_reason,
    "flash4": _flash4_unavailable_reason,
    "flex": _flex_unavailable_reason,
}
