"""Checks, before the first step, that the attention kernel can serve the run, and is a fast one on a GPU."""

import logging

import torch

from evenpack.engine.config import RunConfig
from evenpack.errors import ConfigError
from evenpack.kernels.capabilities import AttentionRequest, resolve_backend, slow_choice
from evenpack.models.families import family_of

log = logging.getLogger(__name__)


def attention_request(config: RunConfig, device_type: str) -> AttentionRequest:
    """Returns the attention that training asks for in each layer."""
    model = config.model
    return AttentionRequest(
        device_type=device_type,
        dtype=torch.bfloat16 if config.training.precision == "bf16_autocast" else torch.float32,
        head_dim=model.shape["hidden_size"] // model.shape["heads"],
        causal=family_of(model).causal,
        alibi=model.positions == "alibi",
        dropout=model.dropout_of_attention > 0.0,
        window=any(window is not None for window in model.attention_windows),
    )


def check_attention(config: RunConfig, device_type: str) -> None:
    """Warns if `auto` is left with a slow backend on a GPU.

    Raises: ConfigError instead, if `attention.on_slow_backend` is `error`; BackendError if the backend that is named
    cannot serve the run here, which the first step would find otherwise.
    """
    request = attention_request(config, device_type)
    if config.attention.backend != "auto":
        resolve_backend(config.attention.backend, request)
        return
    message = slow_choice(request)
    if message is None:
        return
    if config.attention.on_slow_backend == "error":
        raise ConfigError(f"{message}; or accept it with attention.on_slow_backend=warn")
    log.warning("%s", message)
