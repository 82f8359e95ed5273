"""Implements LAMB as in its paper and NVIDIA's kernels, tensor by tensor in FP64, as a reference."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn


@dataclass(kw_only=True)
class PlainTensor:
    """A parameter with its moments."""

    weight: Tensor
    adapts: bool
    """Whether it decays and has trust ratios."""
    blocks: int
    """Equal blocks of rows that are tensors of their own in the original model: 3 for query, key and value."""
    first: Tensor = field(init=False)
    second: Tensor = field(init=False)
    updates: int = 0

    def __post_init__(self) -> None:
        self.weight = self.weight.detach().double().clone()
        self.first = torch.zeros_like(self.weight)
        self.second = torch.zeros_like(self.weight)


@dataclass(kw_only=True)
class PlainLamb:
    """The optimizer; each step is given its learning rate."""

    tensors: list[PlainTensor]
    beta1: float
    beta2: float
    epsilon: float
    weight_decay: float
    bias_correction: bool = True
    trust_ratios: list[float] = field(default_factory=list)
    """Of the last step, in the order of tensors that adapt and have a gradient, and of their blocks."""

    @classmethod
    def over(cls, parameters: Sequence[Tensor], blocks: Sequence[int] | None = None, **settings: float) -> "PlainLamb":
        """Creates the state: matrices adapt, vectors do not; `blocks` of each, by default 1."""
        return cls(
            tensors=[
                PlainTensor(weight=parameter, adapts=parameter.dim() >= 2, blocks=count)
                for parameter, count in zip(parameters, blocks or [1] * len(parameters), strict=True)
            ],
            **settings,  # type: ignore[arg-type]
        )

    @property
    def weights(self) -> list[Tensor]:
        return [tensor.weight for tensor in self.tensors]

    def step(self, gradients: Sequence[Tensor | None], *, learning_rate: float) -> None:
        self.trust_ratios = []
        for tensor, gradient in zip(self.tensors, gradients, strict=True):
            if gradient is not None:
                self._step(tensor, gradient.double(), learning_rate)

    def _step(self, tensor: PlainTensor, gradient: Tensor, learning_rate: float) -> None:
        tensor.updates += 1
        tensor.first = self.beta1 * tensor.first + (1.0 - self.beta1) * gradient
        tensor.second = self.beta2 * tensor.second + (1.0 - self.beta2) * gradient**2
        first, second = tensor.first, tensor.second
        if self.bias_correction:
            first = first / (1.0 - self.beta1**tensor.updates)
            second = second / (1.0 - self.beta2**tensor.updates)
        update = first / (second.sqrt() + self.epsilon)
        if not tensor.adapts:
            tensor.weight = tensor.weight - learning_rate * update
            return
        update = update + self.weight_decay * tensor.weight
        rows = len(update) // tensor.blocks
        changed = []
        for start in range(0, len(update), rows):
            block, change = tensor.weight[start : start + rows], update[start : start + rows]
            ratio = trust_ratio(block, change)
            self.trust_ratios.append(ratio)
            changed.append(block - learning_rate * ratio * change)
        tensor.weight = torch.cat(changed)


def trust_ratio(weight: Tensor, update: Tensor) -> float:
    """Returns the ratio; 1 if either norm is zero."""
    weight_norm, update_norm = (math.sqrt((tensor**2).sum().item()) for tensor in (weight, update))
    return weight_norm / update_norm if weight_norm != 0.0 and update_norm != 0.0 else 1.0


def blocks_of(model: nn.Module) -> list[int]:
    """Returns 3 for matrices of query, key and value, and 1 for other parameters, in the model's order."""
    return [3 if name.endswith("query_key_value.weight") else 1 for name, _ in model.named_parameters()]
