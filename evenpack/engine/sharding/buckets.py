"""ZeRO 0's mean of the gradients: buckets of them are all-reduced while the rest of the backward pass computes.

DeepSpeed reduces at ZeRO 0 when the backward pass is over, and the device waits meanwhile. Here parameters are divided
into buckets in the reverse order of the model, which is about the order in which their gradients come. On CUDA a bucket
is reduced on a stream of its own as soon as its last gradient is there; `finish` reduces what is left, and lets the
stream that computes wait for that one. Buckets are reduced in their order on every rank, as collectives must be. On a
CPU, where a collective would delay the pass, all are reduced by `finish`.

What is done with a bucket (sum, scaling, types of communication) is DeepSpeed's.
"""

from collections.abc import Iterable
from contextlib import nullcontext
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from evenpack.engine.optimizers.norms import tensor_norms
from evenpack.engine.sharding.stages import GradientReduction


class BucketedReduction(GradientReduction):
    """Averages the gradients of one model over the ranks, bucket by bucket."""

    def __init__(self, deepspeed: Any, model: nn.Module, *, bucket_size: int, device: torch.device, overlaps: bool):
        """Follows the model's gradients from now on.

        Args:
            bucket_size: elements of a bucket, as in `buckets_of`.
            overlaps: whether buckets are reduced within the last backward pass of a step.
        """
        self._deepspeed = deepspeed
        self._device = device
        self.buckets = buckets_of(model.parameters(), bucket_size)
        """The buckets, in the order in which they are reduced."""
        self._own_norms: list[Tensor] = []
        """For each bucket that has been reduced in this step, the norm of each of its gradients."""
        self._missing: list[int] = []
        """Gradients that each bucket still lacks; none are counted outside the last backward pass."""
        self.stream: Any = None
        """The stream of the collectives; None where they are called in the order of the program."""
        if overlaps:
            new_stream: Any = torch.cuda.Stream  # has no annotations
            self.stream = new_stream(device) if device.type == "cuda" else None
            for index, bucket in enumerate(self.buckets):
                for parameter in bucket:
                    hooked: Any = parameter  # the method has no annotations
                    hooked.register_post_accumulate_grad_hook(lambda _, index=index: self._count(index))

    def begin(self) -> None:
        """Begins to count gradients, because the next backward pass is the last of the step."""
        self._missing = [len(bucket) for bucket in self.buckets]

    def finish(self) -> Float[Tensor, ""]:
        """Reduces the buckets that are left. Returns the norm of this rank's own gradients, before the mean."""
        self._missing = []
        while len(self._own_norms) < len(self.buckets):
            self._reduce_next()
        if self.stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self.stream)
        norm: Tensor = torch.linalg.vector_norm(torch.cat(self._own_norms))
        self._own_norms = []
        return norm.float()

    def _count(self, index: int) -> None:
        """Notes that a bucket has one gradient more, and reduces all that are complete and next in order."""
        if not self._missing:
            return
        self._missing[index] -= 1
        while len(self._own_norms) < len(self.buckets) and self._missing[len(self._own_norms)] == 0:
            self._reduce_next()

    def _reduce_next(self) -> None:
        gradients = [_gradient(parameter) for parameter in self.buckets[len(self._own_norms)]]
        if self.stream is not None:
            self.stream.wait_stream(torch.cuda.current_stream(self._device))
        with nullcontext() if self.stream is None else torch.cuda.stream(self.stream):
            self._own_norms.append(tensor_norms(gradients))
            if self._deepspeed.dp_world_size > 1:
                elements = sum(gradient.numel() for gradient in gradients)
                self._deepspeed.buffered_allreduce_fallback(grads=gradients, elements_per_buffer=elements)


def buckets_of(parameters: Iterable[nn.Parameter], size: int) -> list[list[nn.Parameter]]:
    """Returns the parameters that are trained, last first, in groups that end when they have `size` elements or more.

    A parameter that has as many is a group by itself: DeepSpeed then reduces its gradient in place, without a copy.
    """
    buckets: list[list[nn.Parameter]] = []
    room = 0
    for parameter in reversed([one for one in parameters if one.requires_grad and one.numel()]):
        if room <= 0 or parameter.numel() >= size:
            buckets.append([])
            room = size
        buckets[-1].append(parameter)
        room -= parameter.numel()
    return buckets


def _gradient(parameter: nn.Parameter) -> Tensor:
    """Returns the gradient; zeros where no rank's loss may depend on the parameter, as DeepSpeed has it."""
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return parameter.grad
