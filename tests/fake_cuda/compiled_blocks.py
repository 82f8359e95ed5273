"""A block as torch.compile sees it on the fake device. Code for its graphs would need Triton and the device."""

import torch
from fake_gpu.attention_operators import provide_flash_attn
from fake_gpu.trace import DEVICE, FakeCudaMode
from torch import nn
from torch._dynamo.utils import counters

from evenpack.models.common.layers import FeedForward, PreNormBlock, Segments, SelfAttention

WIDTH, HEADS, SLOTS = 64, 2, 64


def graphs_of(name):
    """The functions that each graph of a block calls, and how often it is left to Python in between.

    `name`: a backend, or one with `+dropout`.
    """
    backend, _, drops = name.partition("+")
    provide_flash_attn()
    mode = FakeCudaMode()
    with mode, DEVICE:
        block = block_of(backend, dropout=0.1 if drops else 0.0)
        hidden = torch.randn(SLOTS, WIDTH, requires_grad=True)
        boundaries = torch.zeros(5, dtype=torch.int32)
    segments = Segments(
        cu_seqlens=boundaries, max_sequence_length=SLOTS, causal=True, alibi_slopes=None, rotation=None, row_slots=None
    )
    graphs = []

    def keep(graph, _):
        graphs.append([str(node.target) for node in graph.graph.nodes if node.op == "call_function"])

        def run(*inputs):
            with mode:  # a graph of fake tensors is run among them
                return graph(*inputs)

        return run

    torch._dynamo.reset()
    counters.clear()
    with torch.autocast("cuda", torch.bfloat16):
        output = torch.compile(block, backend=keep)(hidden, segments)
    return {"graphs": graphs, "breaks": sum(counters["graph_break"].values()), "device": str(output.device)}


def block_of(backend, *, dropout):
    return PreNormBlock(
        attention_norm=nn.LayerNorm(WIDTH),
        attention=SelfAttention(WIDTH, HEADS, dropout=dropout, backend=backend),
        feed_forward_norm=nn.LayerNorm(WIDTH),
        feed_forward=FeedForward(WIDTH, gelu="tanh"),
        dropout=0.0,
    )
