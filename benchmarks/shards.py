"""Measures the cost of writing HDF5 shards, preparing from them, and loading the result.

    python benchmarks/shards.py --path FILE.jsonl.zst --tokenizer DIR

It prepares pairs of a text with static masks, exports them in both layouts, and prepares each again. Rates are per CPU
second of this process: rows exported, rows prepared (the medians of a few rounds), and tokens that one loader worker
plans, reads and collates from the prepared set, in a few rounds of each set in turn.
"""

import argparse
import json
import shutil
import statistics
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import loader
import measuring

from evenpack.config import load_run_file
from evenpack.data.manifest import SPLITS
from evenpack.data.prepare.prepare import prepare
from evenpack.data.prepared import PreparedData
from evenpack.data.sequences import MaskedPairsView
from evenpack.data.shards.reading import MaskedSequences
from evenpack.data.shards.writing import ShardForm, WrittenLayout, new_shard
from evenpack.engine.config import RunConfig
from evenpack.testing import changed

RUN_FILE = Path(__file__).parents[1] / "configs" / "bert_mini_wiki.yaml"
LAYOUTS: tuple[WrittenLayout, ...] = ("fixed", "variable")


def main() -> None:
    arguments = _parse_arguments()
    scratch = Path(tempfile.mkdtemp(dir=arguments.directory))
    try:
        print(json.dumps(_measure(arguments, scratch), indent=2))
    finally:
        shutil.rmtree(scratch)


def _measure(arguments: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    text = _text_run(arguments, scratch / "text")
    prepare(text.data, text.prepared_dir)
    prepared = PreparedData.open(text.prepared_dir, text.data)
    rows = sum(split["sequences"] for split in prepared.manifest.summary())
    report: dict[str, Any] = {"max_sequence_length": arguments.longest, "rows": rows}
    runs = {"text": text}
    for layout in LAYOUTS:
        folder = scratch / layout
        exporting = measuring.median_cpu_seconds(partial(_export, prepared, folder, layout), 1)
        runs[layout] = _shard_run(text, folder / "wiki", scratch / f"from_{layout}")
        preparing = [_prepare_anew(runs[layout]) for _ in range(arguments.rounds)]
        report[layout] = {
            "megabytes": round(sum(path.stat().st_size for path in folder.rglob("*.hdf5")) / 1e6, 1),
            "exported_rows_per_cpu_second": round(rows / exporting),
            "prepared_rows_per_cpu_second": round(rows / statistics.median(preparing)),
        }
    return report | {"loader_tokens_per_cpu_second": _loader_rates(runs, arguments)}


def _text_run(arguments: argparse.Namespace, folder: Path) -> RunConfig:
    longest = arguments.longest
    return load_run_file(
        RUN_FILE,
        RunConfig,
        [
            f"run.output_dir={folder}",
            f"data.sources.wiki.path={arguments.path}",
            f"data.tokenizer.path={arguments.tokenizer}",
            f"data.recipe.max_sequence_length={longest}",
            f"data.recipe.duplication_factor={arguments.passes}",
            f"data.recipe.static_masks.max_predictions={arguments.predictions}",
            f"data.pack_length={longest}",
            "training.packs_per_micro_batch=8",
        ],
    )


def _shard_run(text: RunConfig, shards: Path, folder: Path) -> RunConfig:
    """Returns the same run over shards."""
    static_masks = text.data.static_masks
    assert static_masks is not None, "`_text_run` sets them"
    recipe = {
        "kind": "masked_pairs",
        "max_sequence_length": text.data.recipe.max_sequence_length,
        "max_predictions": static_masks.max_predictions,
    }
    source = {"kind": "hdf5", "path": str(shards / "train"), "validation_path": str(shards / "validation")}
    return changed(text, run={"output_dir": str(folder)}, data={"sources": {"wiki": source}, "recipe": recipe})


def _export(prepared: PreparedData, folder: Path, layout: WrittenLayout) -> None:
    static_masks = prepared.config.static_masks
    assert static_masks is not None, "`_text_run` sets them"
    form = ShardForm(
        layout=layout,
        row_slots=prepared.config.recipe.max_sequence_length,
        mask_slots=static_masks.max_predictions,
        vocabulary_size=prepared.vocabulary_size,
    )
    for split in SPLITS:
        view = prepared.view("wiki", split)
        assert isinstance(view, MaskedPairsView), "of the recipe"
        (folder / "wiki" / split).mkdir(parents=True)
        for first in range(0, view.count, 10_000):
            last = min(first + 10_000, view.count)
            with new_shard(folder / "wiki" / split / f"part_{first:09d}.hdf5", form, last - first) as shard:
                shard.append(MaskedSequences.of_view(view, first, last))


def _prepare_anew(run: RunConfig) -> float:
    shutil.rmtree(run.prepared_dir, ignore_errors=True)
    return measuring.median_cpu_seconds(partial(prepare, run.data, run.prepared_dir), 1)


def _loader_rates(runs: dict[str, RunConfig], arguments: argparse.Namespace) -> dict[str, int]:
    datasets = {name: loader.dataset_of(run) for name, run in runs.items()}
    rates: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(arguments.rounds + 1):
        for name, dataset in datasets.items():
            seconds, tokens = loader.collate(dataset, arguments.batches)
            rates[name].append(tokens / seconds)
    return {name: round(statistics.median(of_rounds[1:])) for name, of_rounds in rates.items()}


def _parse_arguments() -> argparse.Namespace:
    parser = measuring.parser_of(__doc__)
    parser.add_argument("--path", type=Path, required=True, help="a corpus as `data.sources.NAME.path` takes it")
    parser.add_argument("--tokenizer", type=Path, required=True, help="a folder with BERT's vocab.txt")
    parser.add_argument("--longest", type=int, default=512, help="tokens of a pair, and slots of a pack")
    parser.add_argument("--predictions", type=int, default=76, help="most masked tokens of a pair")
    parser.add_argument("--passes", type=int, default=10, help="over the text")
    parser.add_argument("--batches", type=int, default=200, help="micro-batches of 8 packs a round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--directory", type=Path, default=None, help="for scratch files")
    return parser.parse_args()


if __name__ == "__main__":
    main()
