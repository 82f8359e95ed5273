"""The optimizer of a run."""

import logging
import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from evenpack.engine.optimizers.config import AdamWSection, LambSection, MuonSection, OptimizerBase
from evenpack.engine.optimizers.lamb import Lamb
from evenpack.engine.optimizers.muon import Muon, hidden_matrices
from evenpack.models.common.layers import MergedLinear

log = logging.getLogger(__name__)


def build_optimizer(
    model: nn.Module, section: OptimizerBase, device: torch.device, *, fused_on_cpu: bool = False
) -> torch.optim.Optimizer:
    """Returns the optimizer that `section` names over `model`; learning rates are set before each update.

    Args:
        fused_on_cpu: update by torch's fused kernels on a CPU too, not on GPUs alone: 10 ms for a small model instead
            of 45, most of them in square roots. They round differently.
    """
    return BUILDERS[section.kind](model, section, fused_on_cpu or device.type == "cuda")


def _adamw(model: nn.Module, section: AdamWSection, fused: bool) -> torch.optim.Optimizer:
    """Makes torch's AdamW (Loshchilov and Hutter 2019), with the two groups of `parameter_groups`.

    DeepSpeed counts it among the optimizers that ZeRO may split, so it needs no `zero_allow_untested_optimizer`.
    """
    return torch.optim.AdamW(
        parameter_groups(model, weight_decay=section.weight_decay),
        lr=section.learning_rate,
        betas=(section.beta1, section.beta2),
        eps=section.epsilon,
        fused=fused,
    )


def _lamb(model: nn.Module, section: LambSection, fused: bool) -> torch.optim.Optimizer:
    """Makes the optimizer of `lamb.py`.

    The group that does not decay has no trust ratios, as in MLPerf's BERT; layers that are one matrix here, such as
    query, key and value, are groups of their own and have one each, as in MLPerf's reference.
    """
    merged = {id(module.weight): module.parts for module in model.modules() if isinstance(module, MergedLinear)}
    decaying, others = parameter_groups(model, weight_decay=section.weight_decay)
    return Lamb(
        [*_by_parts(decaying, merged), others | {"trust_ratio": False}],
        lr=section.learning_rate,
        betas=(section.beta1, section.beta2),
        eps=section.epsilon,
        bias_correction=section.bias_correction,
        fused=fused,
    )


def _muon(model: nn.Module, section: MuonSection, fused: bool) -> torch.optim.Optimizer:
    """Makes the optimizer of `muon.py`, and says what it takes; matrices of one division into parts are a group."""
    matrices = hidden_matrices(model)
    kinds = dict.fromkeys(re.sub(r"\.\d+\.", ".*.", name) for name in matrices)
    log.info("Muon updates %s; AdamW updates all other parameters", ", ".join(kinds))
    parts = {id(parameter): matrices[name] for name, parameter in model.named_parameters() if name in matrices}
    decaying, others = parameter_groups(model, weight_decay=section.weight_decay)
    groups = [group for group in [*_by_parts(decaying, parts), others] if group["params"]]
    # Groups without parts are AdamW's.
    of_matrices = [group | {"momentum": section.momentum} for group in groups if group.get("parts")]
    return Muon(
        [*(group for group in groups if not group.get("parts")), *of_matrices],
        lr=section.learning_rate,
        betas=(section.beta1, section.beta2),
        eps=section.epsilon,
        fused=fused,
    )


BUILDERS: dict[str, Callable[[nn.Module, Any, bool], torch.optim.Optimizer]] = {
    "adamw": _adamw,
    "lamb": _lamb,
    "muon": _muon,
}
"""Builders by the kind of the section that each takes; the last argument is whether to use fused kernels."""


def _by_parts(group: dict[str, Any], parts: Mapping[int, tuple[int, ...]]) -> list[dict[str, Any]]:
    """Returns a group for each division of matrices into rows, by the id of a parameter, the undivided ones first."""
    by_parts: dict[tuple[int, ...], list[nn.Parameter]] = {(): []}
    for parameter in group["params"]:
        by_parts.setdefault(parts.get(id(parameter), ()), []).append(parameter)
    return [group | {"params": params, "parts": rows} for rows, params in by_parts.items() if params]


def parameter_groups(model: nn.Module, *, weight_decay: float) -> list[dict[str, Any]]:
    """Returns the groups: matrices, including embeddings, decay; biases and gains of norms do not.

    Tied weights count once.
    """
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return [
        {"params": [one for one in parameters if decays(whole_shape(one))], "weight_decay": weight_decay},
        {"params": [one for one in parameters if not decays(whole_shape(one))], "weight_decay": 0.0},
    ]


def whole_shape(parameter: Tensor) -> torch.Size:
    """Returns the shape of a parameter, of which this rank may hold a part alone (ZeRO 3)."""
    return getattr(parameter, "ds_shape", parameter.shape)


def decays(shape: torch.Size) -> bool:
    """Returns whether a parameter of this shape is in the first of the groups, which decays."""
    return len(shape) >= 2
