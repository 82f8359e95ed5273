"""A GPU for which `auto` finds no fused kernel: the reason, and what may help."""

import sys
import types
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from evenpack.kernels import capabilities
from evenpack.kernels.capabilities import AttentionRequest, resolve_backend, slow_choice

REQUEST = AttentionRequest(
    device_type="cuda", dtype=torch.bfloat16, head_dim=64, causal=False, alibi=False, dropout=False
)


pytestmark = pytest.mark.usefixtures("gpu")


@pytest.mark.parametrize(
    ("change", "has_triton"),
    [
        ({"dropout": True, "alibi": True}, True),
        ({"dropout": True, "head_dim": 60}, False),
        ({"alibi": True}, False),
        ({"dtype": torch.float32}, False),
        ({"dtype": torch.float32, "dropout": True}, True),
        ({"head_dim": 512}, True),
    ],
    ids=str,
)
def test_the_message_has_the_reasons_and_what_may_help(
    change: dict[str, Any], has_triton: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(capabilities, "has_triton", lambda: has_triton)
    request = replace(REQUEST, **change)
    message = slow_choice(request) or ""
    for part in ("is left to sdpa", "(flash: ", "bf16_autocast", "flash-attn", "model.attention_dropout=0"):
        assert part in message
    package = types.ModuleType("flash_attn")
    package.__dict__["flash_attn_varlen_func"] = None
    monkeypatch.setitem(sys.modules, "flash_attn", package)
    resolve_backend.cache_clear()
    assert (slow_choice(request) is None) == (request.dtype == torch.bfloat16 and request.head_dim <= 256)


@pytest.mark.parametrize("change", [{"alibi": True}, {"head_dim": 60}, {"dtype": torch.float32}], ids=str)
def test_flex_serves_what_varlen_lacks(change: dict[str, Any]) -> None:
    assert resolve_backend("auto", replace(REQUEST, **change)) == "flex"
    assert slow_choice(replace(REQUEST, **change)) is None


def test_nothing_is_said_of_a_fused_kernel_or_of_a_cpu() -> None:
    assert slow_choice(REQUEST) is None
    assert slow_choice(replace(REQUEST, dropout=True)) is None
    assert slow_choice(replace(REQUEST, device_type="cpu", dtype=torch.float32, dropout=True)) is None


def test_a_gpu_of_another_maker_and_an_old_one_are_named(
    monkeypatch: pytest.MonkeyPatch, gpu: Callable[..., None]
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(torch.version, "hip", "6.4")
        message = slow_choice(REQUEST) or ""
        assert message.count("is built for AMD's") == len(capabilities.FUSED) - 1  # not flash4
    gpu(7, 5)
    assert "this device has 7.5" in (slow_choice(REQUEST) or "")
