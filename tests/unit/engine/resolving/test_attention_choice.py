"""What a run on a GPU asks of attention, and what it does where no fused kernel serves that."""

import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from evenpack.config import load_run_file
from evenpack.engine.config import RunConfig
from evenpack.engine.resolving.attention_choice import attention_request, check_attention
from evenpack.errors import BackendError, ConfigError
from evenpack.kernels.capabilities import AttentionRequest
from evenpack.models.common.section import TransformerConfig
from evenpack.shipped import shipped_run_files

pytestmark = pytest.mark.usefixtures("gpu")


def run(name: str, *overrides: str) -> RunConfig:
    return load_run_file(Path(name), RunConfig, overrides)


def request_of(config: RunConfig) -> AttentionRequest:
    return attention_request(config.model, config.training.precision, "cuda")


def test_the_request_is_that_of_the_run_file() -> None:
    bert = request_of(run("bert_large_phase2_sprint"))
    assert (bert.head_dim, bert.causal, bert.alibi, bert.dropout) == (64, False, False, True)
    assert bert.dtype == torch.bfloat16
    assert not request_of(run("bert_large_phase2_sprint", "model.attention_dropout=0")).dropout
    plain = request_of(run("gpt2_small", "model.positions=alibi", "training.precision=fp32"))
    assert (plain.causal, plain.alibi, plain.dropout, plain.dtype) == (True, True, False, torch.float32)


def test_a_named_backend_that_cannot_serve_here_is_refused_before_the_first_step(gpu: Callable[..., None]) -> None:
    config = run("bert_large_phase2", "attention.backend=varlen")
    check_attention(config, "cuda")
    with pytest.raises(BackendError, match=r"'flash' cannot serve .*not installed"):
        check_attention(run("bert_large_phase2", "attention.backend=flash"), "cuda")
    gpu(7, 5)
    with pytest.raises(BackendError, match=r"'varlen' cannot serve .*this device has 7\.5.*reference, sdpa"):
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
    assert "model.attention_dropout=0" in caplog.text
    refused = (*slow, "attention.on_slow_backend=error")
    with pytest.raises(ConfigError, match=r"model\.attention_dropout=0.*attention\.on_slow"):
        check_attention(run(*refused), "cuda")
    caplog.clear()
    for way_out, device in (("model.attention_dropout=0", "cuda"), ("attention.backend=sdpa", "cuda"), ("", "cpu")):
        check_attention(run(*refused, *filter(None, [way_out])), device)
    assert not caplog.text


FOR_GPUS = [
    name for name, path in shipped_run_files().items() if "H100" in path.read_text() and not name.startswith("studies/")
]


@pytest.mark.parametrize("name", FOR_GPUS)
def test_run_files_for_gpus_refuse_a_slow_kernel_and_need_no_package_for_a_fast_one(name: str) -> None:
    config = run(name)
    assert config.attention.on_slow_backend == "error"
    check_attention(config, "cuda")
