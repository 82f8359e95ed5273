"""Compares the rate of `prepare` with the bare batch encoder of `tokenizers`, on the same text and threads.

    python benchmarks/prepare.py --path FILE.jsonl.zst --tokenizer DIR

`prepare` loads the tokenizer, reads, decompresses, parses, hashes, tokenises, writes, splits and packs. The bare
encoder gets the texts in memory, and its result is discarded. Each run has a process of its own, because the heap that
one leaves behind makes the next up to a fifth slower; imports are not counted. The runs alternate, so that load on the
machine affects all. `ratio` is the median over the rounds of (faster bare run) / (prepare) in wall-clock seconds,
`ratio_cpu` that in CPU seconds.
"""

import argparse
import json
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import measuring

from evenpack.data.config import DataConfig
from evenpack.data.manifest import Manifest
from evenpack.data.prepare.prepare import prepare
from evenpack.data.sources.kinds import open_corpus

BARE_BATCH_SIZES = {"bare, 1000 documents a call": 1000, "bare, all documents in one call": None}
"""Batch sizes of `datasets.map(batched=True)`, and with the least waiting between calls. The faster one counts."""


def main() -> None:
    arguments = _parse_arguments()
    config = DataConfig.model_validate(
        {
            "sources": {"text": {"kind": "jsonl", "path": arguments.path}},
            "tokenizer": {"kind": "gpt2", "path": arguments.tokenizer},
            "recipe": {"kind": "documents", "max_sequence_length": 1024},
            "pack_length": 1024,
        }
    )
    scratch = Path(tempfile.mkdtemp(dir=arguments.directory))
    try:
        manifest = prepare(config, scratch / "first")
        contenders: dict[str, Callable[[], tuple[float, float]]] = {
            name: partial(_encode, config, scratch / "first", size) for name, size in BARE_BATCH_SIZES.items()
        }
        contenders["prepare"] = partial(_prepare, config, scratch / "prepared")
        timings = _take_turns(contenders, arguments.repeats)
    finally:
        shutil.rmtree(scratch)
    print(json.dumps(_report(timings, manifest), indent=2))


def _prepare(config: DataConfig, directory: Path) -> tuple[float, float]:
    wall, cpu = time.perf_counter(), time.process_time()
    prepare(config, directory)
    taken = time.perf_counter() - wall, time.process_time() - cpu
    shutil.rmtree(directory)
    return taken


def _encode(config: DataConfig, prepared: Path, size: int | None) -> tuple[float, float]:
    import tokenizers

    encoder = tokenizers.Tokenizer.from_file(str(prepared / "tokenizer" / "tokenizer.json"))
    texts = [document.text for document in open_corpus("text", config.sources["text"]).documents()]
    wall, cpu = time.perf_counter(), time.process_time()
    for start in range(0, len(texts), size or len(texts)):
        encoder.encode_batch_fast(texts[start : start + (size or len(texts))], add_special_tokens=False)
    return time.perf_counter() - wall, time.process_time() - cpu


def _take_turns(
    contenders: dict[str, Callable[[], tuple[float, float]]], repeats: int
) -> dict[str, list[tuple[float, float]]]:
    """Returns wall-clock and CPU seconds of each run."""
    timings: dict[str, list[tuple[float, float]]] = {name: [] for name in contenders}
    for _ in range(repeats):
        for name, run in contenders.items():
            timings[name].append(measuring.in_own_process(run))
    return timings


def _report(timings: dict[str, list[tuple[float, float]]], manifest: Manifest) -> dict[str, object]:
    record = manifest.sources["text"]
    wall = {name: statistics.median(run[0] for run in runs) for name, runs in timings.items()}
    cpu = {name: statistics.median(run[1] for run in runs) for name, runs in timings.items()}
    return {
        "documents": record.documents,
        "text_bytes": record.text_bytes,
        "tokens_with_end_of_text": record.tokens,
        "runs": {
            name: {
                "median_seconds": round(wall[name], 3),
                "median_cpu_seconds": round(cpu[name], 3),
                "text_bytes_per_second": round(record.text_bytes / wall[name]),
                "tokens_per_second": round(record.tokens / wall[name]),
                "repeats": len(timings[name]),
            }
            for name in timings
        },
        "ratio": _median_ratio(timings, 0),
        "ratio_cpu": _median_ratio(timings, 1),
        "wanted": 0.9,
    }


def _median_ratio(timings: dict[str, list[tuple[float, float]]], clock: int) -> float:
    """Returns the ratio of each round, in which load on the machine affects both runs."""
    bare = [min(run[clock] for run in runs) for runs in zip(*(timings[name] for name in BARE_BATCH_SIZES), strict=True)]
    prepared = [run[clock] for run in timings["prepare"]]
    ratio: float = statistics.median(a / b for a, b in zip(bare, prepared, strict=True))
    return round(ratio, 3)


def _parse_arguments() -> argparse.Namespace:
    parser = measuring.parser_of(__doc__)
    parser.add_argument("--path", type=Path, required=True, help="jsonl or jsonl.zst with a key 'text'")
    parser.add_argument("--tokenizer", type=Path, required=True, help="a folder with vocab.json and merges.txt")
    parser.add_argument("--directory", type=Path, default=None, help="where to write; the default is the system's own")
    parser.add_argument("--repeats", type=int, default=5)
    return parser.parse_args()


if __name__ == "__main__":
    main()
