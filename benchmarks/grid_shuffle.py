"""Measures a grid shuffle: memory and its limit, bytes read and written, and CPU time compared with two plain copies.

    python benchmarks/grid_shuffle.py --corpus-gb 4 --memory 1GiB --folder /scratch

It writes a synthetic token file of the given size, shuffles it in a process of its own with the imports of `evenpack
prepare`, and prints a line of JSON.
"""

import json
import os
import resource
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import measuring
import numpy as np
from pydantic import ByteSize, TypeAdapter

from evenpack.data.prepare import prepare  # noqa: F401 - part of the memory of a preparing process
from evenpack.data.recipes import DocumentsRecipe
from evenpack.data.sequences import build_view
from evenpack.data.sequences.documents import DocumentsView
from evenpack.data.sequences.shuffled import SHUFFLED, ShuffledView
from evenpack.data.shuffle.grid import choose_grid
from evenpack.data.shuffle.shuffle import GridShuffler
from evenpack.data.tokens.file import TokenFile, bin_path
from evenpack.data.tokens.writer import TokenFileWriter

VOCABULARY = 50_257
_BATCH = 20_000


def main() -> None:
    """Prints the measurement."""
    parser = measuring.parser_of(__doc__)
    parser.add_argument("--corpus-gb", type=float, default=1.0, help="bytes of tokens, in 1e9")
    parser.add_argument("--memory", default="768MiB", help="the limit, as in data.shuffle.memory")
    parser.add_argument("--mean-length", type=int, default=500, help="tokens of a document, on average")
    parser.add_argument("--folder", type=Path, default=None, help="on the disk to be measured; three times the corpus")
    arguments = parser.parse_args()
    memory = TypeAdapter(ByteSize).validate_python(arguments.memory)
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        prefix = Path(folder) / "tokens"
        write_corpus(prefix, int(arguments.corpus_gb * 1e9), arguments.mean_length)
        copies = measuring.in_own_process(copy_twice, prefix)
        shuffle = measuring.in_own_process(shuffle_once, prefix, memory)
    corpus = shuffle["corpus_bytes"]
    print(
        json.dumps(
            {
                "corpus_gb": corpus / 1e9,
                "limit_mib": memory / (1 << 20),
                **shuffle,
                "read_of_corpus": shuffle["read_bytes"] / corpus,
                "written_of_corpus": shuffle["written_bytes"] / corpus,
                "two_copies_cpu_seconds": copies["cpu_seconds"],
                "cpu_of_two_copies": shuffle["cpu_seconds"] / copies["cpu_seconds"],
            }
        )
    )


def write_corpus(prefix: Path, token_bytes: int, mean_length: int) -> None:
    """Writes documents of geometric lengths with random tokens."""
    rng = np.random.default_rng(0)
    with TokenFileWriter(prefix, vocabulary_size=VOCABULARY, columns={}) as writer:
        while 2 * writer.tokens < token_bytes:
            lengths = np.minimum(rng.geometric(1 / mean_length, _BATCH) + 1, 20 * mean_length)
            writer.append(rng.integers(0, VOCABULARY, int(lengths.sum()), dtype=np.uint16), lengths, {})
        writer.finish()


def copy_twice(prefix: Path) -> dict[str, float]:
    """Copies the pair of files twice in blocks of 8 MiB, and flushes each copy."""
    with _measured() as found:
        for _ in range(2):
            for suffix in (".bin", ".idx"):
                with prefix.with_suffix(suffix).open("rb") as source, prefix.with_suffix(".copy").open("wb") as copy:
                    while block := source.read(1 << 23):
                        copy.write(block)
                    copy.flush()
                    os.fsync(copy.fileno())
    prefix.with_suffix(".copy").unlink()
    return found


def shuffle_once(prefix: Path, memory: int) -> dict[str, float]:
    """Shuffles once, and checks the ids."""
    view = build_view(
        DocumentsRecipe(kind="documents", max_sequence_length=1024),
        TokenFile(prefix),
        np.arange(TokenFile(prefix).documents),
    )
    assert isinstance(view, DocumentsView)
    token_bytes = 2 * view.token_file.tokens
    grid = choose_grid(token_bytes=token_bytes, sequences=view.count, memory=memory, seed=1)
    mapped = 0

    def told(sequences: int, bytes_read: int) -> None:
        nonlocal mapped
        mapped = bytes_read

    folder = prefix.parent / "shuffled"
    folder.mkdir()
    with _measured() as found:
        GridShuffler(
            view=view, grid=grid, folder=folder, vocabulary_size=VOCABULARY, origin={}, report_progress=told
        ).run()
    shuffled = ShuffledView(view, TokenFile(folder / SHUFFLED))
    assert (np.bincount(shuffled.source_ids, minlength=view.count) == 1).all()
    corpus = sum(path.stat().st_size for path in (bin_path(prefix), prefix.with_suffix(".idx")))
    found["read_bytes"] += mapped
    return {**found, "corpus_bytes": corpus, "sequences": view.count, "rows": grid.rows, "columns": grid.columns}


@contextmanager
def _measured() -> Iterator[dict[str, float]]:
    found: dict[str, float] = {}
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak of resident memory
    before, began = _counters(), time.perf_counter()
    yield found
    found |= {name: value - before[name] for name, value in _counters().items()}
    found["seconds"] = time.perf_counter() - began
    found["peak_resident_mib"] = measuring.status_kib("VmHWM") / 1024


def _counters() -> dict[str, float]:
    """Returns CPU seconds, and the bytes of read() and write()."""
    lines = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return {
        "cpu_seconds": usage.ru_utime + usage.ru_stime,
        "read_bytes": int(lines["rchar"]),
        "written_bytes": int(lines["wchar"]),
    }


if __name__ == "__main__":
    main()
