"""Measures the rate of one loader worker (plan, read, collate), compared with only reading the same sequences.

    python benchmarks/loader.py RUN.yaml [section.key=value ...]

Run `evenpack prepare` with the same arguments first. The files are in the page cache after the
first round. Times are CPU seconds of one thread, medians of the rounds.
"""

import argparse
import json
import resource
import statistics
import time

import measuring
import numpy as np

from evenpack.config import load_run_file
from evenpack.data.batches.pipeline import MicroBatchDataset
from evenpack.engine.config import RunConfig
from evenpack.engine.resolving.resolve import open_run


def main() -> None:
    arguments = _parse_arguments()
    config = load_run_file(arguments.run_file, RunConfig, arguments.overrides)
    dataset = dataset_of(config)
    steps = max(1, arguments.tokens // (config.training.items_per_step * config.data.pack_length))
    batches, reads, tokens = [], [], 0
    for _ in range(arguments.rounds + 1):
        seconds, tokens = collate(dataset, steps * dataset.settings.micro_batches)
        batches.append(seconds)
        reads.append(_read_only(dataset, steps))
    batch_seconds, read_seconds = statistics.median(batches[1:]), statistics.median(reads[1:])
    print(
        json.dumps(
            {
                "pack_length": config.data.pack_length,
                "packs_per_step": config.training.items_per_step,
                "layout": config.training.layout,
                "tokens": tokens,
                "batches_tokens_per_cpu_second": round(tokens / batch_seconds),
                "reading_tokens_per_cpu_second": round(tokens / read_seconds),
                "ratio": round(read_seconds / batch_seconds, 3),
                "peak_resident_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
            },
            indent=2,
        )
    )


def dataset_of(config: RunConfig) -> MicroBatchDataset:
    run = open_run(config)
    settings = run.pipeline_settings(measuring.lone_cpu())
    return MicroBatchDataset(run.prepared, settings)


def collate(dataset: MicroBatchDataset, micro_batches: int) -> tuple[float, int]:
    """Returns the CPU seconds of the first micro-batches, and their tokens."""
    started, tokens = time.process_time(), 0
    for index in range(micro_batches):
        tokens += dataset[index].local_counts.tokens
    return time.process_time() - started, tokens


def _read_only(dataset: MicroBatchDataset, steps: int) -> float:
    """Reads the sequences of the same steps in the same portions, planned in advance."""
    plans = [dataset.planner.plan(step) for step in range(steps)]
    portions = [plan.micro_batch(0, index) for plan in plans for index in range(dataset.settings.micro_batches)]
    started = time.process_time()
    for packs in portions:
        sources = np.repeat(packs.sources, np.diff(packs.offsets))
        for index, source in enumerate(dataset.planner.sources):
            source.view.read(packs.sequence_ids[sources == index])
    return time.process_time() - started


def _parse_arguments() -> argparse.Namespace:
    parser = measuring.parser_of(__doc__, run_file=True)
    parser.add_argument("--tokens", type=int, default=8_000_000, help="about how many tokens a round reads")
    parser.add_argument("--rounds", type=int, default=5)
    return parser.parse_intermixed_args()


if __name__ == "__main__":
    main()
