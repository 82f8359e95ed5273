"""Measures `where` over 1e9 sequences: the contents of a step.

    python benchmarks/where.py [--documents 100000000] [--directory DIR] [--json]

The index is synthetic, of its true size, and mapped from files as a run maps it: documents of 577 to 640 tokens, which
recipe `documents` splits into ten sequences each of up to 64, and which `concat` joins and cuts at 64. The file of
tokens is sparse, because no query reads them. With 1e8 documents it takes up to 14 GB of disk, and minutes.

All queries of a recipe run in one process of its own. The first runs with the files' pages dropped from memory, and
includes opening the views and the plan; the others are for other steps.
Times are wall-clock seconds; the time of a plain import, which a command adds, is reported too. Memory is that of the
process, without mapped pages.
"""

import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import measuring
import numpy as np

from evenpack.data.order.plan import PackPlan, sort_chunks_by_length
from evenpack.data.order.selection import PackedSource
from evenpack.data.order.skipped_steps import NO_STEPS
from evenpack.data.order.stages import Stage, StagedOrder
from evenpack.data.packing import LengthHistogram, Packing, pack
from evenpack.data.permutation import sequence_id_type
from evenpack.data.recipes import ConcatRecipe, DocumentsRecipe
from evenpack.data.sequences import TokenAccounting
from evenpack.data.sequences.documents import DocumentsView
from evenpack.data.sequences.pieces import ConcatView
from evenpack.data.tokens.array_file import mapped_array
from evenpack.data.tokens.file import TokenFile, bin_path
from evenpack.data.where import TracedSource, Where

Figures = dict[str, float | int | str]
ResultT = TypeVar("ResultT")

LENGTH = 64
"""Most tokens of a sequence and slots of a pack."""
PIECES = 10
"""Of a document."""
PACKS_PER_STEP = 512
EPOCHS = 2
QUESTIONS = 50
CHUNK = 1 << 22


def main() -> None:
    parser = measuring.parser_of(__doc__)
    parser.add_argument("--documents", type=int, default=100_000_000, help="ten sequences each")
    parser.add_argument("--directory", type=Path, help="where to put the index; it is removed again")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    report: Figures = {"documents": arguments.documents, "import_seconds": import_seconds()}
    for recipe in ("documents", "concat"):
        with tempfile.TemporaryDirectory(dir=arguments.directory) as name:
            measuring.in_own_process(write_index, Path(name), recipe, arguments.documents)
            report |= measuring.in_own_process(ask, Path(name), recipe)
    measuring.print_report(report, as_json=arguments.json)


def import_seconds() -> float:
    started = time.perf_counter()
    subprocess.run([sys.executable, "-c", "import evenpack.engine.where"], check=True)
    return round(time.perf_counter() - started, 3)


def tails(documents: np.ndarray) -> np.ndarray:
    """Returns the tokens of the last piece of each document: 1 to `LENGTH`, in no order."""
    return (documents * 2_654_435_761 >> 7) % LENGTH + 1


def chunks(count: int) -> Iterator[np.ndarray]:
    return (np.arange(start, min(start + CHUNK, count)) for start in range(0, count, CHUNK))


def write_index(folder: Path, recipe: str, documents: int) -> Figures:
    starts = written(folder / "stream_starts.npy", documents + 1)
    total = 0
    for chunk in chunks(documents):
        ends = total + np.cumsum((PIECES - 1) * LENGTH + tails(chunk))
        starts[chunk + 1] = ends
        total = int(ends[-1])
    write_token_index(folder / "tokens", starts)
    for chunk in chunks(documents):
        written(folder / "documents.npy", documents)[chunk] = chunk
    if recipe == "documents":
        firsts = written(folder / "first_sequences.npy", documents + 1)
        for chunk in chunks(documents + 1):
            firsts[chunk] = PIECES * chunk
        sequences = chunks(PIECES * documents)
        lengths = (np.where(part % PIECES == PIECES - 1, tails(part // PIECES), LENGTH) for part in sequences)
    else:
        cuts = -(-total // LENGTH)
        holders = written(folder / "first_documents.npy", cuts + 1)
        for chunk in chunks(cuts):
            holders[chunk] = np.searchsorted(starts, chunk * LENGTH, side="right") - 1
        holders[cuts] = documents
        lengths = (np.minimum(total - part * LENGTH, LENGTH) for part in chunks(cuts))
    sort(folder, lengths, histogram_of(recipe, documents, total))
    return {}


def written(path: Path, count: int) -> np.ndarray:
    if not path.exists():
        with mapped_array(path, count, np.dtype(np.int64)):
            pass
    array: np.ndarray = np.load(path, mmap_mode="r+")
    return array


def write_token_index(prefix: Path, starts: np.ndarray) -> None:
    """Writes a pair of files in the layout of `tokens/file.py`, with a sparse file of tokens."""
    documents = len(starts) - 1
    with prefix.with_suffix(".idx").open("wb") as file:
        file.write(b"MMIDIDX\x00\x00" + np.array([1], "<u8").tobytes() + np.array([8], "u1").tobytes())
        file.write(np.array([documents, documents + 1], "<u8").tobytes())
        for chunk in chunks(documents):
            file.write((starts[chunk + 1] - starts[chunk]).astype("<i4").tobytes())
        for chunk in chunks(documents):
            file.write((2 * starts[chunk]).astype("<i8").tobytes())
        for chunk in chunks(documents + 1):
            file.write(chunk.astype("<i8").tobytes())
    with bin_path(prefix).open("wb") as file:
        file.truncate(2 * int(starts[-1]))


def histogram_of(recipe: str, documents: int, total: int) -> LengthHistogram:
    counts = np.zeros(LENGTH, dtype=np.int64)
    if recipe == "documents":
        counts[-1] = (PIECES - 1) * documents
        for chunk in chunks(documents):
            counts += np.bincount(tails(chunk) - 1, minlength=LENGTH)
    else:
        counts[-1] = total // LENGTH
        counts[total % LENGTH - 1] += total % LENGTH > 0
    return LengthHistogram(counts=counts)


def sort(folder: Path, lengths: Iterator[np.ndarray], histogram: LengthHistogram) -> None:
    with mapped_array(folder / "sorted.npy", histogram.sequences, sequence_id_type(histogram.sequences)) as ids:
        sort_chunks_by_length(lengths, histogram, ids)
    np.save(folder / "histogram.npy", histogram.counts)


def opened(folder: Path, recipe: str, packing: Packing) -> Where:
    """Opens the data as a run does: every array is mapped."""
    file = TokenFile(folder / "tokens", verify=False)
    arrays = {path.stem: np.load(path, mmap_mode="r").view(np.ndarray) for path in folder.glob("*.npy")}
    sequences = packing.sequences
    accounting = TokenAccounting(
        documents_read=file.documents,
        documents_kept=file.documents,
        tokens_read=file.tokens,
        tokens_kept=file.tokens,
        sequences=sequences,
    )
    view: DocumentsView | ConcatView
    if recipe == "documents":
        view = DocumentsView(
            recipe=DocumentsRecipe(kind="documents", max_sequence_length=LENGTH),
            token_file=file,
            accounting=accounting,
            max_segments_per_sequence=1,
            directory=None,
            documents=arrays["documents"],
            first_sequences=arrays["first_sequences"],
        )
    else:
        view = ConcatView(
            recipe=ConcatRecipe(kind="concat", max_sequence_length=LENGTH),
            token_file=file,
            accounting=accounting,
            max_segments_per_sequence=2,
            directory=None,
            documents=arrays["documents"],
            stream_starts=arrays["stream_starts"],
            first_documents=arrays["first_documents"],
        )
    plan = PackPlan(packing, arrays["sorted"], key=1)
    source = TracedSource(
        name="one",
        packed=PackedSource(view=view, plan=plan, key=1),
        origins=view,
        is_held_out=lambda _: False,
    )
    steps = EPOCHS * plan.packs // PACKS_PER_STEP
    stage = Stage(step=0, weights=(1,), items_per_step=PACKS_PER_STEP, items_per_micro_batch=PACKS_PER_STEP)
    return Where([source], StagedOrder([stage]), steps=steps, skipped=NO_STEPS)


def ask(folder: Path, recipe: str) -> Figures:
    packing = pack(LengthHistogram(counts=np.load(folder / "histogram.npy")), pack_length=LENGTH)
    random = np.random.default_rng(0)
    measuring.drop_pages(*folder.iterdir())
    before = measuring.status_kib("RssAnon")
    first_step, where = timed(lambda: opened(folder, recipe, packing))
    step_seconds, _ = timed(lambda: where.step(int(random.integers(1, where.steps))))
    steps = [timed(lambda: where.step(int(random.integers(1, where.steps))))[0] for _ in range(QUESTIONS)]
    figures = {
        "sequences": packing.sequences,
        "steps": where.steps,
        "first_step_seconds": first_step + step_seconds,
        "step_seconds_median": statistics.median(steps),
        "step_seconds_longest": max(steps),
        "grown_megabytes": (measuring.status_kib("RssAnon") - before) / 1e3,
    }
    return {
        f"{recipe}_{name}": round(value, 4) if isinstance(value, float) else value for name, value in figures.items()
    }


def timed(function: Callable[[], ResultT]) -> tuple[float, ResultT]:
    started = time.perf_counter()
    result = function()
    return time.perf_counter() - started, result


if __name__ == "__main__":
    main()
