"""What a few small runs leave behind, frozen at one commit, so that code may be moved without changing any of it.

    .venv/bin/python tests/golden.py        records again, after a change that is meant to be seen

The record holds, for each case, the prepared files, every step of `metrics.jsonl`, and `--json` of the commands that
read a run; for each way to make sequences, the batches of a few steps; and an archive holds one run that was stopped
half way. Values that differ between two recordings (times,
paths) are kept by their type alone. Floating-point numbers depend on the processor: they are compared bit for bit
where it is the one of the record, and to the `tolerance_of` their case elsewhere.
"""

import json
import math
import os
import platform
import random
import shutil
import sys
import tarfile
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash
import yaml
from forked_ranks import run_ranks
from integration.small_run import evenpack, train_on
from run_files import prepared, run_config
from shard_files import write_prepared

from evenpack import Loader, RandomMasks, TokenArrays
from evenpack.batch import PackedBatch
from evenpack.config import load_run_file
from evenpack.data.batches.pipeline import MicroBatchDataset, PipelineSettings, evaluation_batches
from evenpack.data.order.step_shape import CostWeights
from evenpack.data.shards.writing import ShardForm
from evenpack.engine.config import RunConfig
from evenpack.engine.resolving.resolve import open_run
from evenpack.engine.world.distributed import _processor
from evenpack.losses import NO_COUNTS, StepCounts

FIXTURES = Path(__file__).parent / "fixtures" / "golden"
RECORD, STOPPED = FIXTURES / "record.json", FIXTURES / "stopped_run.tar.gz"
TOLERANCE = 2e-5
BF16_TOLERANCE = 2.0**-8
"""The rounding of BF16: a processor with instructions for its products (avx512_bf16, amx) rounds in other places."""
VARIES = "<varies>"
OF_PROCESSOR = {"depth", "efficiency", "gap", "packing_factor", "packs", "padding", "speed_up", "strategies"}
"""What the processor decides of a packing by least squares: with more strategies than equations several mixtures are
equally near, and the rounding of products leads the solver to one of them. Packs may differ by 1 %."""
STOP_AFTER = 3

_COMMON: dict[str, Any] = {
    "run": {"name": "golden", "seed": 7},
    "data": {
        "sources": {
            "one": {"kind": "jsonl", "path": "one.jsonl", "weight": 2},
            "two": {"kind": "text", "path": "two.txt", "document_separator": "line", "weight": 1},
        },
        "validation_fraction": 0.1,
        "tokenizer": {"kind": "train", "vocabulary_size": 300},
        "recipe": {"kind": "documents", "max_sequence_length": 64},
        "pack_length": 64,
    },
    "model": {"kind": "gpt2", "preset": "tiny", "hidden_size": 32, "heads": 2},
    "training": {
        "packs_per_step": 16,
        "packs_per_micro_batch": 4,
        "steps": 6,
        "evaluate_every_steps": 3,
        "evaluation_packs": 8,
        "checkpoint_every_steps": None,
        "precision": "fp32",
        "loader_workers": 0,
    },
    "optimizer": {"kind": "adamw", "learning_rate": 2e-3},
    "schedule": {"kind": "cosine", "warmup_steps": 2},
}
_BERT: dict[str, Any] = {
    "data": {
        "tokenizer": {"kind": "train_word_pieces", "vocabulary_size": 200},
        "recipe": {"kind": "sentence_pairs", "max_sequence_length": 64, "duplication_factor": 2},
    },
    "model": {"kind": "bert", "preset": "tiny", "hidden_size": 32, "heads": 2},
    "optimizer": {"kind": "lamb", "learning_rate": 2e-3},
}
_SEQUENCES = {
    "batching": "sequences",
    "packs_per_step": None,
    "packs_per_micro_batch": None,
    "sequences_per_step": 24,
    "sequences_per_micro_batch": 6,
}

CASES: dict[str, list[dict[str, Any]]] = {
    "gpt2_packed": [{"model": {"dropout": 0.1}}],
    "gpt2_alibi_concat_zero1": [
        {
            "data": {"recipe": {"kind": "concat", "max_sequence_length": 48}},
            "model": {"positions": "alibi"},
            "deepspeed": {"zero_stage": 1},
        }
    ],
    "gpt2_unpadded_sequences": [{"training": {**_SEQUENCES, "layout": "unpadded", "precision": "bf16_autocast"}}],
    "gpt2_padded_atoms": [
        {
            "data": {"recipe": {"kind": "padding", "max_sequence_length": 64, "atom": 32}},
            "training": {"layout": "padded"},
        }
    ],
    "llama_balanced_zero2": [
        {
            "model": {"kind": "llama", "preset": "tiny", "hidden_size": 32, "heads": 2, "feed_forward_size": 96},
            "deepspeed": {"zero_stage": 2},
        }
    ],
    "bert_packed": [_BERT, {"model": {"dropout": 0.1}}],
    "bert_stored_masks_padded": [
        _BERT,
        {
            "data": {"recipe": {"static_masks": {"max_predictions": 10}}},
            "model": {"mlm_reduction": "sequence", "loss_balancing": "expected"},
            "training": {**_SEQUENCES, "layout": "padded"},
        },
    ],
}
"""Changes of `_COMMON`, applied in order; a section of another kind replaces the old one."""

COMMANDS: tuple[tuple[str, ...], ...] = (
    ("config", "show"),
    ("plan", "--ranks", "4", "--device", "h100", "--mfu", "0.4"),
    ("where", "--step", "2"),
    ("evaluate",),
    ("report",),
    ("verify",),
    ("study", "packing"),
)
"""Commands whose `--json` is recorded for the first causal case and the first of BERT."""
COMMANDS_OF = ("gpt2_packed", "bert_packed")

_UNPADDED, _PADDED = ({"training": {**_SEQUENCES, "layout": layout}} for layout in ("unpadded", "padded"))
_MODERNBERT = {
    "data": {"tokenizer": _BERT["data"]["tokenizer"]},
    "model": {"kind": "modernbert", "preset": "tiny", "hidden_size": 32, "heads": 2, "window": 6},
}
_MOST_MASKED = {"masking": {"share": 0.95}}
"""So many that rows of several documents have too few tokens that are not special."""
_OF_TEXTS = ("all", "none")


def _recipe(kind: str, **settings: Any) -> dict[str, Any]:
    return {"data": {"recipe": {"kind": kind, "max_sequence_length": 64, **settings}}}


BATCHES: dict[str, tuple[list[dict[str, Any]], tuple[str, ...]]] = {
    "documents": ([_recipe("documents", max_sequence_length=24)], _OF_TEXTS),
    "documents_truncated_unpadded": ([_recipe("documents", long_documents="truncate"), _UNPADDED], _OF_TEXTS),
    "documents_dropped_padded": ([_recipe("documents", long_documents="drop"), _PADDED], _OF_TEXTS),
    "documents_grid": ([_recipe("documents", max_sequence_length=24), {"data": {"shuffle": "grid"}}], _OF_TEXTS),
    "documents_masked": ([_MODERNBERT, _recipe("documents", max_sequence_length=24)], ("all",)),
    "concat": ([_recipe("concat", max_sequence_length=48)], _OF_TEXTS),
    "concat_joined": ([_recipe("concat", isolate_documents=False)], _OF_TEXTS),
    "concat_joined_grid": ([_recipe("concat", isolate_documents=False), {"data": {"shuffle": "grid"}}], _OF_TEXTS),
    "concat_atoms": ([_recipe("concat", atom=16)], _OF_TEXTS),
    "concat_long_atoms": ([_recipe("concat", atom=128)], _OF_TEXTS),
    "concat_masked": ([_MODERNBERT, _MOST_MASKED, _recipe("concat", atom=16)], ("all",)),
    "concat_joined_masked": ([_MODERNBERT, _MOST_MASKED, _recipe("concat", isolate_documents=False)], ("all",)),
    "padding": ([_recipe("padding", atom=16)], ("all", "closing", "none")),
    "padding_joined": ([_recipe("padding", atom=16, isolate_documents=False)], ("all", "closing", "none")),
    "padding_rows": ([_recipe("padding", atom=128)], ("all", "closing", "none")),
    "padding_atoms": ([_recipe("padding", atom=128, pad_tails_to="atom")], ("all", "closing", "none")),
    "pairs": ([_BERT], ("all",)),
    "pairs_padded": ([_BERT, {"model": {"mlm_reduction": "sequence"}}, _PADDED], ("all",)),
    "stored_masks": ([_BERT, {"data": {"recipe": {"static_masks": {"max_predictions": 10}}}}], ("all",)),
    "masked_pairs": ([_BERT, {"data": {"recipe": {"static_masks": {"max_predictions": 10}}}}], ("all",)),
}
"""Changes of `_COMMON` for each way to make sequences, and each `end_of_text_in_loss` with which they are read; those
of `masked_pairs` are exported and read again."""
OWN_DOCUMENTS = ("labels", "random_masks")
"""Cases of documents that a Loader is given."""
BATCH_STEPS = (0, 1, 9)


def write_sources(folder: Path) -> None:
    """Writes documents of unequal length, made of sentences."""
    source = random.Random(11)
    words = [f"{first}{rest}" for first in "bcdfgklmnprst" for rest in ("ad", "oven", "illow", "ate", "unk")]

    def document(sentences: int) -> str:
        return " ".join(
            " ".join(source.choices(words, k=source.randint(2, 14))).capitalize() + "." for _ in range(sentences)
        )

    with (folder / "one.jsonl").open("w", encoding="utf-8") as file:
        for _ in range(150):
            file.write(json.dumps({"text": document(source.randint(1, 9))}) + "\n")
    (folder / "two.txt").write_text("\n".join(document(source.randint(1, 3)) for _ in range(120)), encoding="utf-8")


def run_values(name: str, folder: Path) -> dict[str, Any]:
    """Returns the sections of a case whose files lie in `folder`."""
    return _values(name, CASES[name], folder)


def _values(name: str, changes: Iterable[dict[str, Any]], folder: Path) -> dict[str, Any]:
    values: dict[str, Any] = json.loads(json.dumps(_COMMON))
    for change in changes:
        values = _laid_over(values, change)
    values["run"]["output_dir"] = str(folder / name)
    for entry in values["data"]["sources"].values():
        entry["path"] = str(folder / entry["path"])
    return values


def write_case(name: str, folder: Path) -> Path:
    """Writes the run file of a case and returns its path."""
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(run_values(name, folder)), encoding="utf-8")
    return path


def prepared_files(directory: Path) -> dict[str, Any]:
    """Returns the content of each JSON file, and size and checksum of all others."""
    found: dict[str, Any] = {}
    for path in sorted(path for path in directory.rglob("*") if path.is_file() and not path.name.startswith(".")):
        name = str(path.relative_to(directory))
        if path.suffix == ".json":
            found[name] = json.loads(path.read_text(encoding="utf-8"))
        else:
            found[name] = [path.stat().st_size, xxhash.xxh3_64_hexdigest(path.read_bytes())]
    return found


def steps_of(output_dir: Path) -> list[dict[str, Any]]:
    """Returns the records of a run."""
    return [json.loads(line) for line in (output_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


def processor() -> str:
    """Returns what decides the last bits of floating-point sums: the processor and the build of PyTorch."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines() if sys.platform == "linux" else []
    model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")
    return f"{platform.machine()} {model} {torch.backends.cpu.get_cpu_capability()} torch {torch.__version__}"


def tolerance_of(name: str, processor_of_record: str) -> float:
    """Returns the relative difference that the numbers of a case may have on this processor."""
    if processor_of_record == processor():
        return 0.0
    is_bf16 = any(str(part.get("training", {}).get("precision", "")).startswith("bf16") for part in CASES[name])
    return BF16_TOLERANCE if is_bf16 else TOLERANCE


def differences(expected: Any, found: Any, *, tolerance: float, place: str = "") -> Iterator[str]:
    """Yields a line for each leaf that differs; the share of tokens that are right may differ by `tolerance` itself."""
    if expected == VARIES:
        return
    if isinstance(expected, dict) and isinstance(found, dict):
        of_processor = OF_PROCESSOR if expected.get("algorithm") == "least_squares" else set()
        if of_processor and abs(found["packs"] - expected["packs"]) > 0.01 * expected["packs"]:
            yield f"{place}.packs: {expected['packs']} -> {found['packs']}"
        for key in sorted((expected.keys() | found.keys()) - of_processor):
            if key not in expected or key not in found:
                yield f"{place}.{key} is {'new' if key in found else 'gone'}"
            else:
                yield from differences(expected[key], found[key], tolerance=tolerance, place=f"{place}.{key}")
    elif isinstance(expected, list) and isinstance(found, list) and len(expected) == len(found):
        for index, (one, other) in enumerate(zip(expected, found, strict=True)):
            yield from differences(one, other, tolerance=tolerance, place=f"{place}[{index}]")
    elif isinstance(expected, float) and isinstance(found, float) and tolerance:
        absolute = tolerance if place.endswith("accuracy") else 1e-9
        if not math.isclose(expected, found, rel_tol=tolerance, abs_tol=absolute):
            yield f"{place}: {expected!r} -> {found!r}"
    elif expected != found or type(expected) is not type(found):
        yield f"{place}: {expected!r} -> {found!r}"


def record_all(folder: Path) -> dict[str, Any]:
    """Runs every case in `folder` and returns what it left, and all batches."""
    write_sources(folder)
    cases = {name: record_case(name, folder) for name in CASES}
    return {"cases": cases, "batches": record_all_batches(folder)}


def record_all_batches(folder: Path) -> dict[str, Any]:
    return {name: record_batches(name, folder) for name in (*BATCHES, *OWN_DOCUMENTS)}


def record_case(name: str, folder: Path) -> dict[str, Any]:
    """Prepares and trains a case, stopped half way, on two ranks; then runs the commands that read it."""
    run_file = write_case(name, folder)
    done = evenpack("prepare", run_file, options=("--json",))
    config = load_run_file(run_file, RunConfig)
    run_ranks(train_on, 2, load_run_file(run_file, RunConfig, [f"training.stop_after_steps={STOP_AFTER}"]))
    run_ranks(train_on, 2, config)
    found = {
        "prepare": json.loads(done.stdout),
        "prepared": prepared_files(config.prepared_dir),
        "steps": steps_of(config.run.output_dir),
        "summary": json.loads((config.run.output_dir / "summary.json").read_text(encoding="utf-8")),
    }
    if name in COMMANDS_OF:
        for words in COMMANDS:
            command = " ".join(word for word in words[:2] if not word.startswith("-"))
            options = tuple(words[len(command.split()) :])
            if command == "report":
                options += ("--output", str(folder / "report"))
            found[command] = json.loads(evenpack(command, run_file, options=(*options, "--json")).stdout)
        found["report"] = json.loads(json.dumps(found["report"]).replace(_processor(), VARIES))
        for run in found["report"]["runs"]:
            run.update(dict.fromkeys(("commit", "time in training steps"), VARIES))
    found["summary"]["checkpoints"]["bytes"] = VARIES  # with the length of the folder's name, which is in each
    return found


def record_batches(name: str, folder: Path) -> dict[str, Any]:
    """Returns the batches of a case for each `end_of_text_in_loss` and window, a hash for all arrays of a kind.

    Raises: AssertionError unless they hold what the plans of their steps have counted.
    """
    if name in OWN_DOCUMENTS:
        return {"windows": _hashed(_batches_of_loader(name, folder / "cache"))}
    changes, ends_of_text = BATCHES[name]
    config = prepared(run_config(_values(name, changes, folder)))
    if name == "masked_pairs":
        config = prepared(run_config(_values_of_shards(config, folder / "shards")))
    return {
        f"{ends}{' windows' if windows else ''}": _hashed(_batches_of_run(config, ends, windows))
        for ends in ends_of_text
        for windows in ((), (3, 6))
    }


def _batches_of_run(config: RunConfig, ends: str, windows: tuple[int, ...]) -> Iterator[PackedBatch[np.ndarray]]:
    if len(BATCHES[config.run.output_dir.name.removesuffix("_again")][1]) > 1:
        values = json.loads(config.model_dump_json())
        values["data"]["recipe"]["end_of_text_in_loss"] = ends
        config = run_config(values)
    run = open_run(config)
    # Sums of these are exact, in any order.
    weights = CostWeights(
        per_token=4.0, per_squared_length=0.5, per_segment=8.0, per_pair_within=dict.fromkeys(windows[1:], 0.25)
    )
    settings = PipelineSettings(
        seed=config.run.seed,
        objective=run.objective,
        shape=replace(run.shape, windows=windows, cost_weights=weights.in_layout(run.shape.layout)),
        ranks=2,
        rank=0,
        loader_workers=0,
        pin_memory=False,
    )
    ranks = [MicroBatchDataset(run.prepared, replace(settings, rank=rank)) for rank in range(2)]
    for step in BATCH_STEPS:
        plan, held = ranks[0].planner.plan(step), NO_COUNTS
        for rank, dataset in enumerate(ranks):
            cost = 0.0
            for index in range(plan.micro_batches):
                batch = dataset.arrays(step * plan.micro_batches + index)
                held, cost = held + batch.local_counts, cost + batch.cost
                yield batch
            assert cost == plan.cost(rank), (step, rank)
        assert held == plan.counts == batch.step_counts, step
    shape = replace(run.evaluation_shape, windows=windows, cost_weights=weights, items_per_micro_batch=3)
    for source in run.prepared.source_names:
        given = {"objective": run.objective, "rank": 0, "ranks": 2, "max_packs": 10, "seed": config.run.seed}
        for evaluated in evaluation_batches(run.prepared, source, shape=shape, **given):  # type: ignore[arg-type]
            yield replace(evaluated.with_tensors(lambda one: one.numpy()), cost=0.0)  # type: ignore[arg-type, return-value]


def _values_of_shards(config: RunConfig, folder: Path) -> dict[str, Any]:
    """Writes the pairs of a run as shards, and returns the sections of one that reads them."""
    static_masks, written = config.data.static_masks, open_run(config).prepared
    assert static_masks is not None, "the cases of shards have them"
    form = ShardForm(
        layout="variable",
        row_slots=config.data.recipe.max_sequence_length,
        mask_slots=static_masks.max_predictions,
        vocabulary_size=written.vocabulary_size,
    )
    write_prepared(written, folder, form, rows_per_shard=100)
    values: dict[str, Any] = json.loads(config.model_dump_json())
    values["run"]["output_dir"] = f"{config.run.output_dir}_again"
    values["data"] |= {
        "sources": {
            name: {
                "kind": "hdf5",
                "path": str(folder / name / "train"),
                "validation_path": str(folder / name / "validation"),
                "weight": source.weight,
            }
            for name, source in config.data.sources.items()
        },
        "tokenizer": {"kind": "external", "vocabulary_size": written.vocabulary_size, "end_of_text_id": 3},
        "recipe": {"kind": "masked_pairs", "max_sequence_length": 64, "max_predictions": 10},
    }
    return values


def _batches_of_loader(name: str, cache: Path) -> Iterator[PackedBatch[np.ndarray]]:
    """Yields batches of documents of which some tokens have no label, or any may be masked; from a cache, too."""
    random = np.random.default_rng(5)
    sources = {}
    for source in ("one", "two"):
        documents = [random.integers(10, 300, size=random.integers(1, 50)) for _ in range(150)]
        labels = [np.where(random.random(len(one)) < 0.3, -100, one) for one in documents]
        sources[source] = TokenArrays.of_lists(documents, labels=labels if name == "labels" else None)
    masks = RandomMasks(mask_token=3, special_tokens=(1, 2), vocabulary_size=300) if name == "random_masks" else None
    weights = CostWeights(per_token=0.0, per_squared_length=0.5, per_segment=8.0, per_pair_within={6: 0.25})
    for stored in (None, cache, cache):
        for rank in range(2):
            loader = Loader(
                sources,
                pack_length=32,
                packs_per_step=16,
                rank=rank,
                ranks=2,
                micro_batches=2,
                weights={"one": 2, "two": 1},
                objective=masks,
                cost_weights=weights,
                cache=stored,
                arrays="numpy",
            )
            for step in BATCH_STEPS:
                batches = loader.batches_of(step)
                assert sum(batch.cost for batch in batches) == loader.plan(step).cost(rank)
                yield from batches


def _hashed(batches: Iterable[PackedBatch[np.ndarray]]) -> dict[str, str]:
    """Returns a hash of each field of all batches together, and of each array of their targets."""
    hashes: dict[str, xxhash.xxh3_64] = {}

    def add(place: str, value: Any) -> None:
        content = repr(value).encode()
        if isinstance(value, np.ndarray):
            content = f"{value.dtype}{value.shape}".encode() + value.tobytes()
        hashes.setdefault(place, xxhash.xxh3_64()).update(content)

    for batch in batches:
        for field in fields(batch):
            value = getattr(batch, field.name)
            if field.name == "targets":
                add("targets", list(value))
                for name, targets in value.items():
                    for part in fields(targets):
                        add(f"targets.{name}.{part.name}", getattr(targets, part.name))
            else:
                if isinstance(value, StepCounts):
                    value = asdict(value)
                    padding_targets = value.pop("padding_targets")
                    if field.name == "local_counts":
                        add("padding_targets", padding_targets)
                add(field.name, value)
    return {place: one.hexdigest() for place, one in hashes.items()}


def write_stopped_run(folder: Path) -> None:
    """Keeps prepared data and a checkpoint of `STOP_AFTER` steps of the first case as an archive."""
    name = next(iter(CASES))
    write_sources(folder)
    overrides = [f"training.stop_after_steps={STOP_AFTER}"]
    run_ranks(train_on, 2, prepared(load_run_file(write_case(name, folder), RunConfig, overrides)))
    with tarfile.open(STOPPED, "w:gz") as archive:
        archive.add(folder / name, arcname=name)


def stopped_run(folder: Path) -> RunConfig:
    """Unpacks the run that was stopped and returns its run file; its sources lie where they lay, and are not read."""
    name = next(iter(CASES))
    with tarfile.open(STOPPED) as archive:
        archive.extractall(folder, filter="data")
    recorded = json.loads((folder / name / "data" / "manifest.json").read_text(encoding="utf-8"))["data"]
    values = run_values(name, folder)
    for source, section in values["data"]["sources"].items():
        section["path"] = recorded["sources"][source]["path"]
    return run_config(values)


def _laid_over(values: dict[str, Any], change: dict[str, Any]) -> dict[str, Any]:
    if change.get("kind", values.get("kind")) != values.get("kind"):
        return dict(change)
    merged = dict(values)
    for key, value in change.items():
        merged[key] = _laid_over(merged.get(key, {}), value) if isinstance(value, dict) else value
    return merged


def _without_what_varies(one: Any, other: Any) -> Any:
    if isinstance(one, dict) and isinstance(other, dict) and one.keys() == other.keys():
        return {key: _without_what_varies(one[key], other[key]) for key in one}
    if isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        return [_without_what_varies(*pair) for pair in zip(one, other, strict=True)]
    return one if one == other else VARIES


def _in_lines(record: dict[str, Any]) -> str:
    """Returns the record as JSON with a line for each part of a case."""
    cases = [
        f"{json.dumps(name)}: {{\n"
        + ",\n".join(f"  {json.dumps(part)}: {json.dumps(case[part], sort_keys=True)}" for part in case)
        + "\n }"
        for name, case in record["cases"].items()
    ]
    batches = [f"{json.dumps(name)}: {json.dumps(found, sort_keys=True)}" for name, found in record["batches"].items()]
    return (
        f'{{"processor": {json.dumps(record["processor"])},\n"cases": {{\n '
        + ",\n ".join(cases)
        + '\n},\n"batches": {\n '
        + ",\n ".join(batches)
        + "\n}}\n"
    )


def main() -> None:
    """Records every case twice."""
    os.environ |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    records = []
    for name in ("first", "second"):
        folder = Path(tempfile.mkdtemp(prefix=f"golden_{name}_"))
        records.append(record_all(folder))
        shutil.rmtree(folder)
    FIXTURES.mkdir(parents=True, exist_ok=True)
    record = {"processor": processor(), **_without_what_varies(*records)}
    RECORD.write_text(_in_lines(record), encoding="utf-8")
    with tempfile.TemporaryDirectory(prefix="golden_stopped_") as folder:
        write_stopped_run(Path(folder))


if __name__ == "__main__":
    main()
