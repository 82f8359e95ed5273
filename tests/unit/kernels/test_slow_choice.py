"""A GPU for which `auto` finds no fused kernel: the reason, and what may help."""

import sys
import types
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from evenpack.kernels import capabilities
from evenpack.kernels.capabilities import AttentionRequest, resolve_backend, slow_choice

REQUEST = AttentionRequest(
    device_type="cuda", dtype=torch.bfloat16, head_dim=64, causal=False, alibi=False, dropout=False
)


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Makes the rules see an H100 without flash-attn."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: True)
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    monkeypatch.setattr(capabilities, "has_triton", lambda: True)
    resolve_backend.cache_clear()
    yield
    resolve_backend.cache_clear()


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
    message = slow_choice(request)
    assert message is not None
    assert "is left to sdpa" in message
    assert "(flash: " in message
    assert message.endswith("training.precision=bf16_autocast, flash-attn (docs/gpu.md), model.attention_dropout=0")
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


def test_a_gpu_of_another_maker_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", "6.4")
    message = slow_choice(REQUEST)
    assert message is not None
    assert "is left to sdpa" in message
    assert message.count("is built for AMD's") == len(capabilities.FUSED) - 1  # not flash4


def test_an_old_gpu_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 5))
    message = slow_choice(REQUEST)
    assert message is not None
    assert "this device has 7.5" in message
