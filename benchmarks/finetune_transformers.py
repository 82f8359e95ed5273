"""Fine-tunes transformers' own model by a run file, for comparison with the results of `evenpack finetune`.

    python benchmarks/finetune_transformers.py FINETUNE.yaml [section.key=value ...] [--json FILE]

The pretrained weights are exported and loaded by transformers (`AutoModelForSequenceClassification`), and each seed
begins with the same new head. Steps hold the same sequences, un-packed and padded to the longest of the step, with
torch's AdamW and transformers' linear schedule; dropout uses other random numbers. `first_loss_difference` compares the
two models' losses over the first step before training, without dropout.
"""

import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import measuring
import numpy as np
import torch
from transformers import AutoModelForSequenceClassification, get_linear_schedule_with_warmup

from evenpack.config import load_run_file
from evenpack.data.sequences import LabelledSequences
from evenpack.engine.optimizers.build import parameter_groups
from evenpack.finetuning.config import FinetuneConfig
from evenpack.finetuning.data import TaskData, read_task
from evenpack.finetuning.model import FinetunedModel, read_pretrained
from evenpack.finetuning.run import new_finetuned
from evenpack.finetuning.train import Finetuning
from evenpack.models.huggingface import to_huggingface

EVALUATION_ROWS = 64


def main() -> None:
    parser = measuring.parser_of(__doc__, run_file=True, json_file=True)
    arguments = parser.parse_args()
    config = load_run_file(arguments.run_file, FinetuneConfig, arguments.overrides)
    if config.data.definition.predicts != "class":
        parser.error(f"{config.data.task} is not a task of classes")
    pretrained = read_pretrained(config)
    data = read_task(config.data, pretrained.tokenizer)
    finetuning = Finetuning(config=config, data=data, tokenizer=pretrained.tokenizer, device=torch.device("cpu"))
    with tempfile.TemporaryDirectory() as folder:
        exported = Path(folder) / "exported"
        special_token_id = pretrained.tokenizer.padding_id
        to_huggingface(pretrained.new_encoder(), exported, tokenizer_dir=None, special_token_id=special_token_id)
        seeds = [
            train_seed(finetuning, new_finetuned(config, pretrained, seed), exported, seed) for seed in config.run.seeds
        ]
    report = {
        "task": config.data.task,
        "weights": pretrained.origin,
        "medians": {
            name: {metric: statistics.median(seed["metrics"][name][metric] for seed in seeds) for metric in metrics}
            for name, metrics in seeds[0]["metrics"].items()
        },
        "seeds": seeds,
    }
    print(json.dumps(report, indent=2))
    measuring.write_report(report, arguments.json)


def train_seed(finetuning: Finetuning, ours: FinetunedModel, exported: Path, seed: int) -> dict[str, Any]:
    """Trains transformers' model on the sequences that `ours` would be trained on, and evaluates it."""
    training = finetuning.config.training
    model = with_head_of(ours, exported)
    planner = finetuning.planner(seed)
    sequences = finetuning.data.training
    steps = training.epochs * planner.steps_per_epoch
    optimizer = torch.optim.AdamW(
        parameter_groups(model, weight_decay=training.weight_decay), lr=training.learning_rate, eps=1e-8, fused=True
    )
    schedule = get_linear_schedule_with_warmup(optimizer, round(training.warmup_fraction * steps), steps)
    difference = first_loss_difference(finetuning, ours, model, seed)
    torch.manual_seed(seed)
    began = time.perf_counter()
    model.train()
    for step in range(steps):
        model(**rows(sequences, planner.plan(step).packs.sequence_ids)).loss.backward()
        if training.gradient_clipping is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), training.gradient_clipping)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    seconds = time.perf_counter() - began
    return {
        "seed": seed,
        "metrics": scored(model, finetuning.data),
        "first_loss_difference": difference,
        "sequences_per_second": training.epochs * sequences.count / seconds,
    }


def with_head_of(ours: FinetunedModel, exported: Path) -> Any:
    """Returns transformers' model with the exported encoder and the new layer of `ours`."""
    classifier = ours.head.get_submodule("classifier")
    labels = classifier.get_parameter("bias").numel()
    model = AutoModelForSequenceClassification.from_pretrained(exported, num_labels=labels)
    model.classifier.load_state_dict(classifier.state_dict())
    return model


@torch.no_grad()
def first_loss_difference(finetuning: Finetuning, ours: FinetunedModel, theirs: Any, seed: int) -> float:
    """Returns the relative difference of the mean loss over the first step."""
    planner = finetuning.planner(seed)
    plan = planner.plan(0)
    (output,) = ours.eval()(finetuning.collator(planner).collate(plan.packs, plan.counts)).values()
    mine = float(output.loss_sum) / plan.counts.sequences
    other = float(theirs.eval()(**rows(finetuning.data.training, plan.packs.sequence_ids)).loss)
    return abs(mine - other) / other


def rows(sequences: LabelledSequences, sequence_ids: np.ndarray) -> dict[str, torch.Tensor]:
    """Returns sequences in the form of transformers, padded to the longest."""
    _, lengths = sequences.locate(sequence_ids)
    columns = np.arange(lengths.max())
    real = columns < lengths[:, None]
    tokens = np.zeros(real.shape, dtype=np.int64)
    tokens[real] = sequences.read(sequence_ids).tokens
    second = real & (columns >= sequences.first_lengths[sequence_ids][:, None])
    return {
        "input_ids": torch.from_numpy(tokens),
        "attention_mask": torch.from_numpy(real.astype(np.int64)),
        "token_type_ids": torch.from_numpy(second.astype(np.int64)),
        "labels": torch.from_numpy(sequences.labels[sequence_ids]),
    }


@torch.no_grad()
def scored(model: Any, data: TaskData) -> dict[str, dict[str, float]]:
    """Returns the metrics of each evaluation file."""
    model.eval()
    found = {}
    for name, evaluation in data.evaluation.items():
        ids = np.arange(evaluation.sequences.count)
        parts = [
            model(**rows(evaluation.sequences, ids[first : first + EVALUATION_ROWS])).logits.numpy()
            for first in range(0, len(ids), EVALUATION_ROWS)
        ]
        found[name] = evaluation.score(list(np.concatenate(parts))).values
    return found


if __name__ == "__main__":
    main()
