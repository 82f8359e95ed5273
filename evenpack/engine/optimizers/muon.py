"""Muon for the matrices of a model's blocks, with AdamW for all else.

With G the gradient of a matrix of A x B weights w, and V its decaying mean:

    V = momentum * V + (1 - momentum) * G
    O = orthogonalised (1 - momentum) * G + momentum * V        its singular values made nearly one
    w = (1 - learning_rate * weight_decay) * w - 0.2 * sqrt(max(A, B)) * learning_rate * O

0.2 * sqrt(max(A, B)) gives an update the root mean square of AdamW's, so that one learning rate, schedule and decay
serve both. Matrices that one layer computes as one, such as query, key and value, are orthogonalised apart, as separate
layers would be. Sources: Jordan et al. 2024, Muon: An optimizer for hidden layers in neural networks (iteration,
Nesterov's momentum); Liu et al. 2025, Muon is Scalable for LLM Training, equation 4 (the scale). `torch.optim.Muon`
computes the same for one matrix at a time, in BF16 on every device.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from evenpack.errors import ConfigError
from evenpack.models.common.layers import MergedLinear

ITERATIONS = 5
"""Steps of the Newton-Schulz iteration."""
_A, _B, _C = 3.4445, -4.7750, 2.0315
"""Coefficients of Jordan et al.: the steepest slope at zero for which singular values stay near one."""
_SCALE = 0.2
"""Root mean square of AdamW's updates, by Liu et al."""
TOGETHER = 2**25
"""Weights that are orthogonalised at once, at least one matrix: a few hundred megabytes of temporary memory."""


def hidden_matrices(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Returns the rows of each matrix in each parameter that Muon updates, by name: weights of linear layers in blocks.

    Raises: ConfigError if the model has none.
    """
    found: dict[str, tuple[int, ...]] = {}
    for name, layer in model.named_modules():
        if name.startswith("blocks.") and isinstance(layer, nn.Linear) and layer.weight.requires_grad:
            found[f"{name}.weight"] = layer.parts if isinstance(layer, MergedLinear) else (layer.out_features,)
    if not found:
        raise ConfigError(
            f"optimizer.kind muon updates weights of linear layers in `blocks`, and {type(model).__name__} has none: "
            "set optimizer.kind=adamw"
        )
    return found


class Muon(torch.optim.AdamW):
    """Muon for groups with `parts`, AdamW for the others, which have all that torch's AdamW knows.

    A group's `parts` are the rows of each matrix in each of its parameters; `momentum` is the decay of V. A parameter's
    state is V as `momentum_buffer`, of its dtype, and `step`. Gradients are used up: they hold other values after
    `step`. Parameters are whole, so nothing may split or flatten them (ZeRO does).
    """

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Updates every parameter that has a gradient; `closure`, if given, computes loss and gradients."""
        loss: float | None = super().step(closure)
        for group in self.param_groups:
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            if group.get("parts") and parameters:
                self._update(group, parameters)
        return loss

    def _init_group(self, group: dict[str, Any], *lists: Any) -> bool:
        """Gives AdamW what it updates: nothing of the groups of matrices."""
        return False if group.get("parts") else bool(super()._init_group(group, *lists))  # type: ignore[no-untyped-call]

    def _update(self, group: dict[str, Any], parameters: list[Tensor]) -> None:
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        if (scale := getattr(self, "grad_scale", None)) is not None:
            torch._foreach_div_(gradients, scale)
        states = [self._state_of(parameter) for parameter in parameters]
        means = [state["momentum_buffer"] for state in states]
        torch._foreach_add_([state["step"] for state in states], 1.0)
        torch._foreach_lerp_(means, gradients, 1.0 - group["momentum"])
        torch._foreach_lerp_(gradients, means, group["momentum"])
        torch._foreach_mul_(parameters, 1.0 - group["lr"] * group["weight_decay"])
        for weights, directions in _alike(parameters, gradients, group["parts"]):
            change = -_SCALE * math.sqrt(max(weights[0].shape)) * group["lr"]
            dtype = torch.bfloat16 if weights[0].device.type == "cuda" else weights[0].dtype
            results = orthogonalised(torch.stack(directions).to(dtype))
            # In the strides of the weights, without which a GPU would add each matrix by a kernel of its own.
            results = results.to(weights[0].dtype, memory_format=torch.contiguous_format)
            torch._foreach_add_(weights, list(results.unbind()), alpha=change)

    def _state_of(self, parameter: Tensor) -> dict[str, Tensor]:
        state: dict[str, Tensor] = self.state[parameter]
        if not state:
            state["step"] = torch.zeros((), device=parameter.device)  # which AdamW looks for when a state is loaded
            state["momentum_buffer"] = torch.zeros_like(parameter)
        return state


def orthogonalised(matrices: Float[Tensor, "n A B"]) -> Float[Tensor, "n A B"]:
    """Returns U S V' of each matrix U D V', with singular values S from about 0.7 to 1.2 in place of D, in its dtype.

    Source: Jordan et al. 2024, the quintic Newton-Schulz iteration.
    """
    is_tall = matrices.shape[-2] > matrices.shape[-1]
    one = matrices.mT if is_tall else matrices
    one = one / torch.linalg.vector_norm(one, dim=(-2, -1), keepdim=True).clamp(min=1e-7)
    for _ in range(ITERATIONS):
        square = one @ one.mT
        one = torch.baddbmm(one, torch.baddbmm(square, square, square, beta=_B, alpha=_C), one, beta=_A)
    return one.mT if is_tall else one


def _alike(
    parameters: Sequence[Tensor], directions: Sequence[Tensor], parts: tuple[int, ...]
) -> Iterator[tuple[list[Tensor], list[Tensor]]]:
    """Yields matrices of one shape, not more than `TOGETHER` weights of them at once, with their directions."""
    pairs = [
        pair
        for tensors in zip(parameters, directions, strict=True)
        for pair in zip(*(tensor.split_with_sizes(parts) for tensor in tensors), strict=True)
    ]
    for _, group in groupby(sorted(pairs, key=_shape), _shape):
        alike = list(group)
        most = max(1, TOGETHER // alike[0][0].numel())
        for begin in range(0, len(alike), most):
            weights, ours = zip(*alike[begin : begin + most], strict=True)
            yield list(weights), list(ours)


def _shape(pair: tuple[Tensor, Tensor]) -> tuple[int, ...]:
    return tuple(pair[0].shape)
