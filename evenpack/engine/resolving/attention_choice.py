"""Checks, before the first step, that the attention kernel can serve the run, and is a fast one on a GPU."""

import logging

import torch

from evenpack.engine.config import RunConfig
from evenpack.errors import ConfigError
from evenpack.kernels.capabilities import AttentionRequest, resolve_backend, slow_choice
from evenpack.kernels.config import AttentionConfig
from evenpack.models.common.section import TransformerConfig
from evenpack.models.families import family_of

log = logging.getLogger(__name__)


def attention_request(model: TransformerConfig, precision: str, device_type: str) -> AttentionRequest:
    """Returns the attention that training asks for in each layer."""
    return AttentionRequest(
        device_type=device_type,
        dtype=torch.bfloat16 if precision == "bf16_autocast" else torch.float32,
        head_dim=model.head_dim,
        causal=family_of(model).causal,
        alibi=model.positions == "alibi",
        dropout=model.dropout_of_attention > 0.0,
        window=any(window is not None for window in model.attention_windows),
    )


def check_attention(config: RunConfig, device_type: str) -> None:
    """Checks the attention of a run: see `check_request`."""
    check_request(config.attention, attention_request(config.model, config.training.precision, device_type))


def check_request(
    attention: AttentionConfig, request: AttentionRequest, *, dropout_key: str = "model.attention_dropout"
) -> None:
    """Warns if `auto` is left with a slow backend on a GPU; `dropout_key` is what the user would set to 0.

    Raises: ConfigError instead, if `attention.on_slow_backend` is `error`; BackendError if the backend that is named
    cannot serve the run here, which the first step would find otherwise.
    """
    if attention.backend != "auto":
        resolve_backend(attention.backend, request)
        return
    message = slow_choice(request, dropout_key=dropout_key)
    if message is None:
        return
    if attention.on_slow_backend == "error":
        raise ConfigError(f"{message}; or accept it with attention.on_slow_backend=warn")
    log.warning("%s", message)
