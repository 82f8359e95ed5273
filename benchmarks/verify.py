"""Measures the comparison of a prepared set with its checksums, in the page cache and from the disk.

    python benchmarks/verify.py [--megabytes 2048] [--directory DIR]

The set is one file of random tokens. CPU seconds are those of the process; the disk is read after the pages of the file
were dropped from memory. `cat` reads the same bytes in the same state.
"""

import json
import os
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import measuring
import numpy as np

from evenpack.data.checksums import CHUNK_BYTES, ChunkReader, Digest, digest_of, find_damage


def main() -> None:
    parser = measuring.parser_of(__doc__)
    parser.add_argument("--megabytes", type=int, default=2048, help="of the file")
    parser.add_argument("--directory", type=Path, default=None, help="where the file is made; default: temporary")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.directory) as directory:
        path = Path(directory) / "tokens.bin"
        write(path, arguments.megabytes << 20)
        block = memoryview(np.random.default_rng(0).bytes(CHUNK_BYTES))
        verify, count = verifier(path)
        report = {
            "megabytes": arguments.megabytes,
            "digest_while_writing": measured(lambda: hash_blocks(block, count), arguments.megabytes),
            "verify_cached": measured(verify, arguments.megabytes),
            "verify_from_disk": measured(verify, arguments.megabytes, evicted=path),
            "cat_from_disk": measured(lambda: cat(path), arguments.megabytes, evicted=path),
        }
    print(json.dumps(report, indent=2))


def write(path: Path, size: int) -> None:
    random = np.random.default_rng(1)
    with path.open("wb") as file:
        for _ in range(0, size, CHUNK_BYTES):
            file.write(random.bytes(CHUNK_BYTES))
        os.fsync(file.fileno())


def verifier(path: Path) -> tuple[Callable[[], None], int]:
    """Does the work of `evenpack verify` on each chunk, in one thread."""
    expected = digest_of(path).checksums()

    def verify() -> None:
        reader = ChunkReader()
        for chunk in range(len(expected.chunks)):
            if find_damage(path, expected, reader, chunk=chunk) is not None:
                raise SystemExit(f"{path} changed while it was measured")

    return verify, len(expected.chunks)


def hash_blocks(block: memoryview, count: int) -> None:
    digest = Digest()
    for _ in range(count):
        digest.update(block)


def cat(path: Path) -> None:
    subprocess.run(["cat", str(path)], check=True, stdout=subprocess.DEVNULL)


def measured(work: Callable[[], None], megabytes: int, *, evicted: Path | None = None) -> dict[str, float]:
    """Returns the seconds of one call."""
    if evicted is not None:
        measuring.drop_pages(evicted)
    started, cpu_started = time.perf_counter(), time.process_time()
    work()
    elapsed, cpu = time.perf_counter() - started, time.process_time() - cpu_started
    gigabytes = megabytes / 1e3 * 1.048576
    return {
        "elapsed_seconds": elapsed,
        "cpu_seconds": cpu,
        "gigabytes_per_second": gigabytes / elapsed,
        "cpu_seconds_per_gigabyte": cpu / gigabytes,
    }


if __name__ == "__main__":
    main()
