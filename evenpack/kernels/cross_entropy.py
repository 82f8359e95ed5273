"""LM head and cross-entropy computed together, one chunk of tokens at a time, so that all logits never exist at once.

8192 tokens x 50,257 entries are 1.6 GB of FP32 logits, and as much again for their gradient. The loss is a weighted
sum over tokens, so the gradient of its logits is known as soon as the loss is: the forward pass converts each chunk's
logits in place into the chunk's part of both gradients and frees them; the backward pass only scales. The idea is known
from Liger Kernel (Hsu et al. 2024, arXiv:2410.10989).

Shapes: T = tokens, C = hidden size, V = vocabulary, N = tokens of a chunk.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable

from evenpack.kernels.shared import one_operator

_CHUNK_BYTES = {"cuda": 1 << 30, "cpu": 24 << 20}
"""Bytes of one chunk's FP32 logits, by the type of the device.

On CUDA each chunk reads and writes the FP32 gradient of the weight once more, and starts some 29 kernels: fewer chunks
cost less, as long as their memory is there.

On a CPU glibc keeps freed memory of less than 32 MiB for the next chunk, whereas larger chunks get new pages each time,
which the kernel has to clear. Forward and backward in ms of CPU time in FP32, by MiB of a chunk, on one core of an AMD
EPYC (tokens x C x V, medians of 5):

                             4     8    16    24    31    48    64   256
    624 x 128 x 30,522     247   217   218   218   222   231   234   233
    1,024 x 256 x 30,522   851   729   717   692   692   717   722   724

At 2048 x 768 x 50,257 chunks of 25 to 256 MiB take the same within 3 %.
"""

_CHUNK_BYTES_ELSEWHERE = 1 << 28
"""The same on other devices, which were not measured."""

VOCABULARY_MULTIPLE = 64
"""Half-precision products have a multiple of so many entries: rows of zeros follow the weights' own.

The surplus columns of logits become -inf, so that softmax and loss run over all columns: Inductor does not vectorise
reads of a slice of 50,257 columns, and its two kernels then reach 1.3 of an H100's 3.0 TB/s (pytorch#148402).

cuBLAS has its fast kernels for sizes and rows that are multiples of 16 bytes, and each chunk's logits are an operand of
three products. With 50,257 entries these have 94 to 146 TFLOP/s of an H100's 790, and rows of logits that begin at such
multiples help one of the three alone.
"""


def default_chunk_tokens(device_type: str, vocabulary_size: int) -> int:
    """Returns the tokens whose FP32 logits a chunk holds at most; half-precision products hold half as much again."""
    return max(1, _CHUNK_BYTES.get(device_type, _CHUNK_BYTES_ELSEWHERE) // (4 * vocabulary_size))


def whole_tiles(vocabulary_size: int) -> int:
    """Returns the entries that half-precision products have, those of zeros included."""
    return vocabulary_size + -vocabulary_size % VOCABULARY_MULTIPLE


@one_operator
def linear_cross_entropy(
    hidden: Float[Tensor, " T C"],
    weight: Float[Tensor, " V C"],
    labels: Int[Tensor, " T"],
    weights: Float[Tensor, " T"],
    *,
    bias: Float[Tensor, " V"] | None = None,
    chunk_tokens: int | None = None,
    compiled: bool = False,
) -> tuple[Float[Tensor, ""], Int[Tensor, ""]]:
    """Returns the sum of weights[t] * cross_entropy(hidden[t] @ weight.T + bias, labels[t]) and the number correct.

    Under autocast the matrix products run in the autocast dtype, else in the dtype of `hidden`; bias, softmax, loss and
    the sums of the gradients over chunks are FP32 (FP64 for FP64 input). Gradients are computed only if they are
    needed.

    Args:
        hidden: final hidden states.
        weight: the output matrix, often tied to the token embedding.
        labels: within [0, V), also where the weight is zero.
        weights: weight of each token in the sum; zero if it is not a target. No gradient flows into them.
        bias: added to the logits; None for no bias.
        chunk_tokens: tokens whose logits exist at once; None: `default_chunk_tokens` of the device.
        compiled: whether torch.compile fuses what is done with each chunk's logits; else each operation reads and
            writes them.

    Returns:
        The differentiable loss sum, and the number of tokens of weight above zero whose label has the largest logit. A
        label whose logit is equal to the largest counts as predicted, though other entries may share it.
    """
    device_type = hidden.device.type
    if chunk_tokens is None:
        chunk_tokens = default_chunk_tokens(device_type, weight.shape[0])
    if chunk_tokens < 1:
        raise ValueError(f"chunk_tokens must be at least 1, found {chunk_tokens}")
    autocast = torch.is_autocast_enabled(device_type)
    wanted = torch.is_grad_enabled()
    task = _Task(
        labels=labels,
        weights=weights,
        matmul_dtype=torch.get_autocast_dtype(device_type) if autocast else hidden.dtype,
        chunk_tokens=chunk_tokens,
        compiled=compiled,
        wants_hidden=wanted and hidden.requires_grad,
        wants_weight=wanted and weight.requires_grad,
        wants_bias=wanted and bias is not None and bias.requires_grad,
    )
    return _LinearCrossEntropy.apply(hidden, weight, bias, task)  # type: ignore[no-untyped-call]


@dataclass(frozen=True, kw_only=True)
class _Task:
    """The arguments into which no gradients flow."""

    labels: Tensor
    weights: Tensor
    matmul_dtype: torch.dtype
    chunk_tokens: int
    compiled: bool
    wants_hidden: bool
    wants_weight: bool
    wants_bias: bool


class _LinearCrossEntropy(torch.autograd.Function):
    """Computes gradients in the forward pass, for an incoming gradient of one."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, task: _Task) -> tuple[Tensor, Tensor]:
        loss_sum, correct, *gradients = _walk(hidden, weight, bias, task)
        ctx.save_for_backward(*gradients)
        ctx.mark_non_differentiable(correct)
        return loss_sum, correct

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, loss_gradient: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        # Not in place, though `weight`'s is large: a second backward pass over a retained graph must find them intact.
        return (*(None if saved is None else saved * loss_gradient for saved in ctx.saved_tensors), None)


def _walk(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, task: _Task
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """Returns the loss sum, the correct predictions and the gradients that are needed, chunk by chunk."""
    sum_dtype = torch.promote_types(task.matmul_dtype, torch.float32)
    matmul_weight = _with_rows_of_zeros(weight, task.matmul_dtype)
    loss_sum = torch.zeros((), dtype=sum_dtype, device=hidden.device)
    correct = torch.zeros((), dtype=torch.int64, device=hidden.device)
    hidden_gradient = torch.empty_like(hidden) if task.wants_hidden else None
    weight_gradient = torch.zeros_like(matmul_weight, dtype=sum_dtype) if task.wants_weight else None
    bias_gradient = weight.new_zeros(len(matmul_weight), dtype=sum_dtype) if task.wants_bias else None
    chunk_sums: Callable[..., Any] = _chunk_sums_compiled if task.compiled else _chunk_sums
    wants_gradient = task.wants_hidden or task.wants_weight or task.wants_bias
    if bias is not None:
        bias = F.pad(bias, (0, len(matmul_weight) - len(weight)), value=-torch.inf)
    for chunk in _even_chunks(hidden.shape[0], task.chunk_tokens):
        rows = hidden[chunk].to(task.matmul_dtype)
        logits = rows @ matmul_weight.T
        chunk_loss, chunk_correct, chunk_bias_gradient = chunk_sums(
            logits,
            bias,
            task.labels[chunk, None].long(),
            task.weights[chunk, None].to(sum_dtype),
            entries=len(weight),
            wants_gradient=wants_gradient,
            wants_bias=task.wants_bias,
        )
        loss_sum += chunk_loss
        correct += chunk_correct
        if bias_gradient is not None:
            bias_gradient += chunk_bias_gradient
        if hidden_gradient is not None:
            hidden_gradient[chunk] = logits @ matmul_weight
        if weight_gradient is not None:
            _add_product_(weight_gradient, logits.T, rows)
    weight_gradient, bias_gradient = (
        None if gradient is None else gradient[: len(weight)] for gradient in (weight_gradient, bias_gradient)
    )
    return loss_sum, correct, hidden_gradient, weight_gradient, bias_gradient


def _with_rows_of_zeros(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns the weight in this dtype, in half precision with a multiple of `VOCABULARY_MULTIPLE` rows."""
    entries = whole_tiles(len(weight))
    if entries == len(weight) or dtype not in (torch.float16, torch.bfloat16):
        return weight.to(dtype)
    padded = weight.new_empty(entries, weight.shape[1], dtype=dtype)
    padded[: len(weight)] = weight
    padded[len(weight) :] = 0
    return padded


def _chunk_sums(
    logits: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    weights: Tensor,
    *,
    entries: int,
    wants_gradient: bool,
    wants_bias: bool,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Returns a chunk's loss sum, its correct predictions and the gradient of the bias.

    `logits` become their gradient in place, if it is wanted, which is 0 beyond the vocabulary's `entries`; else their
    values are lost. One FP32 copy of them exists meanwhile. `labels` and `weights` are [N, 1]; `bias` is -inf beyond
    the entries.
    """
    exponentials = logits.to(weights.dtype)
    if bias is not None:
        exponentials += bias
    elif entries < logits.shape[1]:
        exponentials[:, entries:] = -torch.inf
    totals, loss, correct = _loss_(exponentials, labels, weights)
    if not wants_gradient:
        return loss, correct, None
    gradient = _logit_gradient_(exponentials, totals, labels, weights)
    logits.copy_(gradient)
    return loss, correct, gradient.sum(dim=0) if wants_bias else None


def _chunk_sums_compiled(logits: Tensor, bias: Tensor | None, *by_row: Tensor, **constants: int) -> Any:
    """Does the same in compiled code for chunks of any size, since the chunks of a batch differ by a row."""
    for sized in (logits, *by_row):
        torch._dynamo.maybe_mark_dynamic(sized, 0)
    return _compiler()(logits, bias, *by_row, **constants)


@cache
def _compiler() -> Callable[..., Any]:
    return torch.compile(_chunk_sums)


def _loss_(logits: Tensor, labels: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Turns `logits` [N, V] into exp(logits - largest); `labels` and `weights` are [N, 1].

    Returns the sums of the exponentials [N, 1], the loss sum and the number of correct predictions.
    """
    largest = logits.amax(dim=1, keepdim=True)  # on a CPU a third of the time of `max`, which finds the entry too
    label_logits = logits.gather(1, labels)
    correct = ((label_logits == largest) & (weights > 0)).sum()
    logits -= largest
    label_logits -= largest
    totals = logits.exp_().sum(dim=1, keepdim=True)
    loss = ((totals.log() - label_logits) * weights).sum()
    return totals, loss, correct


def _logit_gradient_(exponentials: Tensor, totals: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
    """Turns exponentials into the gradient of the loss sum, weight * (softmax - one-hot label)."""
    if torch.compiler.is_compiling():  # a part of the same kernel, which a scatter is not
        columns = torch.arange(exponentials.shape[1], device=labels.device)
        return exponentials * (weights / totals) - torch.where(columns == labels, weights, 0.0)
    exponentials *= weights / totals
    return exponentials.scatter_add_(1, labels, -weights)


def _add_product_(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Adds left @ right to `total`, without a temporary where the dtypes agree, or the device can do without.

    On CUDA a half-precision product is then added to the FP32 sum as it is accumulated, without being rounded first.
    """
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    elif left.is_cuda and torch.version.hip is None and hasattr(torch.ops.aten.addmm, "dtype_out"):
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
    else:
        total += left @ right


def _even_chunks(tokens: int, chunk_tokens: int) -> list[slice]:
    """Returns as few chunks as `chunk_tokens` allows, of nearly equal size."""
    count = max(1, -(-tokens // chunk_tokens))
    borders = [tokens * index // count for index in range(count + 1)]
    return [slice(start, stop) for start, stop in pairwise(borders)]
