"""Measures the speed of packed, un-padded and padded fine-tuning with the same sequences in the same updates.

    OMP_NUM_THREADS=1 python benchmarks/finetune_speed.py FINETUNE.yaml [section.key=value ...] [--json FILE]

One model does whole updates (collation, forward and backward passes, AdamW) in the three layouts in turn, so that load
on the machine affects all of them. Rates are sequences over the median seconds of an update; seconds are CPU seconds of
the process's threads on a CPU, otherwise wall-clock seconds. `of_packing_factor` is the speed-up over padding to
data.max_sequence_length, divided by the sequences per pack: 1 is the ideal if padding costs as much as tokens.
"""

import json
import statistics
from dataclasses import replace
from typing import Any

import measuring
import torch

from evenpack.config import load_run_file
from evenpack.data.order.step_shape import Layout
from evenpack.finetuning.config import FinetuneConfig
from evenpack.finetuning.data import read_task
from evenpack.finetuning.model import read_pretrained
from evenpack.finetuning.run import new_finetuned
from evenpack.finetuning.train import Finetuning, Trainer

LAYOUTS: tuple[Layout, ...] = ("packed", "unpadded", "padded")


def main() -> None:
    parser = measuring.parser_of(__doc__, run_file=True, json_file=True)
    parser.add_argument("--rounds", type=int, default=9)
    arguments = parser.parse_args()
    config = load_run_file(arguments.run_file, FinetuneConfig, arguments.overrides)
    report = measure(config, rounds=arguments.rounds)
    print(json.dumps(report, indent=2))
    measuring.write_report(report, arguments.json)


def measure(config: FinetuneConfig, *, rounds: int) -> dict[str, Any]:
    """Returns the rates of each layout, and the speed-up of packing."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    pretrained = read_pretrained(config)
    data = read_task(config.data, pretrained.tokenizer)
    finetuning = Finetuning(config=config, data=data, tokenizer=pretrained.tokenizer, device=device)
    trainer = Trainer(new_finetuned(config, pretrained, 0).to(device), config.training, steps=1 + rounds)
    planner = finetuning.planner(0)
    plans = [planner.plan(step) for step in range(1 + rounds)]
    collators = {
        layout: finetuning.collator(replace(planner, shape=replace(planner.shape, layout=layout))) for layout in LAYOUTS
    }
    seconds: dict[Layout, list[float]] = {layout: [] for layout in LAYOUTS}
    slots: dict[Layout, int] = {}
    order = list(LAYOUTS)
    for plan in plans:
        for layout in order:
            began = measuring.device_seconds(device)
            _, slots[layout] = trainer.step(collators[layout], plan)
            seconds[layout].append((measuring.device_seconds(device) - began) / plan.counts.sequences)
        order = [*order[1:], order[0]]
    rates = {layout: 1 / statistics.median(found[1:]) for layout, found in seconds.items()}
    factor = sum(plan.counts.sequences for plan in plans) / sum(plan.counts.packs for plan in plans)
    return {
        "run": config.run.name,
        "model": pretrained.section.shape,
        **measuring.device_facts(device),
        "precision": config.training.precision,
        "rounds": rounds,
        "max_sequence_length": config.data.max_sequence_length,
        "sequences_a_step": statistics.mean(plan.counts.sequences for plan in plans),
        "packs_a_step": statistics.mean(plan.counts.packs for plan in plans),
        "packing_factor": factor,
        "slots_of_last_step": slots,
        "sequences_per_second": rates,
        "speed_up_over_padded": {layout: rates[layout] / rates["padded"] for layout in LAYOUTS},
        "of_packing_factor": rates["packed"] / rates["padded"] / factor,
    }


if __name__ == "__main__":
    main()
