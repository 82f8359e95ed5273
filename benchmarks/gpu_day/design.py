"""What decides the next design, question by question: ceilings, and kernels by the shapes that they are given.

    python benchmarks/gpu_day/design.py --out FILE.json [--tiny]

FILE.json has the rows of each question, and is written again after each row. A row that fails holds its error, and the
exit code is 1. Sizes are those of GPT-2 124M and XL and of BERT-large; `--tiny` is for a CPU.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from evenpack.files import write_json
from evenpack.kernels.attention import packed_attention
from evenpack.kernels.cross_entropy import linear_cross_entropy

HEAD_DIM = 64
DROPOUT = 0.1

Row = tuple[dict[str, Any], Callable[[], dict[str, Any]]]
"""What is asked, and the function that measures the answer."""


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """The shapes of all questions."""

    square: int
    """Rows of the product that shows the ceiling."""
    copied_numbers: int
    """FP32 numbers of a copy."""
    chain: int
    """Operators in a row whose own time is nothing."""
    widths: tuple[int, ...]
    vocabularies: tuple[int, ...]
    head_rows: tuple[int, ...]
    """Rows of logits at once: a chunk of the loss as on a CPU and as on a GPU, a multiple of 64, and more."""
    loss_tokens: int
    compiles: tuple[bool, ...]
    chunk_bytes: tuple[int, ...]
    """FP32 logits of a chunk of the loss: as on a CPU, twice that, as on a GPU, and twice that."""
    heads: tuple[int, ...]
    sequences: int
    """Sequences of a micro-batch of GPT-2 124M."""
    length: int
    """Slots of each of them."""
    segments: tuple[int, ...]
    """Segments with the empty ones, for which a batch has room: as counted, doubled, and the bound of all packs."""
    longest: int
    dropped_sequences: int
    """Sequences of a micro-batch of BERT-large, of a quarter of `longest` slots."""
    dropped_heads: int
    unseen_lengths: range
    repeats: int


FULL = Sizes(
    square=8192,
    copied_numbers=1 << 29,
    chain=2000,
    widths=(768, 1024, 1600),
    vocabularies=(30_522, 30_528, 50_257, 50_304),
    head_rows=(1335, 5341, 5376, 8192),
    loss_tokens=32_768,
    compiles=(False, True),
    chunk_bytes=(1 << 28, 1 << 29, 1 << 30, 1 << 31),
    heads=(12, 25),
    sequences=95,
    length=344,
    segments=(95, 190, 1024),
    longest=1024,
    dropped_sequences=96,
    dropped_heads=16,
    unseen_lengths=range(301, 341, 4),
    repeats=10,
)
TINY = Sizes(
    square=64,
    copied_numbers=1 << 12,
    chain=10,
    widths=(32,),
    vocabularies=(101, 128),
    head_rows=(16,),
    loss_tokens=24,
    compiles=(False,),
    chunk_bytes=(1 << 12, 1 << 13),
    heads=(2,),
    sequences=3,
    length=16,
    segments=(3, 8),
    longest=64,
    dropped_sequences=4,
    dropped_heads=2,
    unseen_lengths=range(11, 19, 4),
    repeats=2,
)


@dataclass(frozen=True, kw_only=True)
class Bench:
    """The device, the shapes, and a clock."""

    device: torch.device
    sizes: Sizes

    @property
    def is_cuda(self) -> bool:
        """Whether the device has events, peaks of memory and the fused kernels."""
        return self.device.type == "cuda"

    def numbers(self, *shape: int, dtype: torch.dtype = torch.bfloat16, learned: bool = False) -> Tensor:
        """Returns random numbers; learned ones get gradients."""
        return torch.randn(*shape, device=self.device, dtype=dtype).requires_grad_(learned)

    def finish(self) -> None:
        """Waits for the device."""
        if self.is_cuda:
            torch.cuda.synchronize(self.device)

    def host_milliseconds(self, work: Callable[[], object]) -> float:
        """Returns the milliseconds of one call, by the host's clock."""
        self.finish()
        started = time.perf_counter()
        work()
        self.finish()
        return 1e3 * (time.perf_counter() - started)

    def milliseconds(self, work: Callable[[], object]) -> float:
        """Returns the median of some calls after a warm-up: on a GPU between two events, else by the host's clock."""
        for _ in range(2):
            work()
        if not self.is_cuda:
            return statistics.median(self.host_milliseconds(work) for _ in range(self.sizes.repeats))
        new_event: Any = torch.cuda.Event  # has no annotations
        marks = []
        for _ in range(self.sizes.repeats):
            before, after = new_event(enable_timing=True), new_event(enable_timing=True)
            before.record()
            work()
            after.record()
            marks.append((before, after))
        self.finish()
        return statistics.median(float(before.elapsed_time(after)) for before, after in marks)

    def added_megabytes(self, work: Callable[[], object]) -> float | None:
        """Returns by how much the peak of memory exceeds what was there before; None on a CPU."""
        if not self.is_cuda:
            return None
        torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_allocated(self.device)
        work()
        return (torch.cuda.max_memory_allocated(self.device) - before) / 1e6


class Attention:
    """Attention of one layer, by the fused kernel that a GPU takes."""

    def __init__(self, bench: Bench, heads: int, boundaries: Tensor, slots: int, *, causal: bool) -> None:
        self.q, self.k, self.v = (bench.numbers(slots, heads, HEAD_DIM, learned=True) for _ in "qkv")
        self._boundaries, self._longest, self._causal = boundaries.to(torch.int32), bench.sizes.longest, causal
        self._backend = "varlen" if bench.is_cuda else "sdpa"

    @classmethod
    def of_bert(cls, bench: Bench) -> "Attention":
        """Returns a layer of BERT-large over sequences of a quarter of the longest."""
        sizes = bench.sizes
        boundaries = torch.arange(sizes.dropped_sequences + 1, device=bench.device) * (sizes.longest // 4)
        slots = sizes.dropped_sequences * (sizes.longest // 4)
        return cls(bench, sizes.dropped_heads, boundaries, slots, causal=False)

    def forward(self, dropped: float = 0.0) -> Tensor:
        """Returns the output."""
        return packed_attention(
            self.q,
            self.k,
            self.v,
            self._boundaries,
            self._longest,
            causal=self._causal,
            dropout=dropped,
            backend=self._backend,
        )

    def both(self, dropped: float = 0.0) -> None:
        """Computes the output and all gradients."""
        output = self.forward(dropped)
        torch.autograd.grad(output, (self.q, self.k, self.v), torch.ones_like(output))


def ceilings(bench: Bench) -> Iterator[Row]:
    """The best rate of products and of copies, and what an operator costs the host."""
    rows, sizes = bench.sizes.square, bench.sizes

    def multiply() -> dict[str, Any]:
        left, right = bench.numbers(rows, rows), bench.numbers(rows, rows)
        return {"value": 2e-9 * rows**3 / bench.milliseconds(lambda: left @ right)}

    def copy() -> dict[str, Any]:
        source, target = (torch.empty(sizes.copied_numbers, device=bench.device) for _ in range(2))
        return {"value": 2e-9 * source.nbytes / bench.milliseconds(lambda: target.copy_(source))}

    def operator() -> dict[str, Any]:
        number = torch.zeros(8, device=bench.device)
        return {"value": 1e3 * bench.milliseconds(lambda: [number.add_(1) for _ in range(sizes.chain)]) / sizes.chain}

    yield {"ceiling": "BF16 product, TFLOP/s"}, multiply
    yield {"ceiling": "copy, TB/s read and written"}, copy
    yield {"ceiling": "one small operator, microseconds"}, operator


def head_products(bench: Bench) -> Iterator[Row]:
    """The three products of the output matrix by width, vocabulary and rows, in TFLOP/s."""
    for width in bench.sizes.widths:
        for vocabulary in bench.sizes.vocabularies:
            for rows in bench.sizes.head_rows:

                def products(width: int = width, vocabulary: int = vocabulary, rows: int = rows) -> dict[str, Any]:
                    hidden, weight = bench.numbers(rows, width), bench.numbers(vocabulary, width)
                    gradient = bench.numbers(rows, vocabulary)
                    kinds: dict[str, Callable[[], Tensor]] = {
                        "logits": lambda: hidden @ weight.T,
                        "hidden_gradient": lambda: gradient @ weight,
                        "weight_gradient": lambda: gradient.T @ hidden,
                    }
                    operations = 2e-9 * rows * width * vocabulary
                    return {kind: operations / bench.milliseconds(work) for kind, work in kinds.items()}

                yield {"width": width, "vocabulary": vocabulary, "rows": rows}, products


def loss(bench: Bench) -> Iterator[Row]:
    """The head and its loss, forward and backward, eager and compiled, by the size of its chunks."""
    width, tokens, sizes = bench.sizes.widths[0], bench.sizes.loss_tokens, bench.sizes
    for vocabulary, compiled, chunk in product(sizes.vocabularies[-2:], sizes.compiles, sizes.chunk_bytes):

        def step(vocabulary: int = vocabulary, compiled: bool = compiled, chunk: int = chunk) -> dict[str, Any]:
            hidden = bench.numbers(tokens, width, dtype=torch.float32, learned=True)
            weight = bench.numbers(vocabulary, width, dtype=torch.float32, learned=True)
            labels = torch.randint(vocabulary, (tokens,), device=bench.device)
            weights = torch.ones(tokens, device=bench.device)
            how: dict[str, Any] = {"compiled": compiled, "chunk_tokens": chunk // (4 * vocabulary)}

            def both() -> None:
                with torch.autocast(bench.device.type, torch.bfloat16):
                    total, _ = linear_cross_entropy(hidden, weight, labels, weights, **how)
                torch.autograd.grad(total, (hidden, weight))

            return {"milliseconds": bench.milliseconds(both), "megabytes": bench.added_megabytes(both)}

        yield {"width": width, "vocabulary": vocabulary, "compiled": compiled, "chunk_bytes": chunk}, step


def segments(bench: Bench) -> Iterator[Row]:
    """Attention of one layer, forward and backward, by the number of segments that the boundaries have room for."""
    sizes = bench.sizes
    for heads in sizes.heads:
        for room in sizes.segments:

            def layer(heads: int = heads, room: int = room) -> dict[str, Any]:
                boundaries = torch.arange(room + 1, device=bench.device).clamp(max=sizes.sequences) * sizes.length
                attend = Attention(bench, heads, boundaries, sizes.sequences * sizes.length, causal=True)
                both = attend.both
                return {"milliseconds": bench.milliseconds(both), "megabytes": bench.added_megabytes(both)}

            yield {"heads": heads, "sequences": sizes.sequences, "segments": room}, layer


def dropout(bench: Bench) -> Iterator[Row]:
    """Attention of one layer of BERT-large without dropout and with it, forward, and forward and backward."""
    for probability in (0.0, DROPOUT):

        def layer(probability: float = probability) -> dict[str, Any]:
            attend = Attention.of_bert(bench)
            forward = bench.milliseconds(lambda: attend.forward(probability))
            return {
                "forward_milliseconds": forward,
                "both_milliseconds": bench.milliseconds(lambda: attend.both(probability)),
            }

        yield {"dropout": probability}, layer


def dropout_gradient(bench: Bench) -> Iterator[Row]:
    """Whether the backward pass drops what the forward pass dropped.

    The output is linear in the values for a given draw: <output, output> is <values, gradient of the values> if the
    gradient that comes in is the output itself. Where the backward pass drops others, it is not: the gradient of
    another draw shows by how much.
    """

    def difference(forward_seed: int, backward_seed: int) -> dict[str, Any]:
        attend = Attention.of_bert(bench)
        torch.manual_seed(forward_seed)
        incoming = attend.forward(DROPOUT).detach()
        torch.manual_seed(backward_seed)
        (gradient,) = torch.autograd.grad(attend.forward(DROPOUT), attend.v, incoming)
        of_outputs = incoming.double().square().sum()
        of_values = (attend.v.detach().double() * gradient.double()).sum()
        return {"relative_difference": abs(float(of_values / of_outputs) - 1.0)}

    yield {"backward_pass": "of the same draw"}, lambda: difference(1, 1)
    yield {"backward_pass": "of another draw"}, lambda: difference(1, 2)


def unseen_lengths(bench: Bench) -> Iterator[Row]:
    """SDPA of one sequence with dropout, forward and backward, at lengths that it has not seen, and again."""
    others = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    kinds = {"without cuDNN": others, **({"cuDNN": [SDPBackend.CUDNN_ATTENTION]} if bench.is_cuda else {})}
    for name, kernels in kinds.items():

        def lengths(kernels: list[SDPBackend] = kernels) -> dict[str, Any]:
            def call(length: int) -> float:
                shape = (1, bench.sizes.dropped_heads, length, HEAD_DIM)
                q, k, v = (bench.numbers(*shape, learned=True) for _ in "qkv")

                def both() -> None:
                    output = F.scaled_dot_product_attention(q, k, v, dropout_p=DROPOUT)
                    torch.autograd.grad(output, (q, k, v), torch.ones_like(output))

                return bench.host_milliseconds(both)

            with sdpa_kernel(kernels):
                call(bench.sizes.unseen_lengths.start - 1)  # loads what all lengths share
                found = [[call(length) for length in bench.sizes.unseen_lengths] for _ in range(2)]
            first, again = (statistics.median(one) for one in found)
            return {"first_milliseconds": first, "again_milliseconds": again}

        yield {"kernels": name}, lengths


QUESTIONS: dict[str, Callable[[Bench], Iterator[Row]]] = {
    "ceilings": ceilings,
    "head_products": head_products,
    "loss": loss,
    "segments": segments,
    "dropout": dropout,
    "dropout_gradient": dropout_gradient,
    "unseen_lengths": unseen_lengths,
}


def answer(bench: Bench, out: Path) -> bool:
    """Answers every question, and writes all rows to `out` after each. Returns whether none has failed."""
    found: dict[str, list[dict[str, Any]]] = {}
    torch.manual_seed(0)
    for question, rows in QUESTIONS.items():
        found[question] = []
        for asked, measure in rows(bench):
            try:
                row = asked | measure()
            except Exception as error:  # a kernel that fails here leaves the others' rows
                row = asked | {"error": f"{type(error).__name__}: {error}"[:300]}
            found[question].append(row)
            write_json(out, found)
            print(question, row, flush=True)
    return not any("error" in row for rows_found in found.values() for row in rows_found)


def main() -> int:
    """Returns 1 if a row failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tiny", action="store_true")
    given = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    is_sound = answer(Bench(device=device, sizes=TINY if given.tiny else FULL), given.out)
    print("every row has a value" if is_sound else "rows failed: see their errors")
    return 0 if is_sound else 1


if __name__ == "__main__":
    sys.exit(main())
