"""A block as torch.compile sees it on the fake device. Code for its graphs would need Triton and the device."""

from collections import Counter, defaultdict
from functools import partial

import torch
from fake_gpu.attention_operators import provide_flash_attn
from fake_gpu.trace import DEVICE, FakeCudaMode
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters
from torch._functorch.aot_autograd import make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.decomposition import select_decomp_table

from evenpack.kernels.segments import Segments
from evenpack.models.common.layers import FeedForward, PostNormBlock, PreNormBlock, SelfAttention

WIDTH, HEADS, SLOTS = 64, 2, 96


def graphs_of(name):
    """The functions that each graph of a block calls, and how often it is left to Python in between.

    `name`: a backend, or one with `+dropout`.
    """
    backend, _, drops = name.partition("+")
    provide_flash_attn()
    mode = FakeCudaMode()
    with mode, DEVICE:
        block = block_of(backend, dropout=0.1 if drops else 0.0)
    graphs = []

    def keep(graph, _):
        graphs.append([str(node.target) for node in graph.graph.nodes if node.op == "call_function"])

        def run(*inputs):
            with mode:  # a graph of fake tensors is run among them
                return graph(*inputs)

        return run

    output = called(block, keep, mode)
    return {"graphs": graphs, "breaks": sum(counters["graph_break"].values()), "device": str(output.device)}


def stream_of(name):
    """Bytes of the tensors of the stream's shape that enter or leave the forward and the backward graph, by type.

    `name`: `pre` or `post`, for the place of the norms, with the stream's type, as in `pre+bfloat16`.
    """
    place, _, dtype = name.partition("+")
    mode = FakeCudaMode()
    with mode, DEVICE:
        post = partial(PostNormBlock, WIDTH, HEADS, dropout=0.0, attention_dropout=0.0, backend="varlen")
        block = post() if place == "post" else block_of("varlen", dropout=0.0)
    crossing = defaultdict(Counter)

    def keep(direction):
        def compiler(graph, _):
            results = graph.graph.output_node().args[0]
            for node in [*graph.graph.find_nodes(op="placeholder"), *(one for one in results if one is not None)]:
                value = node.meta["val"]
                if isinstance(value, torch.Tensor) and tuple(value.shape) == (SLOTS, WIDTH):
                    crossing[direction][str(value.dtype).removeprefix("torch.")] += value.nbytes

            def run(*inputs):
                with mode:
                    return graph(*inputs)

            return make_boxed_func(run)

        return compiler

    backend = aot_autograd(
        fw_compiler=keep("forward"),
        bw_compiler=keep("backward"),
        partition_fn=min_cut_rematerialization_partition,  # Inductor's own
        decompositions=select_decomp_table,
    )
    output = called(block, backend, mode, dtype=getattr(torch, dtype))
    with mode:
        output.sum().backward()
    return crossing


def called(block, backend, mode, *, dtype=torch.float32):
    """What a block returns that is compiled by `backend`, for a stream of this type."""
    with mode, DEVICE:
        hidden = torch.randn(SLOTS, WIDTH, dtype=dtype, requires_grad=True)
        boundaries = torch.zeros(5, dtype=torch.int32)
    segments = Segments(cu_seqlens=boundaries, max_sequence_length=SLOTS, causal=True)
    torch._dynamo.reset()
    counters.clear()
    with torch.autocast("cuda", torch.bfloat16):
        return torch.compile(block, backend=backend)(hidden, segments, None)


def block_of(backend, *, dropout):
    return PreNormBlock(
        attention_norm=nn.LayerNorm(WIDTH),
        attention=SelfAttention(WIDTH, HEADS, dropout=dropout, backend=backend),
        feed_forward_norm=nn.LayerNorm(WIDTH),
        feed_forward=FeedForward(WIDTH, gelu="tanh"),
        dropout=0.0,
    )
