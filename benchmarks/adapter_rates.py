"""Measures how fast a Loader feeds another trainer's form of a batch, beside its own batches.

    OMP_NUM_THREADS=1 python benchmarks/adapter_rates.py [--pack-length 2048] [--rounds 7] [--json FILE]

`loader` iterates over batches of tensors; `model_inputs` makes of each what a model of transformers takes, once without
and once with the arguments of FlashAttention (torchtitan's form is the first, as rows). Real tokens per CPU second of
the process, one thread; rounds take turns, and ratios are within a round. Medians.
"""

import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import measuring
import numpy as np
import torch
from transformers import LlamaConfig

import evenpack
from evenpack.adapters.huggingface import ModelInputs

_STEPS = 40


def main() -> None:
    parser = measuring.parser_of(__doc__, json_file=True)
    parser.add_argument("--pack-length", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    llama, flash = (LlamaConfig(attn_implementation=name, vocab_size=1 << 16) for name in ("sdpa", "flash_attention_2"))
    common: dict[str, Any] = {"causal": True, "mask": "none", "first_position": 0, "dtype": torch.float32}
    forms: dict[str, Callable[[Any], Any]] = {
        "loader": lambda batch: batch,
        "model_inputs": ModelInputs(config=llama, embeddings=1 << 16, **common),
        "model_inputs, for_flash": ModelInputs(config=flash, embeddings=1 << 16, **common),
    }
    loader = own_loader(arguments.pack_length)
    rounds = [{name: rate(loader, form) for name, form in forms.items()} for _ in range(arguments.rounds)]
    rows: list[dict[str, Any]] = [
        {
            "form": name,
            "tokens_per_cpu_second": statistics.median(one[name] for one in rounds),
            "over_loader": statistics.median(one[name] / one["loader"] for one in rounds),
        }
        for name in forms
    ]
    for row in rows:
        print(f"{row['form']:24}  {row['tokens_per_cpu_second'] / 1e6:6.1f} M tokens/CPU s  {row['over_loader']:5.2f}")
    measuring.write_report({"pack_length": arguments.pack_length, "rows": rows, "rounds": rounds}, arguments.json)


def own_loader(pack_length: int) -> evenpack.Loader:
    """Returns a loader over 20,000 documents of log-normal lengths up to a pack."""
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(5.5, 1.0, 20_000), 2, pack_length).astype(np.int64)
    tokens = rng.integers(1, 50_000, lengths.sum()).astype(np.uint16)
    documents = evenpack.TokenArrays(tokens, np.concatenate([[0], np.cumsum(lengths)]))
    return evenpack.Loader(
        documents, pack_length=pack_length, packs_per_step=64, ranks=4, micro_batches=2, packing="longest_pack_first"
    )


def rate(loader: evenpack.Loader, form: Callable[[Any], Any]) -> float:
    """Returns the real tokens per CPU second of some steps in this form."""
    tokens, started = 0, time.process_time()
    for batch in taken(loader):
        form(batch)
        tokens += batch.local_counts.tokens
    return tokens / (time.process_time() - started)


def taken(loader: evenpack.Loader) -> Iterator[Any]:
    for step in range(_STEPS):
        yield from loader.batches_of(step)


if __name__ == "__main__":
    main()
