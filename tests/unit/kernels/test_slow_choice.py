"""A GPU for which `auto` finds no fused kernel: the reason, and the remedies that would give it one."""

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


DROPOUT_WAYS = "Install flash-attn (docs/gpu.md), or set model.attention_dropout=0"


@pytest.mark.parametrize(
    ("change", "has_triton", "remedy"),
    [
        ({"dropout": True, "alibi": True}, True, DROPOUT_WAYS),
        ({"dropout": True, "alibi": True}, False, "Install flash-attn (docs/gpu.md)"),
        ({"dropout": True, "head_dim": 60}, True, DROPOUT_WAYS),
        ({"dropout": True, "head_dim": 60}, False, "Install flash-attn (docs/gpu.md)"),
        ({"alibi": True}, False, "Install flash-attn (docs/gpu.md)"),
        ({"dtype": torch.float32}, False, "Set training.precision=bf16_autocast"),
        (
            {"dtype": torch.float32, "alibi": True},
            False,
            "Set training.precision=bf16_autocast and install flash-attn (docs/gpu.md)",
        ),
        (
            {"dtype": torch.float32, "dropout": True},
            True,
            "Set training.precision=bf16_autocast, or set model.attention_dropout=0",
        ),
        ({"head_dim": 512}, True, "This GPU has no faster kernel for it"),
    ],
    ids=str,
)
def test_the_remedies_are_those_that_help(
    change: dict[str, Any], has_triton: bool, remedy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(capabilities, "has_triton", lambda: has_triton)
    request = replace(REQUEST, **change)
    message = slow_choice(request)
    assert message is not None
    assert "is left to sdpa" in message
    assert message.endswith(f"). {remedy}")
    package = types.ModuleType("flash_attn")
    package.__dict__["flash_attn_varlen_func"] = None
    monkeypatch.setitem(sys.modules, "flash_attn", package)
    resolve_backend.cache_clear()
    with_flash = slow_choice(request)
    if request.dtype == torch.bfloat16 and request.head_dim <= 256:
        assert with_flash is None, "flash-attn serves it"
    else:
        assert with_flash is not None
        assert "nstall flash" not in with_flash, "what is there need not be installed"


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
    assert message.endswith("This GPU has no faster kernel for it")


def test_an_old_gpu_has_no_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 5))
    message = slow_choice(REQUEST)
    assert message is not None
    assert "this device has 7.5" in message
    assert message.endswith("This GPU has no faster kernel for it")
