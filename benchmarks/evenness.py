"""Computes how equal packs are and can be, for published lengths and for long-tailed ones up to 131,072 tokens.

    python benchmarks/evenness.py [--shipped] [--json FILE] [--lengths FOLDER]

Each case is `evenpack study evenness` on a sample of lengths. Long-tailed lengths are made up: log-normal with a median
of 400 and a sigma of 1.2 (short documents), or 1,000 and 1.5 (with books), cut into pieces of a pack. Nothing is timed.
`--lengths` also writes the lengths of the documents. `--shipped` counts the operations of the shipped models instead,
each in its own packs, on 20,000 sequences.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import measuring
import numpy as np
from jaxtyping import Int64

from evenpack.data.packing import LengthHistogram
from evenpack.data.packing.baselines import sample_histogram
from evenpack.studies.evenness.command import model_of_run_file
from evenpack.studies.evenness.study import cost_packs, evenness_rows
from evenpack.studies.lengths.reading import published_histogram

PUBLISHED = ("wikipedia_128", "wikipedia_384", "wikipedia_512", "wikipedia_1024", "wikipedia_2048", "squad_1_1_384")
PACK_LENGTHS = (2048, 8192, 32_768, 131_072)
TAILS = {"short documents": (400, 1.2), "with books": (1000, 1.5)}
DEVICES = (8, 64, 512)
PACKS_PER_DEVICE = 8
SAMPLE = 100_000
SHIPPED: dict[str, tuple[int, int | None, tuple[str, ...]]] = {
    "bert_base_phase2": (512, None, ("wikipedia_512",)),
    "bert_large_phase2": (512, None, ("wikipedia_512",)),
    "gpt2_small": (1024, None, ("wikipedia_1024",)),
    "gpt2_xl": (1024, None, ("wikipedia_1024",)),
    "llama_1.1b": (2048, 32_000, ("wikipedia_2048",)),
    "modernbert_base": (1024, 50_368, ("wikipedia_1024",)),
    "llama_8b": (8192, 128_256, tuple(TAILS)),
    "modernbert_base_8192": (8192, 50_368, tuple(TAILS)),
}
"""Run files: slots of a pack, the vocabulary where the run file leaves it to a tokenizer of the hub, and lengths."""
SAMPLE_OF_SHIPPED = 20_000


def long_tailed(median: float, sigma: float) -> Int64[np.ndarray, " documents"]:
    """Returns the lengths of documents."""
    drawn = np.random.default_rng(0).normal(np.log(median), sigma, SAMPLE)
    return np.exp(drawn).astype(np.int64) + 1


def shipped_rows(tails: Mapping[str, Int64[np.ndarray, " documents"]]) -> Iterator[dict[str, Any]]:
    """Yields the rows of each shipped model, with the lengths that they are on."""
    for name, (pack_length, vocabulary_size, of_lengths) in SHIPPED.items():
        model = model_of_run_file(name, vocabulary_size=vocabulary_size)
        for lengths in of_lengths:
            if lengths in tails:
                whole = LengthHistogram.from_lengths(tails[lengths], longest=int(tails[lengths].max()))
                histogram = whole.fitted(pack_length, "split").histogram
            else:
                histogram = published_histogram(lengths)
            histogram = sample_histogram(histogram, SAMPLE_OF_SHIPPED, seed=0)
            costs = cost_packs(histogram, model, pack_length=pack_length)
            for row in evenness_rows(costs, DEVICES[:2], packs_per_device=PACKS_PER_DEVICE):
                print(lengths, row, flush=True)
                yield {"lengths": lengths, "pack_length": pack_length} | asdict(row)


def main() -> None:
    parser = measuring.parser_of(__doc__, json_file=True)
    parser.add_argument("--lengths", type=Path)
    parser.add_argument("--shipped", action="store_true")
    arguments = parser.parse_args()
    tails = {tail: long_tailed(*parameters) for tail, parameters in TAILS.items()}
    if arguments.lengths is not None:
        for tail, lengths in tails.items():
            np.save(arguments.lengths / f"{tail.replace(' ', '_')}.npy", lengths)
    if arguments.shipped:
        measuring.write_report({"rows": list(shipped_rows(tails))}, arguments.json)
        return
    encoder, decoder = (model_of_run_file(name, vocabulary_size=None) for name in ("bert_large_phase2", "gpt2_xl"))
    cases = {
        name: (histogram, histogram.longest, encoder)
        for name in PUBLISHED
        for histogram in [sample_histogram(published_histogram(name), min(SAMPLE, 80_000), seed=0)]
    }
    for pack_length in PACK_LENGTHS:
        for tail, lengths in tails.items():
            whole = LengthHistogram.from_lengths(lengths, longest=int(lengths.max()))
            histogram = whole.fitted(pack_length, "split").histogram
            cases[f"{tail}, {pack_length:,}"] = (histogram, pack_length, decoder)
    report = {}
    for name, (histogram, pack_length, model) in cases.items():
        costs = cost_packs(histogram, model, pack_length=pack_length)
        rows = evenness_rows(costs, DEVICES, packs_per_device=PACKS_PER_DEVICE)
        report[name] = {
            "model": model.name,
            "pack_length": pack_length,
            "sequences": histogram.sequences,
            "sequences_alone": costs.alone,
            "rows": [asdict(row) for row in rows],
        }
        print(name, *(f"{row.devices} {row.packs_are} {row.waiting:.4f}" for row in rows), sep="  ", flush=True)
    measuring.write_report(report, arguments.json)
    print(json.dumps({name: case["sequences_alone"] for name, case in report.items()}))


if __name__ == "__main__":
    main()
