"""Records the results of a few small runs, and compares two records of one machine bit for bit.

python scripts/same_runs.py record FILE.json [CASE ...]       trains each case (two CPU ranks) and writes the results
python scripts/same_runs.py compare BEFORE.json AFTER.json    exit code 1 and a line for each difference

Record before and after a change of the code that must not affect training (moved or renamed code, another interface),
each time with its own environment. Loss, gradient norm, learning rate, `order_hash` and token counts of every step,
validation losses, and a checksum of every final weight must be equal. Floating-point sums depend on the processor and
the number of its cores, so records of two machines may differ.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import xxhash
import yaml

STEP_KEYS = ("step", "loss", "gradient_norm", "learning_rate", "order_hash", "tokens", "targets", "sequences", "slots")
# Without devices `evenpack train` takes two CPU ranks: earlier versions and later ones call that option differently.
CUDA_OFF = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}

GPT2 = {
    "run": {"name": "same", "seed": 7},
    "data": {
        "sources": {"builtin": {"kind": "builtin"}},
        "validation_fraction": 0.05,
        "tokenizer": {"kind": "train", "vocabulary_size": 512},
        "recipe": {"kind": "documents", "max_sequence_length": 128},
        "pack_length": 128,
    },
    "model": {"kind": "gpt2", "preset": "tiny", "hidden_size": 64, "heads": 2},
    "training": {
        "packs_per_step": 16,
        "packs_per_micro_batch": 4,
        "steps": 6,
        "evaluate_every_steps": 3,
        "evaluation_packs": 8,
        "checkpoint_every_steps": None,
        "precision": "fp32",
    },
    "optimizer": {"kind": "adamw", "learning_rate": 2e-3},
    "schedule": {"kind": "cosine", "warmup_steps": 2},
}
BERT = {
    "data": {
        "tokenizer": {"kind": "train_word_pieces", "vocabulary_size": 512},
        "recipe": {"kind": "sentence_pairs", "max_sequence_length": 64, "duplication_factor": 2},
        "pack_length": 128,
    },
    "model": {"kind": "bert", "preset": "tiny", "hidden_size": 64, "heads": 2},
    "optimizer": {"kind": "lamb", "learning_rate": 2e-3},
}
SEQUENCES = {
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
            "data": {"recipe": {"kind": "concat", "max_sequence_length": 96}},
            "model": {"positions": "alibi"},
            "deepspeed": {"zero_stage": 1},
        }
    ],
    "gpt2_unpadded_sequences": [
        {"training": {**SEQUENCES, "layout": "unpadded", "precision": "bf16_autocast"}},
    ],
    "gpt2_padded_packs": [{"training": {"layout": "padded"}}],
    "bert_packed": [BERT, {"model": {"dropout": 0.1}}],
    "bert_stored_masks_padded": [
        BERT,
        {
            "data": {"recipe": {"static_masks": {"max_predictions": 10}}},
            "model": {"mlm_reduction": "sequence", "loss_balancing": "expected"},
            "training": {**SEQUENCES, "layout": "padded"},
        },
    ],
    "bert_adjusted": [BERT, {"training": {"packing_adjustment": "lamb_betas", "steps": 12}}],
}
"""Changes of `GPT2`, applied in order."""


def main() -> int:
    """Returns the exit code."""
    arguments = parse_arguments()
    if arguments.what == "record":
        with tempfile.TemporaryDirectory() as folder:
            record = {name: run_case(name, Path(folder)) for name in arguments.cases or CASES}
        arguments.file.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        return 0
    before, after = (json.loads(path.read_text(encoding="utf-8")) for path in (arguments.before, arguments.after))
    found = list(differences(before, after))
    print("\n".join(found) if found else f"the same to the bit: {', '.join(before)}")
    return 1 if found else 0


def run_case(name: str, folder: Path) -> dict[str, Any]:
    """Prepares, trains with an interruption, and reads the results."""
    values: dict[str, Any] = json.loads(json.dumps(GPT2))
    for change in CASES[name]:
        values = laid_over(values, change)
    output_dir = folder / name
    values["run"]["output_dir"] = str(output_dir)
    run_file = folder / f"{name}.yaml"
    run_file.write_text(yaml.safe_dump(values), encoding="utf-8")
    print(f"{name} ...", file=sys.stderr, flush=True)
    evenpack("prepare", run_file)
    evenpack("train", run_file, "training.stop_after_steps=2")
    evenpack("train", run_file)
    lines = (output_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    records = [json.loads(line) for line in lines]
    return {
        "steps": [{key: record[key] for key in STEP_KEYS} for record in records],
        "validation": [record.get("validation") for record in records],
        "weights": weight_checksums(output_dir / "checkpoints"),
    }


def laid_over(values: dict[str, Any], change: dict[str, Any]) -> dict[str, Any]:
    """Returns `values` with the keys of `change`; a section of another kind replaces the old one."""
    if change.get("kind", values.get("kind")) != values.get("kind"):
        return dict(change)
    merged = dict(values)
    for key, value in change.items():
        merged[key] = laid_over(merged.get(key, {}), value) if isinstance(value, dict) else value
    return merged


def evenpack(*arguments: Any) -> None:
    """Runs the command line of this script's environment; its output is shown only if it fails."""
    command = [sys.executable, "-m", "evenpack.launcher.cli", *map(str, arguments)]
    result = subprocess.run(command, env={**os.environ, **CUDA_OFF}, capture_output=True, text=True, check=False)
    if result.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {result.returncode}:\n{result.stdout}{result.stderr}")


def weight_checksums(checkpoints: Path) -> dict[str, str]:
    """Returns the XXH3 of each weight of the newest checkpoint."""
    newest = checkpoints / (checkpoints / "latest").read_text().strip()
    states = torch.load(newest / "mp_rank_00_model_states.pt", map_location="cpu", weights_only=True)
    return {
        name: xxhash.xxh3_128_hexdigest(tensor.contiguous().numpy().tobytes())
        for name, tensor in sorted(states["module"].items())
    }


def differences(before: Any, after: Any, place: str = "") -> Iterator[str]:
    """Yields a line for each leaf that differs."""
    if isinstance(before, dict) and isinstance(after, dict):
        for key in sorted(before.keys() | after.keys()):
            yield from differences(before.get(key), after.get(key), f"{place}.{key}".lstrip("."))
    elif isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        for index, (one, other) in enumerate(zip(before, after, strict=True)):
            yield from differences(one, other, f"{place}[{index}]")
    elif before != after:
        yield f"{place}: {before!r} -> {after!r}"


def parse_arguments() -> argparse.Namespace:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_subparsers(dest="what", required=True)
    record = what.add_parser("record", help="train and write down")
    record.add_argument("file", type=Path)
    record.add_argument("cases", nargs="*", metavar="CASE", help=f"of {', '.join(CASES)}; default: all")
    compare = what.add_parser("compare", help="two records of one machine")
    compare.add_argument("before", type=Path)
    compare.add_argument("after", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
