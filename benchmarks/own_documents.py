"""Measures how long `evenpack.Loader` takes to its first batch on documents of one's own, by their number.

    python benchmarks/own_documents.py [--documents 1000000 ...] [--pack-length 2048] [--arrays FOLDER] [--json FILE]

Documents are mapped arrays: offsets on disk, and tokens in a file without blocks, which reads as zeros. Their lengths
are log-normal, 2 to 2,000 tokens. Each loader has a process of its own: one fills the cache, three then open it. CPU
seconds of the process, from the call to the first batch; `import` is that of the modules before it. The pages of the
cache are in memory, as after the previous loader. Peaks are of resident memory, mapped pages included. A billion
documents take 28 GB of disk, of which 8 are the offsets; `--arrays` keeps these for another run.
"""

import statistics
import tempfile
import time
from pathlib import Path

import measuring
import numpy as np

_LONGEST = 2_000
_CHUNK = 1 << 22
_OPENINGS = 3


def main() -> None:
    parser = measuring.parser_of(__doc__, json_file=True)
    parser.add_argument("--documents", type=int, nargs="+", default=[100_000, 1_000_000, 10_000_000])
    parser.add_argument("--pack-length", type=int, default=2048)
    parser.add_argument("--arrays", type=Path, help="folder in which the arrays stay (default: a temporary one)")
    arguments = parser.parse_args()
    columns = ("documents", "tokens", "import", "no cache", "peak", "cache", "peak")
    print("{:>14}  {:>15}  {:>8}  {:>9}  {:>8}  {:>8}  {:>8}".format(*columns))
    rows = []
    for count in arguments.documents:
        rows.append(row := measure(count, arguments.pack_length, arguments.arrays))
        print(
            f"{row['documents']:14,}  {row['tokens']:15,}  {row['import']:6.2f} s  {row['first']:7.2f} s  "
            f"{row['first_peak_bytes'] / 1e6:5.0f} MB  {row['again']:6.3f} s  {row['again_peak_bytes'] / 1e6:5.0f} MB"
        )
    measuring.write_report({"rows": rows}, arguments.json)


def measure(documents: int, pack_length: int, arrays: Path | None) -> dict[str, float]:
    with tempfile.TemporaryDirectory(dir=arrays) as name:
        folder, cache = arrays or Path(name), Path(name) / "cache"
        tokens = write_documents(folder, documents)
        given = (folder, tokens, pack_length, cache)
        first = measuring.in_own_process(first_batch, *given)
        again = [measuring.in_own_process(first_batch, *given) for _ in range(_OPENINGS)]
    return {
        "documents": documents,
        "tokens": tokens,
        "import": statistics.median(one["import"] for one in again),
        "first": first["batch"],
        "again": statistics.median(one["batch"] for one in again),
        "first_peak_bytes": first["peak"],
        "again_peak_bytes": max(one["peak"] for one in again),
    }


def write_documents(folder: Path, documents: int) -> int:
    """Writes the offsets and a file of zeros, unless they are there, and returns the number of tokens."""
    if (folder / "tokens.bin").exists():
        offsets = np.load(folder / "offsets.npy", mmap_mode="r")
        if len(offsets) == documents + 1:
            return int(offsets[-1])
    rng = np.random.default_rng(0)
    offsets = np.lib.format.open_memmap(folder / "offsets.npy", mode="w+", dtype=np.int64, shape=(documents + 1,))
    total = 0
    for start in range(0, documents, _CHUNK):
        size = min(_CHUNK, documents - start)
        lengths = np.clip(rng.lognormal(5.0, 1.2, size), 2, _LONGEST).astype(np.int64)
        offsets[start + 1 : start + 1 + size] = total + np.cumsum(lengths)
        total += int(lengths.sum())
    offsets.flush()
    with (folder / "tokens.bin").open("wb") as file:
        file.truncate(2 * total)
    return total


def first_batch(folder: Path, tokens: int, pack_length: int, cache: Path) -> dict[str, float]:
    started = time.process_time()
    import evenpack

    loader_class = evenpack.Loader
    imported = time.process_time()
    mapped = np.memmap(folder / "tokens.bin", dtype=np.uint16, mode="r", shape=(tokens,))
    documents = evenpack.TokenArrays(mapped, np.load(folder / "offsets.npy", mmap_mode="r"))
    loader = loader_class(documents, pack_length=pack_length, packs_per_step=512, ranks=64, cache=cache, arrays="numpy")
    batch = next(iter(loader))
    assert batch.local_counts.packs == 512 // 64
    return {
        "import": imported - started,
        "batch": time.process_time() - imported,
        "peak": 1024 * measuring.status_kib("VmHWM"),  # `ru_maxrss` may be that of its parent
    }


if __name__ == "__main__":
    main()
