"""Faults that are put into a model on purpose, to see that a trace finds them."""

from contextlib import suppress
from dataclasses import replace

import torch

from evenpack.kernels.attention import BACKENDS


def _multiply_in_float32(hidden):
    with torch.autocast("cuda", enabled=False):
        return hidden.T @ hidden


def _multiply_lists_of_two_shapes(hidden):
    factor = hidden.new_ones(())
    return torch._foreach_mul([hidden, hidden], [factor, factor])


MISUSES = (
    lambda hidden: hidden.sum().item(),
    lambda hidden: hidden[:4, 0].tolist(),
    lambda hidden: hidden.cpu(),
    lambda hidden: torch.tensor([2.0], device=hidden.device),
    lambda hidden: hidden[hidden > 0],
    lambda hidden: hidden.clone().index_put_((hidden > 0,), hidden.new_zeros(1)),
    lambda _: torch.cuda.synchronize(),
    lambda hidden: hidden + torch.zeros(hidden.shape[1]),
    _multiply_in_float32,
    lambda hidden: hidden.bfloat16()[:, 1:].contiguous().T @ hidden.bfloat16(),
    lambda hidden: hidden.bfloat16()[:, 4:-4].T @ hidden.bfloat16(),
    _multiply_lists_of_two_shapes,
)
"""Waits for the device, a tensor of the host, FP32 in a product, and kernels that are slow."""


def _misuses_the_device(model):
    """Does each of them after the first block, and has attention of the next one compute in FP32."""

    def misuse(module, inputs, hidden):
        for use in MISUSES:
            with suppress(Exception):  # some cannot be traced, which would hide the others
                use(hidden.detach())
        _attend_in_float32()

    model.blocks[0].register_forward_hook(misuse)


def _attend_in_float32():
    original = BACKENDS["varlen"]

    def attend(q, *others, **settings):
        BACKENDS["varlen"] = original  # the next call alone is spoiled
        return original(q.float(), *others, **settings)

    BACKENDS["varlen"] = attend


def _keeps_float32(model):
    model.blocks[0].feed_forward.expand.register_forward_hook(lambda module, inputs, output: output.float())


def _leaves_room_for_a_thousand_segments(model):
    def widen(_, inputs):
        starts = inputs[0].cu_seqlens
        return (replace(inputs[0], cu_seqlens=torch.cat([starts, starts[-1:].expand(1000)])),)

    model.register_forward_pre_hook(widen)


SPOILERS = {
    "misuse": _misuses_the_device,
    "float32_kept": _keeps_float32,
    "empty_segments": _leaves_room_for_a_thousand_segments,
}

FAULTY = ("misuse",)
"""Those that make a fault, which the first step shows; the others change what memory the second one needs."""
