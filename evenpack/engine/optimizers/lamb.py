"""LAMB, the optimizer of BERT's large batches, as MLPerf's submissions compute it.

With m and v the decaying means of a tensor's gradient and of its square, each divided by 1 - beta**t (bias correction):

    update = m / (sqrt(v) + epsilon) + weight_decay * w
    ratio  = |w| / |update|      over the whole tensor; 1 where either norm is 0, and for tensors that do not decay
                                 (of query, key and value, kept as one matrix, each has its own)
    w      = w - learning_rate * ratio * update

Source: You et al. 2020, Large Batch Optimization for Deep Learning: Training BERT in 76 minutes, algorithm 2. Its
phi is the identity: nothing bounds the ratio, as in NVIDIA's FusedLAMB and unlike DeepSpeed's (0.01 to 10). The tensors
with trust ratios are those of Google's and NVIDIA's BERT: those that decay. A decay of 0 does not change this, while
NVIDIA's would silently become Adam. The global gradient norm (1.0 in MLPerf's reference) is clipped before all this, by
the engine.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from evenpack.engine.optimizers.norms import tensor_norms

_MASTER_DTYPES = (torch.float32, torch.float64)
"""Accepted types: updates are a thousandth of a weight and less, and in bfloat16 most would round to nothing."""


class Lamb(torch.optim.Optimizer):
    """LAMB by torch's multi-tensor operations.

    Args:
        params: parameters, or groups of them; a group may set any other argument; `trust_ratio` to False (default
            True), which makes it Adam with decoupled decay; `parts` to the rows of the blocks that have a trust ratio
            of their own in each parameter (default (): a parameter is one block).
        lr: learning rate, to be set before each update.
        betas: of m and of v.
        eps: added to sqrt(v), outside the root and after bias correction.
        weight_decay: times the weight, inside the update that the trust ratio scales.
        bias_correction: whether m and v are corrected for their start at zero.
        fused: compute m, v and m / sqrt(v) by torch's single kernel for them instead of one kernel for each operation:
            half as much memory traffic. The result is the same to rounding.

    The state of a parameter is `step`, `exp_avg` (m) and `exp_avg_sq` (v), as in torch's Adam; m and v have the
    parameter's dtype. In addition an update needs memory for the update itself, without `fused` twice that.

    Parameters are whole: a shard's norm is not its tensor's, so nothing may split or flatten them (ZeRO does).
    """

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        *,
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        bias_correction: bool = True,
        fused: bool = False,
    ) -> None:
        """Checks the arguments. Raises: ValueError for parameters that are not FP32 or FP64, wrong parts or numbers."""
        if lr < 0.0 or eps <= 0.0 or weight_decay < 0.0 or not all(0.0 <= beta < 1.0 for beta in betas):
            raise ValueError(
                "expected lr and weight_decay of at least 0, eps above 0 and betas from 0 to below 1, got "
                f"lr={lr}, weight_decay={weight_decay}, eps={eps}, betas={betas}"
            )
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "bias_correction": bias_correction,
            "trust_ratio": True,
            "parts": (),
            "fused": fused,  # torch reads it when it loads a state: `step` is then on the parameter's device
        }
        super().__init__(params, defaults)
        self.grad_scale: Tensor | None = None
        """What fused kernels divide gradients by as they read them, as in torch's Adam; None: nothing."""
        for group in self.param_groups:
            for parameter in group["params"]:
                _require_updatable(parameter, group["parts"])

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Updates every parameter that has a gradient; `closure`, if given, computes loss and gradients."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            if parameters:
                self._update(group, parameters)
        return loss

    def _update(self, group: dict[str, Any], parameters: list[Tensor]) -> None:
        tensors = self._with_state(parameters, fused=group["fused"])
        torch._foreach_add_(tensors.steps, 1.0)
        if group["fused"]:
            changes = _fused_changes(group, tensors, self.grad_scale)
        else:
            changes = _foreach_changes(group, tensors)
        if group["trust_ratio"]:
            weights, changes = _parts(parameters, group["parts"]), _parts(changes, group["parts"])
            # Ratios come first: tensors without dimensions have a kernel for the whole list there alone.
            torch._foreach_addcmul_(weights, trust_ratios(weights, changes), changes, value=group["lr"])
        else:
            torch._foreach_add_(parameters, changes, alpha=group["lr"])

    def _with_state(self, parameters: list[Tensor], *, fused: bool) -> "_Tensors":
        states = [self._state_of(parameter, fused=fused) for parameter in parameters]
        return _Tensors(
            parameters=parameters,
            gradients=[parameter.grad for parameter in parameters if parameter.grad is not None],
            first_moments=[state["exp_avg"] for state in states],
            second_moments=[state["exp_avg_sq"] for state in states],
            steps=[state["step"] for state in states],
        )

    def _state_of(self, parameter: Tensor, *, fused: bool) -> dict[str, Tensor]:
        state: dict[str, Tensor] = self.state[parameter]
        device = parameter.device if fused else torch.device("cpu")  # unfused, its value is needed by the host
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=device)
            state["exp_avg"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
            state["exp_avg_sq"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        elif state["step"].device != device:  # loaded from a run on another kind of device
            state["step"] = state["step"].to(device)
        return state


@dataclass(frozen=True, kw_only=True)
class _Tensors:
    """The parameters of a group that have a gradient, with their states."""

    parameters: list[Tensor]
    gradients: list[Tensor]
    first_moments: list[Tensor]
    second_moments: list[Tensor]
    steps: list[Tensor]
    """FP32 scalars that include the present update."""


def trust_ratios(parameters: list[Tensor], updates: list[Tensor]) -> list[Float[Tensor, ""]]:
    """Returns |parameter| / |update| of each pair of tensors, in the parameters' dtype; 1 where either norm is 0.

    Ratios lie four numbers apart: multi-tensor kernels load four at once if every tensor begins at a multiple of four.
    """
    weight_norms, update_norms = tensor_norms(parameters)[:, None], tensor_norms(updates)[:, None]
    is_defined = (weight_norms > 0.0) & (update_norms > 0.0)
    ratios = torch.where(is_defined, weight_norms / update_norms, weight_norms.new_ones(len(parameters), 4))
    return list(ratios.to(parameters[0].dtype)[:, 0].unbind())


def _parts(tensors: list[Tensor], parts: tuple[int, ...]) -> list[Tensor]:
    """Returns each tensor as views of so many rows, concatenated."""
    return [part for tensor in tensors for part in tensor.split_with_sizes(parts)] if parts else tensors


def _foreach_changes(group: dict[str, Any], tensors: _Tensors) -> list[Tensor]:
    """Updates the moments, and returns minus the update of each parameter, in new memory."""
    beta1, beta2 = group["betas"]
    torch._foreach_lerp_(tensors.first_moments, tensors.gradients, 1.0 - beta1)
    torch._foreach_mul_(tensors.second_moments, beta2)
    torch._foreach_addcmul_(tensors.second_moments, tensors.gradients, tensors.gradients, value=1.0 - beta2)
    steps = [step.item() if group["bias_correction"] else math.inf for step in tensors.steps]
    denominators = torch._foreach_sqrt(tensors.second_moments)
    torch._foreach_div_(denominators, [math.sqrt(1.0 - beta2**step) for step in steps])
    torch._foreach_add_(denominators, group["eps"])
    changes = list(torch._foreach_div(tensors.first_moments, denominators))
    torch._foreach_div_(changes, [beta1**step - 1.0 for step in steps])
    torch._foreach_add_(changes, tensors.parameters, alpha=-group["weight_decay"])
    return changes


def _fused_changes(group: dict[str, Any], tensors: _Tensors, grad_scale: Tensor | None) -> list[Tensor]:
    """Does the same by torch's fused Adam, which at a learning rate of 1 steps away from minus the decay.

    The kernel always corrects for the start at zero; after infinitely many steps there is nothing to correct.
    """
    beta1, beta2 = group["betas"]
    changes = list(torch._foreach_mul(tensors.parameters, -group["weight_decay"]))
    steps = tensors.steps
    if not group["bias_correction"]:
        steps = [torch.full_like(step, math.inf) for step in steps]
    torch._fused_adam_(
        changes,
        tensors.gradients,
        tensors.first_moments,
        tensors.second_moments,
        [],
        steps,
        lr=1.0,
        beta1=beta1,
        beta2=beta2,
        weight_decay=0.0,
        eps=group["eps"],
        amsgrad=False,
        maximize=False,
        grad_scale=grad_scale,
    )
    return changes


def _require_updatable(parameter: Tensor, parts: tuple[int, ...]) -> None:
    if parts and (parameter.dim() == 0 or parameter.shape[0] != sum(parts)):
        raise ValueError(f"a parameter of shape {tuple(parameter.shape)} has no blocks of {parts} rows")
    if parameter.dtype not in _MASTER_DTYPES:
        raise ValueError(
            f"LAMB updates FP32 parameters in place and got one of {parameter.dtype} with shape "
            f"{tuple(parameter.shape)}: keep the parameters FP32 and compute under autocast"
        )
