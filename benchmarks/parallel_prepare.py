"""Measures `prepare` with several processes: its wall time and its own CPU time, and compares the bytes written.

    python benchmarks/parallel_prepare.py --corpus wiki.jsonl --tokenizer gpt2/ --rounds 3

It prepares one corpus with this process alone, with 1 and 2 local workers and with 1 and 2 MPI workers, in turn, and
prints a table and a line of JSON with medians. MPI needs evenpack[mpi].
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import measuring

from evenpack.data.config import DataConfig
from evenpack.data.prepare import source as source_module
from evenpack.data.prepare.prepare import prepare
from evenpack.data.prepare.workers import LocalWorkers, Workers, mpi_workers, started_ranks

WAYS = {"alone": 0, "1 local": 1, "2 local": 2, "1 MPI": 1, "2 MPI": 2}
_AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}


def main() -> None:
    """Prints the measurement."""
    parser = measuring.parser_of(__doc__)
    parser.add_argument("--corpus", type=Path, required=True, help="a jsonl file with the key 'text', not compressed")
    parser.add_argument("--tokenizer", type=Path, required=True, help="GPT-2's vocab.json and merges.txt")
    parser.add_argument("--part-bytes", type=int, default=1 << 22)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--child", choices=WAYS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        _child(arguments)
        return
    found: dict[str, list[dict[str, Any]]] = {way: [] for way in WAYS}
    for _ in range(arguments.rounds):
        for way in WAYS:
            found[way].append(_run(way))
    print(json.dumps({"part_bytes": arguments.part_bytes, "rounds": arguments.rounds, **_summary(found)}))


def _run(way: str) -> dict[str, Any]:
    launcher = ["mpirun", "--oversubscribe", "--bind-to", "none", "-n", str(WAYS[way] + 1)] if "MPI" in way else []
    done = subprocess.run(
        [*launcher, sys.executable, *sys.argv, "--child", way],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | _AS_ROOT,
    )
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    print(f"{way}: {found}", file=sys.stderr)
    return found


def _child(arguments: argparse.Namespace) -> None:
    if started_ranks() > 1:
        with mpi_workers() as workers:
            if workers is not None:
                _measure(arguments, workers)
        return
    with nullcontext(LocalWorkers(WAYS[arguments.child]) if WAYS[arguments.child] else None) as local:
        _measure(arguments, local)


def _measure(arguments: argparse.Namespace, workers: Workers | None) -> None:
    source = {"kind": "jsonl", "path": str(arguments.corpus)}
    config = DataConfig.model_validate(
        {
            "sources": {"text": source},
            "tokenizer": {"kind": "gpt2", "path": str(arguments.tokenizer)},
            "recipe": {"kind": "documents", "max_sequence_length": 1024},
            "pack_length": 1024,
        }
    )
    source_module.SMALLEST_PART_BYTES = arguments.part_bytes
    with tempfile.TemporaryDirectory() as folder:
        begun, begun_cpu = time.monotonic(), time.process_time()
        manifest = prepare(config, Path(folder) / "data", workers=workers)
        found = {
            "wall_seconds": time.monotonic() - begun,
            "parent_cpu_seconds": time.process_time() - begun_cpu,
            "tokens": manifest.sources["text"].tokens,
            "files": sorted((name, file.content.whole) for name, file in manifest.files.items()),
        }
    print(json.dumps(found))


def _summary(found: Mapping[str, list[dict[str, Any]]]) -> dict[str, Any]:
    assert len({json.dumps(run.pop("files")) for runs in found.values() for run in runs}) == 1, (
        "the same bytes in every way"
    )
    names = ("wall_seconds", "parent_cpu_seconds")
    medians = {
        way: {name: round(statistics.median(run[name] for run in runs), 2) for name in names}
        for way, runs in found.items()
    }
    return {"tokens": found["alone"][0]["tokens"], "medians": medians}


if __name__ == "__main__":
    main()
