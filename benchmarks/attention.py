"""Measures the forward and backward passes of attention over packs of several document mixes.

    python benchmarks/attention.py [--device cuda] [--heads 12] [--head-dim 64] [--bidirectional] [--alibi] ...

On a CPU it compares ways for `sdpa` to divide a pack into groups (`GROUP_TOKENS` in evenpack/kernels/sdpa.py): one
call for each document ("0"), windows of 32, 64, ... tokens, one block mask over each pack. On CUDA it compares all
available backends, in bfloat16. All ways of a mix are timed in turn, and the median is reported.

TFLOP/s count pairs of positions that attend to each other, two matrix products forward and five backward, and
2 * head_dim operations per pair, head and product.
"""

import argparse
import platform
import statistics
import time
from collections.abc import Callable
from functools import partial

import measuring
import numpy as np
import torch
from torch import Tensor

from evenpack.kernels.attention import packed_attention
from evenpack.kernels.capabilities import AttentionRequest, able_backends
from evenpack.kernels.sdpa import attend_groups, plan_groups
from evenpack.kernels.segments import Segments
from evenpack.models.common.positions import alibi_slopes

DOCUMENTS_PER_PACK = {"one": 1, "long": 4, "medium": 10, "short": 80}
WINDOWS = (0, 32, 64, 128, 256)

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def main() -> None:
    parser = measuring.parser_of(__doc__, json_file=True)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--heads", type=int, default=12)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--pack-length", type=int, default=1024)
    parser.add_argument("--packs", type=int, default=None, help="in a call; default 4 on a CPU, 16 on CUDA")
    parser.add_argument("--bidirectional", action="store_true")
    parser.add_argument("--alibi", action="store_true")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--threads", type=int, default=None, help="of a CPU")
    arguments = parser.parse_args()
    if arguments.threads is not None:
        torch.set_num_threads(arguments.threads)
    arguments.packs = arguments.packs or (4 if arguments.device == "cpu" else 16)

    mixes: dict[str, dict[str, dict[str, float]]] = {}
    for mix, documents in DOCUMENTS_PER_PACK.items():
        lengths = cut(documents, arguments.pack_length, arguments.packs)
        mixes[mix] = measure(ways(arguments, lengths), lengths, arguments)
        for way, figures in mixes[mix].items():
            print(f"{mix:8}{way:12}", *(f"{name} {value:9.4g}" for name, value in figures.items()), flush=True)
    measuring.write_report({"setting": setting(arguments), "mixes": mixes}, arguments.json)


def setting(arguments: argparse.Namespace) -> dict[str, str | int | bool]:
    """Returns the settings of the measurement."""
    cuda = arguments.device == "cuda"
    return {
        "device": torch.cuda.get_device_name() if cuda else platform.processor() or platform.machine(),
        "dtype": str(dtype_of(arguments)),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "causal": not arguments.bidirectional,
        "alibi": arguments.alibi,
        **{name: getattr(arguments, name) for name in ("heads", "head_dim", "pack_length", "packs", "repeats")},
    }


def dtype_of(arguments: argparse.Namespace) -> torch.dtype:
    return torch.bfloat16 if arguments.device == "cuda" else torch.float32


def cut(documents: int, pack_length: int, packs: int) -> list[int]:
    """Returns packs, each cut into so many documents at random positions, the same in every run."""
    generator = np.random.default_rng(documents)
    lengths: list[int] = []
    for _ in range(packs):
        places = np.sort(generator.choice(np.arange(1, pack_length), documents - 1, replace=False))
        lengths += np.diff(places, prepend=0, append=pack_length).tolist()
    return lengths


def ways(arguments: argparse.Namespace, lengths: list[int]) -> dict[str, Attend]:
    """Returns the functions to be compared, by name."""
    device = torch.device(arguments.device)
    causal = not arguments.bidirectional
    slopes = alibi_slopes(arguments.heads, device) if arguments.alibi else None
    if arguments.device == "cpu":
        found: dict[str, Attend] = {}
        for group_tokens in (*WINDOWS, arguments.pack_length):
            groups = plan_groups(
                tuple(lengths),
                group_tokens=group_tokens,
                causal=causal,
                slopes=None if slopes is None else tuple(slopes.tolist()),
                mask_dtype=torch.float32,
                device=device,
            )
            found[f"window {group_tokens}"] = partial(attend_groups, groups=groups, causal=causal, dropout=0.0)
        return found
    request = AttentionRequest(
        device_type="cuda",
        dtype=dtype_of(arguments),
        head_dim=arguments.head_dim,
        causal=causal,
        alibi=arguments.alibi,
        dropout=False,
    )
    segments = Segments(
        cu_seqlens=torch.tensor([0, *lengths], device=device).cumsum(0).to(torch.int32),
        max_sequence_length=arguments.pack_length,
        causal=causal,
        alibi_slopes=slopes,
    )
    return {
        backend: partial(packed_attention, segments=segments, backend=backend)
        for backend in able_backends(request)
        if backend != "reference"  # its dense scores of 16 packs would be 13 GB
    }


def measure(
    competitors: dict[str, Attend], lengths: list[int], arguments: argparse.Namespace
) -> dict[str, dict[str, float]]:
    """Returns median milliseconds and TFLOP/s of each, timed in turn so that load on the machine affects all alike."""
    shape = (sum(lengths), arguments.heads, arguments.head_dim)
    q, k, v, upstream = (torch.randn(shape, device=arguments.device, dtype=dtype_of(arguments)) for _ in range(4))
    inputs = [tensor.requires_grad_() for tensor in (q, k, v)]
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in competitors}
    for repeat in range(arguments.repeats + 2):
        for name, attend in competitors.items():
            start = now(arguments.device)
            output = attend(*inputs)
            middle = now(arguments.device)
            torch.autograd.grad(output, inputs, upstream)
            if repeat >= 2:  # the first rounds warm up
                times[name].append((middle - start, now(arguments.device) - middle))
    pairs = sum(length**2 if arguments.bidirectional else length * (length + 1) // 2 for length in lengths)
    operations = 7 * 2 * arguments.head_dim * arguments.heads * pairs
    figures = {}
    for name, rounds in times.items():
        forward, backward = (statistics.median(column) for column in zip(*rounds, strict=True))
        figures[name] = {
            "forward_ms": 1e3 * forward,
            "backward_ms": 1e3 * backward,
            "tflops": operations / (forward + backward) / 1e12,
        }
    return figures


def now(device: str) -> float:
    """Returns the time in seconds after synchronising with the device."""
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


if __name__ == "__main__":
    main()
