"""What a run on a GPU asks of attention, and what it does where no fused kernel serves that."""

import logging
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from evenpack.config import load_run_file
from evenpack.engine.config import RunConfig
from evenpack.engine.resolving.attention_choice import attention_request, check_attention
from evenpack.errors import BackendError, ConfigError
from evenpack.kernels import capabilities
from evenpack.kernels.capabilities import AttentionRequest, resolve_backend
from evenpack.models.common.section import TransformerConfig
from evenpack.shipped import shipped_run_files


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Makes the rules see an H100 without flash-attn."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: True)
    monkeypatch.setattr(capabilities, "has_triton", lambda: True)
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    resolve_backend.cache_clear()
    yield
    resolve_backend.cache_clear()


def run(name: str, *overrides: str) -> RunConfig:
    return load_run_file(Path(name), RunConfig, overrides)


def request_of(config: RunConfig) -> AttentionRequest:
    return attention_request(config.model, config.training.precision, "cuda")


def test_the_request_is_that_of_the_run_file() -> None:
    bert = request_of(run("bert_large_phase2_sprint"))
    assert (bert.head_dim, bert.causal, bert.alibi, bert.dropout, bert.dtype) == (
        64,
        False,
        False,
        True,
        torch.bfloat16,
    )
    assert not request_of(run("bert_large_phase2_sprint", "model.attention_dropout=0")).dropout
    plain = request_of(run("gpt2_small", "model.positions=alibi", "training.precision=fp32"))
    assert (plain.causal, plain.alibi, plain.dropout, plain.dtype) == (True, True, False, torch.float32)


def test_a_named_backend_that_cannot_serve_here_is_refused_before_the_first_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = run("bert_large_phase2", "attention.backend=varlen")
    check_attention(config, "cuda")
    with pytest.raises(BackendError, match=r"'flash' cannot serve .*not installed; take attention.backend=auto or"):
        check_attention(run("bert_large_phase2", "attention.backend=flash"), "cuda")
    resolve_backend.cache_clear()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 5))
    with pytest.raises(BackendError, match=r"'varlen' cannot serve .*this device has 7\.5; take .*: reference, sdpa"):
        check_attention(config, "cuda")


def test_a_window_that_a_named_backend_lacks_is_refused_before_the_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    config = run("bert_large_phase2_sprint", "attention.backend=varlen")
    check_attention(config, "cuda")
    monkeypatch.setattr(TransformerConfig, "attention_windows", property(lambda model: (None, 64)))
    with pytest.raises(BackendError, match=r"'varlen' cannot serve .*window\): .*has no dropout"):
        check_attention(config, "cuda")
    check_attention(run("bert_large_phase2_sprint", "attention.backend=varlen", "model.attention_dropout=0"), "cuda")


def test_a_slow_kernel_is_a_warning_or_refused(caplog: pytest.LogCaptureFixture) -> None:
    slow = ("gpt2_mini_wiki", "model.positions=alibi", "model.dropout=0.1", "training.precision=bf16_autocast")
    with caplog.at_level(logging.WARNING):
        check_attention(run(*slow, "attention.on_slow_backend=warn"), "cuda")
    assert "flash-attn (docs/gpu.md), model.attention_dropout=0" in caplog.text
    with pytest.raises(ConfigError, match=r"model\.attention_dropout=0; or accept it with attention\.on_slow"):
        check_attention(run(*slow, "attention.on_slow_backend=error"), "cuda")
    caplog.clear()
    check_attention(run(*slow, "attention.on_slow_backend=error", "model.attention_dropout=0"), "cuda")
    check_attention(run(*slow, "attention.on_slow_backend=error", "attention.backend=sdpa"), "cuda")
    check_attention(run(*slow, "attention.on_slow_backend=error"), "cpu")
    assert not caplog.text


FOR_GPUS = [
    name for name, path in shipped_run_files().items() if "H100" in path.read_text() and not name.startswith("studies/")
]


@pytest.mark.parametrize("name", FOR_GPUS)
def test_run_files_for_gpus_refuse_a_slow_kernel_and_need_no_package_for_a_fast_one(name: str) -> None:
    config = run(name)
    assert config.attention.on_slow_backend == "error"
    check_attention(config, "cuda")
