"""Measures the rate of copying slices from a token file in the page cache, and the memory needed.

    python benchmarks/token_file.py [--tokens 128000000] [--directory DIR]

A batch is 64 packs of 1024 slots filled with sequences at random positions of the file. `gather` (one slice per
sequence, one concatenation) is compared in the same run with its alternative, one index per token. Times are CPU
seconds, medians of 5. Private memory is memory that the system cannot reclaim: it excludes mapped pages of the file.
"""

import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import measuring
import numpy as np
import psutil

from evenpack.data.tokens.file import TokenFile
from evenpack.data.tokens.writer import TokenFileWriter

SLOTS = 64 * 1024
BATCHES = 50
REPEATS = 5
MEAN_LENGTHS = (32, 100, 250, 1024)

Slices = tuple[np.ndarray, np.ndarray]
Gather = Callable[[np.ndarray, np.ndarray], np.ndarray]


def main() -> None:
    parser = measuring.parser_of(__doc__)
    parser.add_argument("--tokens", type=int, default=128_000_000, help="of the larger file; the smaller has an eighth")
    parser.add_argument("--directory", type=Path, default=None, help="where the files are made; default: temporary")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.directory) as directory:
        small, _ = write(Path(directory) / "small", arguments.tokens // 8)
        large, write_rate = write(Path(directory) / "large", arguments.tokens)
        report = {
            "write_tokens_per_second": round(write_rate),
            "gather": [compare(large, mean_length) for mean_length in MEAN_LENGTHS],
            "memory": [measure_memory(prefix) for prefix in (small, large)],
            "spans": [measure_spans(prefix) for prefix in (small, large)],
        }
    print(json.dumps(report, indent=2))


def write(prefix: Path, tokens: int) -> tuple[Path, float]:
    """Writes documents of 250 tokens on average, a million tokens per batch; also returns tokens per CPU second."""
    rng = np.random.default_rng(0)
    seconds = 0.0
    with TokenFileWriter(prefix, vocabulary_size=50_257) as writer:
        while writer.tokens < tokens:
            lengths = rng.integers(125, 376, 4_000)
            content = rng.integers(0, 50_257, lengths.sum())
            hashes = rng.integers(0, 1 << 64, len(lengths), dtype=np.uint64)
            start = time.process_time()
            writer.append(content, lengths, {"document_hashes": hashes})
            seconds += time.process_time() - start
        start = time.process_time()
        writer.finish()
        seconds += time.process_time() - start
        return prefix, writer.tokens / seconds


def draw(token_file: TokenFile, mean_length: int, *, seed: int) -> list[Slices]:
    rng = np.random.default_rng(seed)
    count = SLOTS // mean_length
    batches = []
    for _ in range(BATCHES):
        lengths = rng.integers(mean_length // 2, mean_length * 3 // 2 + 1, count)
        batches.append((rng.integers(0, token_file.tokens - 2 * mean_length, count), lengths))
    return batches


def gather_by_index(token_file: TokenFile) -> Gather:
    tokens = token_file.read(0, token_file.tokens)

    def gather(offsets: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        before = np.cumsum(lengths) - lengths
        gathered: np.ndarray = tokens[np.arange(lengths.sum()) + np.repeat(offsets - before, lengths)]
        return gathered

    return gather


def compare(prefix: Path, mean_length: int) -> dict[str, float]:
    """Returns tokens per CPU second of both ways, and their ratio."""
    token_file = TokenFile(prefix)
    batches = draw(token_file, mean_length, seed=1)
    ways: dict[str, Gather] = {"slices": token_file.gather, "index": gather_by_index(token_file)}
    for batch in batches:  # into the page cache, and both must agree
        np.testing.assert_array_equal(ways["slices"](*batch), ways["index"](*batch))
    tokens = sum(int(lengths.sum()) for _, lengths in batches)
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(REPEATS):
        for name, gather in ways.items():
            start = time.process_time()
            for batch in batches:
                gather(*batch)
            seconds[name].append(time.process_time() - start)
    rates = {name: tokens / statistics.median(times) for name, times in seconds.items()}
    return {
        "mean_length": mean_length,
        **{f"{name}_million_tokens_per_second": round(rate / 1e6) for name, rate in rates.items()},
        "slices_to_index": round(rates["slices"] / rates["index"], 2),
    }


def measure_memory(prefix: Path) -> dict[str, float]:
    """Returns the peak of private memory that opening and reading a file of this size adds."""
    before = private_bytes()
    token_file = TokenFile(prefix)
    highest = 0
    for batch in draw(token_file, 250, seed=2):
        token_file.gather(*batch)
        highest = max(highest, private_bytes() - before)
    return {"file_megabytes": round(token_file.tokens * 2 / 1e6), "private_megabytes": round(highest / 1e6, 1)}


def private_bytes() -> int:
    memory = psutil.Process().memory_info()
    return int(memory.rss - memory.shared)


def measure_spans(prefix: Path) -> dict[str, float]:
    """Returns the CPU time to look up the positions of 1000 documents, which must not grow with the index."""
    token_file = TokenFile(prefix)
    documents = np.random.default_rng(3).integers(0, token_file.documents, 1_000)
    token_file.spans(documents)
    times = []
    for _ in range(101):
        start = time.process_time()
        token_file.spans(documents)
        times.append(time.process_time() - start)
    return {"documents": token_file.documents, "microseconds": round(statistics.median(times) * 1e6, 1)}


if __name__ == "__main__":
    main()
