"""Measures how training reads a corpus that is larger than memory, in the order of a permutation, a grid and blocks.

    python benchmarks/reading_order.py --corpus-gb 4 --memory 768MiB --folder /scratch --json found.json

It writes a synthetic token file, prepares it for each order, and makes the batches of the first steps of an epoch, as
one loader worker makes them, in a process whose memory, page cache included, is limited by a control group. Nothing of
the corpus is cached when it begins; orders take turns. Bytes are those that the process read from disk. Seconds are CPU
seconds of all its threads, as the machine need not be quiet.

The limit is a group below that of this process (cgroup v1 with a writable memory controller), or the limit under which
this process was started, such as `systemd-run --user --scope -p MemoryMax=768M python ...`; without either it refuses.
"""

import argparse
import os
import platform
import shutil
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any, TypeVar
from unittest.mock import patch

import measuring
import numpy as np
import torch  # noqa: F401 - for the forked processes, in whose limit it would count
from loader import dataset_of
from pydantic import ByteSize, TypeAdapter

from evenpack.config import find_run_file, load_run_file
from evenpack.data.sequences.view import LocatedSequences
from evenpack.data.tokens.file import TokenFile
from evenpack.data.tokens.writer import TokenFileWriter
from evenpack.engine.config import RunConfig
from evenpack.launcher.preparing import prepare_run

ResultT = TypeVar("ResultT")

READ_AHEAD = "permutation_with_read_ahead"
"""A permutation read as if memory held the corpus: the system reads ahead around each page."""
VOCABULARY = 50_257
PAGE_BYTES = 4096
TOKEN_BYTES = 2
MEDIAN_LENGTH, SIGMA = 180, 1.4
"""Of documents: log-normal, with the median of English Wikipedia's articles and about their mean."""
CONTROL_GROUPS = Path("/sys/fs/cgroup")
GRID_MEMORY = "1GiB"
"""For the shuffle on disk, which is not measured here."""
_BATCH = 20_000


@dataclass(frozen=True, kw_only=True)
class Limit:
    """A limit on the memory of a process, page cache included."""

    means: str
    bytes: int
    group: Path | None
    """A group of our own, which the process enters; None: it has the limit of the process that starts it."""
    version: int
    """Of control groups."""


def main() -> None:
    arguments = _parse_arguments()
    memory = TypeAdapter(ByteSize).validate_python(arguments.memory)
    folder = arguments.folder / f"reading_order_{os.getpid()}"
    with limited(memory) as limit, removed(folder):
        write_corpus(folder / "tokens", int(arguments.corpus_gb * 1e9))
        runs = {order: run_of(folder, order, arguments) for order in arguments.orders}
        for run in dict.fromkeys(runs.values()):
            forked(prepare, run)
        rounds: dict[str, list[dict[str, Any]]] = {order: [] for order in arguments.orders}
        for _ in range(arguments.rounds):
            for order, run in runs.items():
                measuring.drop_pages(*(path for path in folder.rglob("*") if path.is_file()))
                rounds[order].append(forked(read, run, limit, arguments.tokens, order == READ_AHEAD))
                print(order, rounds[order][-1], flush=True)
        report = {
            "means": limit.means,
            "limit_bytes": limit.bytes,
            "corpus_bytes": (folder / "tokens.bin").stat().st_size,
            "read_ahead_kib": read_ahead_kib(folder),
            "kernel": platform.release(),
            "block_tokens": arguments.block_tokens,
            "orders": {order: {**medians(found), "rounds": found} for order, found in rounds.items()},
        }
    measuring.write_report(report, arguments.json)


def write_corpus(prefix: Path, token_bytes: int) -> None:
    """Writes documents of random tokens with log-normal lengths."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, VOCABULARY, 1 << 24, dtype=np.uint16)
    with TokenFileWriter(prefix, vocabulary_size=VOCABULARY, columns={}) as writer:
        while TOKEN_BYTES * writer.tokens < token_bytes:
            lengths = np.maximum(rng.lognormal(np.log(MEDIAN_LENGTH), SIGMA, _BATCH).astype(np.int64), 2)
            writer.append(np.resize(tokens, int(lengths.sum())), lengths, {})
        writer.finish()


Run = tuple[Path, tuple[str, ...]]
"""A run file and its overrides."""


def run_of(folder: Path, order: str, arguments: argparse.Namespace) -> Run:
    """Returns the run that reads the corpus in an order."""
    order = "permutation" if order == READ_AHEAD else order
    shuffle = {
        "permutation": "{kind: permutation}",
        "grid": f"{{kind: grid, memory: {GRID_MEMORY}, block_tokens: {arguments.block_tokens}}}",
        "blocks": f"{{kind: blocks, block_tokens: {arguments.block_tokens}}}",
    }[order]
    return find_run_file(Path("gpt2_mini_shuffle")), (
        f"data.sources={{corpus: {{kind: megatron, path: {folder / 'tokens'}, require_end_of_text: false}}}}",
        f"data.tokenizer={{kind: external, vocabulary_size: {VOCABULARY}, end_of_text_id: {VOCABULARY - 1}}}",
        f"data.recipe.max_sequence_length={arguments.pack_length}",
        f"data.pack_length={arguments.pack_length}",
        "data.validation_fraction=0",
        "data.packing.algorithm=longest_pack_first",
        "training.evaluate_every_steps=null",
        f"data.prepared_dir={folder / order}",
        f"data.shuffle={shuffle}",
    )


def prepare(run: Run) -> None:
    prepare_run(load_run_file(run[0], RunConfig, run[1]))


def read(run: Run, limit: Limit, tokens: int, read_ahead: bool) -> dict[str, Any]:
    """Makes the batches of the first steps of the epoch that hold so many tokens."""
    if limit.group is not None:
        (limit.group / "cgroup.procs").write_text(str(os.getpid()))
    config = load_run_file(run[0], RunConfig, run[1])
    with patch(f"{TokenFile.__module__}.exceeds_page_cache", lambda _: False) if read_ahead else nullcontext():
        dataset = dataset_of(config)
    view = dataset.planner.sources[0].view
    assert isinstance(view, LocatedSequences)
    steps = tokens // (config.training.items_per_step * config.data.pack_length)
    before, began, read_tokens, sequences = bytes_from_disk(), time.process_time(), 0, 0
    for index in range(steps * dataset.settings.micro_batches):
        counts = dataset.arrays(index).local_counts
        read_tokens += counts.tokens
        sequences += counts.sequences
    seconds = time.process_time() - began
    from_disk = bytes_from_disk() - before
    return {
        "tokens": read_tokens,
        "sequences": sequences,
        "bytes_from_disk": from_disk,
        "bytes_per_token": from_disk / read_tokens,
        "cpu_seconds": seconds,
        "tokens_per_cpu_second": read_tokens / seconds,
        "bytes_per_token_of_pages": bytes_of_pages(read_tokens / sequences),
        **memory_used(limit),
    }


def forked(function: Callable[..., ResultT], *arguments: object) -> ResultT:
    """Calls a function in a fork of this process: what is imported here does not count in the limit of its group."""
    with ProcessPoolExecutor(max_workers=1, mp_context=get_context("fork")) as executor:
        return executor.submit(function, *arguments).result()


def bytes_of_pages(mean_length: float) -> float:
    """Returns the bytes per token of the pages of sequences that are each somewhere in the file, and share none."""
    return PAGE_BYTES * (1 + (mean_length * TOKEN_BYTES - 1) / PAGE_BYTES) / mean_length


def medians(rounds: list[dict[str, Any]]) -> dict[str, float]:
    names = ("bytes_per_token", "tokens_per_cpu_second", "bytes_per_token_of_pages")
    return {name: statistics.median(one[name] for one in rounds) for name in names}


@contextmanager
def limited(memory: int) -> Iterator[Limit]:
    """Yields the limit of reading processes. Exits where none can be set."""
    controllers = dict(line.split(":", 2)[1:] for line in Path("/proc/self/cgroup").read_text().splitlines())
    name = "memory" if "memory" in controllers else ""
    version, limit_file = (1, "memory.limit_in_bytes") if name else (2, "memory.max")
    own = CONTROL_GROUPS / name / controllers[name].lstrip("/")
    now = (own / limit_file).read_text().strip() if (own / limit_file).exists() else "max"
    if now != "max" and int(now) <= memory:
        yield Limit(means="the limit it was started under", bytes=int(now), group=None, version=version)
        return
    group = own / f"evenpack_{os.getpid()}"
    try:
        group.mkdir()
    except OSError as error:
        _refuse(memory, f"{own} takes no group ({error.strerror})")
    try:
        try:
            (group / limit_file).write_text(str(memory))
        except OSError as error:
            _refuse(memory, f"{group / limit_file} cannot be written ({error.strerror})")
        yield Limit(means=f"a group of its own, cgroup v{version}", bytes=memory, group=group, version=version)
    finally:
        group.rmdir()


def _refuse(memory: int, reason: str) -> None:
    raise SystemExit(
        f"no limit of {memory} bytes can be set: {reason}. Start this program under a limit, for example by "
        f"`systemd-run --user --scope -p MemoryMax={memory} python ...`: a page cache may hold the whole corpus"
    )


@contextmanager
def removed(folder: Path) -> Iterator[None]:
    """Makes a folder, and removes it at the end."""
    folder.mkdir(parents=True)
    try:
        yield
    finally:
        shutil.rmtree(folder)


def bytes_from_disk() -> int:
    lines = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(lines["read_bytes"])


def memory_used(limit: Limit) -> dict[str, int]:
    """Returns the bytes of the process and of its page cache, if it is in a group of its own."""
    if limit.group is None:
        return {}
    lines = dict(line.split() for line in (limit.group / "memory.stat").read_text().splitlines())
    names = ("rss", "cache") if limit.version == 1 else ("anon", "file")
    return {"bytes_of_process": int(lines[names[0]]), "bytes_of_cache": int(lines[names[1]])}


def read_ahead_kib(folder: Path) -> int:
    """Returns the read-ahead of the disk of a folder; 0 where it is not known."""
    device = folder.stat().st_dev
    place = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}/bdi/read_ahead_kb")
    return int(place.read_text()) if place.exists() else 0


def _parse_arguments() -> argparse.Namespace:
    parser = measuring.parser_of(__doc__, json_file=True)
    parser.add_argument("--corpus-gb", type=float, default=4.0, help="bytes of tokens, in 1e9, of some 4 on disk")
    parser.add_argument("--memory", default="768MiB", help="of a reading process, page cache included")
    parser.add_argument("--tokens", type=int, default=40_000_000, help="about how many a round reads in each order")
    parser.add_argument("--block-tokens", type=int, default=1 << 22)
    parser.add_argument("--pack-length", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--orders", nargs="+", default=["permutation", READ_AHEAD, "grid", "blocks"])
    parser.add_argument("--folder", type=Path, required=True, help="on the disk to be measured")
    return parser.parse_args()


if __name__ == "__main__":
    main()
