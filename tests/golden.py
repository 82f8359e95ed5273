"""What a few small runs leave behind, frozen at one commit, so that code may be moved without changing any of it.

    .venv/bin/python tests/golden.py        records again, after a change that is meant to be seen

The record holds, for each case, the prepared files, every step of `metrics.jsonl`, and `--json` of the commands that
read a run; and an archive holds one run that was stopped half way. Values that differ between two recordings (times,
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
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import xxhash
import yaml
from integration.small_run import evenpack, train_on

from evenpack.config import load_run_file
from evenpack.engine.config import RunConfig
from evenpack.testing import prepared, run_config, run_ranks

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
    ("inspect",),
    ("budget", "--devices", "4", "--device", "h100"),
    ("where", "--step", "2"),
    ("evaluate",),
    ("report",),
    ("verify",),
    ("study", "packing"),
)
"""Commands whose `--json` is recorded for the first causal case and the first of BERT."""
COMMANDS_OF = ("gpt2_packed", "bert_packed")


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
    values: dict[str, Any] = json.loads(json.dumps(_COMMON))
    for change in CASES[name]:
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
    """Runs every case in `folder` and returns what it left."""
    write_sources(folder)
    return {name: record_case(name, folder) for name in CASES}


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
    return found


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
    return f'{{"processor": {json.dumps(record["processor"])},\n"cases": {{\n ' + ",\n ".join(cases) + "\n}}\n"


def main() -> None:
    """Records every case twice."""
    os.environ |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    records = []
    for name in ("first", "second"):
        folder = Path(tempfile.mkdtemp(prefix=f"golden_{name}_"))
        records.append(record_all(folder))
        shutil.rmtree(folder)
    FIXTURES.mkdir(parents=True, exist_ok=True)
    record = {"processor": processor(), "cases": _without_what_varies(*records)}
    RECORD.write_text(_in_lines(record), encoding="utf-8")
    with tempfile.TemporaryDirectory(prefix="golden_stopped_") as folder:
        write_stopped_run(Path(folder))


if __name__ == "__main__":
    main()
