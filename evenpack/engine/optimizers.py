"""The optimizer of a run."""

from typing import Any

import torch
from torch import nn

from evenpack.engine.run_config import AdamWSection


def build_optimizer(model: nn.Module, section: AdamWSection, device: torch.device) -> torch.optim.Optimizer:
    """AdamW (Loshchilov and Hutter 2019) over `model`, in the two groups of `parameter_groups`.

    Its learning rate is set before each update. DeepSpeed counts torch's AdamW among the optimizers that ZeRO
    may split, so it needs no `zero_allow_untested_optimizer`.
    """
    return torch.optim.AdamW(
        parameter_groups(model, weight_decay=section.weight_decay),
        lr=section.learning_rate,
        betas=(section.beta1, section.beta2),
        eps=section.epsilon,
        fused=device.type == "cuda",
    )


def parameter_groups(model: nn.Module, *, weight_decay: float) -> list[dict[str, Any]]:
    """Matrices, embeddings included, decay; biases and the gains of norms do not. A tied weight counts once."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return [
        {"params": [parameter for parameter in parameters if parameter.dim() >= 2], "weight_decay": weight_decay},
        {"params": [parameter for parameter in parameters if parameter.dim() < 2], "weight_decay": 0.0},
    ]
