"""Faults that are put into a model on purpose, to see that a trace finds them."""

from dataclasses import replace

import torch

from evenpack.kernels.attention import BACKENDS


def _after_first_block(change):
    def spoil(model):
        model.blocks[0].register_forward_hook(lambda module, inputs, output: change(output))

    return spoil


def _reads_a_number(hidden):
    return hidden * (1.0 + 0.0 * hidden.sum().item())


def _copies_to_the_host(hidden):
    hidden.detach().cpu()
    return hidden


def _reads_a_list(hidden):
    hidden[:4, 0].tolist()
    return hidden


def _chooses_by_flags(hidden):
    return hidden + hidden[hidden > 0].sum()


def _writes_by_flags(hidden):
    hidden = hidden.clone()
    hidden[hidden > 0] = hidden.new_zeros(1)
    return hidden


def _takes_a_number_from_the_host(hidden):
    return hidden * torch.tensor([2.0], device=hidden.device)


def _adds_a_tensor_of_the_host(hidden):
    return hidden + torch.zeros(hidden.shape[1])


def _synchronises(hidden):
    torch.cuda.synchronize()
    return hidden


def _multiplies_in_float32(model):
    layer = model.blocks[0].feed_forward.contract
    original = layer.forward

    def forward(inputs):
        with torch.autocast("cuda", enabled=False):
            return original(inputs.float())

    layer.forward = forward


def _keeps_float32(model):
    model.blocks[0].feed_forward.expand.register_forward_hook(lambda module, inputs, output: output.float())


def _attends_in_float32(_):
    original = BACKENDS["varlen"]

    def attend(q, *others, **settings):
        BACKENDS["varlen"] = original  # the first call alone is spoiled
        return original(q.float(), *others, **settings)

    BACKENDS["varlen"] = attend


def _multiplies_unaligned_lines(hidden):
    lines = hidden.bfloat16()
    return hidden + (lines[:, 1:].contiguous().T @ lines).sum()


def _multiplies_from_an_unaligned_start(hidden):
    lines = hidden.bfloat16()
    return hidden + (lines[:, 4:-4].T @ lines).sum()


def _multiplies_lists_of_two_shapes(hidden):
    factor = hidden.new_ones(())
    return torch._foreach_mul([hidden, hidden], [factor, factor])[0]


def _leaves_room_for_a_thousand_segments(model):
    def widen(_, inputs):
        starts = inputs[0].cu_seqlens
        return (replace(inputs[0], cu_seqlens=torch.cat([starts, starts[-1:].expand(1000)])),)

    model.register_forward_pre_hook(widen)


SPOILERS = {
    "item": _after_first_block(_reads_a_number),
    "cpu": _after_first_block(_copies_to_the_host),
    "tolist": _after_first_block(_reads_a_list),
    "flags": _after_first_block(_chooses_by_flags),
    "written_flags": _after_first_block(_writes_by_flags),
    "blocking_copy": _after_first_block(_takes_a_number_from_the_host),
    "host_tensor": _after_first_block(_adds_a_tensor_of_the_host),
    "synchronise": _after_first_block(_synchronises),
    "float32_kept": _keeps_float32,
    "float32_product": _multiplies_in_float32,
    "float32_attention": _attends_in_float32,
    "unaligned_lines": _after_first_block(_multiplies_unaligned_lines),
    "unaligned_start": _after_first_block(_multiplies_from_an_unaligned_start),
    "lists_of_two_shapes": _after_first_block(_multiplies_lists_of_two_shapes),
    "empty_segments": _leaves_room_for_a_thousand_segments,
}

FAULTY = SPOILERS.keys() - {"float32_kept", "empty_segments"}
"""Those that make a fault, which the first step shows; the others change what memory the second one needs."""
