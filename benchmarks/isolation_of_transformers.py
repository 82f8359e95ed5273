"""Sweeps all language models of the installed transformers: what the adapters prove of each, beside documents alone.

    python benchmarks/isolation_of_transformers.py [TYPE ...] [--json FILE.json] [--markdown FILE.md]

For each type with a `*ForCausalLM` or `*ForMaskedLM`, tiny, with random weights, without dropout, in training mode, and
for SDPA and eager attention: the proof that `PackTrainer` makes before its first step, and an oracle that knows nothing
of packs, the losses of each document by itself. Where the proof says isolated, the loss of packs in the adapter's own
inputs must be that of the documents alone; where it refuses, it must not. If they disagree, the exit code is 1.
"""

import copy
import itertools
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import measuring
import numpy as np
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, MODEL_FOR_MASKED_LM_MAPPING_NAMES

import evenpack
from evenpack.adapters.huggingface import ModelInputs
from evenpack.adapters.isolation import find_isolation
from evenpack.batch import ChosenTargets, PackedBatch, SlotTargets
from evenpack.studies.tiny_copies import TOKENS, text_configuration, tiny_model, without_cache

ATTENTION = ("sdpa", "eager")
VERDICTS = ("isolated, no mask", "isolated, block mask", "refused", "cannot tell", "not offered", "not built")
COLUMNS = [(task, attention) for task in ("causal", "masked") for attention in ATTENTION]
PACK_LENGTH, PACKS_PER_STEP = 32, 2
DOCUMENT_LENGTHS = (13, 29, 2, 19, 9, 23, 32, 3, 7, 17, 11, 27)
"""Most are longer than windows and chunks of tiny copies, which are at most 8."""

MOST_OF_LOSS, MOST_OF_TOKEN = 2e-5, 2e-4
"""Relative differences up to which losses of packs, of all tokens and of the worst, are those of documents alone."""

NOT_OFFERED = "does not support an attention implementation"

_WINDOWS = {"layer_types": ("full_attention", "sliding_attention"), "use_sliding_window": True, "sliding_window": 4096}
_CONVOLUTIONS = {"layer_types": ("conv", "conv", "full_attention")}
_ROTARY = {"rope_type": "default", "rope_theta": 10_000.0}
_INDEXER = {
    "indexer_n_heads": 4,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 256,
    "indexer_budget": 8,
    "indexer_compress_ratio": 2,
}
SETTINGS: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("dots1", "laguna", "mellum", "ministral", "qwen2", "qwen2_moe", "qwen3", "smollm3"), _WINDOWS),
    **dict.fromkeys(("lfm2", "lfm2_moe"), _CONVOLUTIONS),
    "bamba": {"attn_layer_indices": [1]},
    "granitemoehybrid": {"layer_types": ("linear_attention", "full_attention")},
    "cohere_compass_text": {
        "layer_types": ("sliding_attention", "full_attention"),
        "rope_parameters": {"sliding_attention": _ROTARY, "full_attention": _ROTARY},
    },
    "dbrx": {"attn_config": {"rope_theta": 500_000.0, "kv_n_heads": 8, "clip_qkv": 8.0}},
    "qwen4_exp": {"text_config": _INDEXER},
    "qwen4_exp_text": _INDEXER,
}
"""What configurations have beside defaults, where these leave out a kind of layer, or cannot be built."""

Row = dict[str, Any]


def main() -> None:
    parser = measuring.parser_of(__doc__, json_file=True)
    parser.add_argument("types", nargs="*", help="default: all")
    parser.add_argument("--markdown", type=Path, help="also write the tables to this file")
    arguments = parser.parse_args()
    transformers.utils.logging.set_verbosity_error()
    torch.set_num_threads(1)
    rows = []
    for task, model_type in models():
        if not arguments.types or model_type in arguments.types:
            rows.append(row_of(task, model_type))
            print(f"{model_type}, {task}: {', '.join(rows[-1][one]['verdict'] for one in ATTENTION)}", flush=True)
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    measuring.write_report({"versions": versions, "counts": counts_of(rows), "rows": rows}, arguments.json)
    if arguments.markdown:
        arguments.markdown.write_text(markdown(rows))
    wrong = [f"{row['type']}, {row['task']}: {problem}" for row in rows for problem in disagreements(row)]
    print("\n".join(f"DISAGREEMENT: {line}" for line in wrong), file=sys.stderr)
    sys.exit(1 if wrong else 0)


def models() -> list[tuple[str, str]]:
    """Returns the task and the type of each language model of the installed transformers."""
    by_task = {"causal": MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, "masked": MODEL_FOR_MASKED_LM_MAPPING_NAMES}
    return [(task, model_type) for task, names in by_task.items() for model_type in sorted(names)]


def row_of(task: str, model_type: str) -> Row:
    """Returns what the proof and the oracle find for one type, by attention."""
    row: Row = {"type": model_type, "task": task}
    for attention in ATTENTION:
        try:
            model = built(task, model_type, attention)
        except Exception as error:
            verdict = "not offered" if NOT_OFFERED in str(error) else "not built"
            row[attention] = {"verdict": verdict, "problem": in_a_line(error)}
            continue
        row |= {"class": type(model).__name__, "parameters": sum(one.numel() for one in model.parameters())}
        row[attention] = found_of(model, task)
    return row


def built(task: str, model_type: str, attention: str) -> Any:
    """Returns a tiny copy in training mode without dropout. Raises: whatever transformers raises; ConfigError."""
    auto = AutoModelForCausalLM if task == "causal" else AutoModelForMaskedLM
    config = CONFIG_MAPPING[model_type](**settings_of(model_type))
    if task == "causal" and model_type in MODEL_FOR_MASKED_LM_MAPPING_NAMES and not config.is_encoder_decoder:
        config.is_decoder = True
    torch.manual_seed(0)
    return tiny_model(
        lambda config: auto.from_config(without_dropout(config), attn_implementation=attention).train(),
        text_configuration(config, auto._model_mapping),
    )


def settings_of(model_type: str) -> dict[str, Any]:
    """Returns `SETTINGS` with kinds of layers for all layers."""
    settings = dict(SETTINGS.get(model_type, {}))
    if "layer_types" in settings:
        layers = range(CONFIG_MAPPING[model_type]().num_hidden_layers)
        settings["layer_types"] = [kind for kind, _ in zip(itertools.cycle(settings["layer_types"]), layers)]
    return settings


def without_dropout(config: Any) -> Any:
    for name, value in vars(config).items():
        if isinstance(value, float) and re.search("drop|jitter", name):
            setattr(config, name, 0.0)
        elif hasattr(value, "to_dict"):
            without_dropout(value)
    return config


def found_of(model: Any, task: str) -> Row:
    """Returns the verdict of the proof, and how far the loss of packs is from that of their documents alone."""
    found = find_isolation(
        copy.deepcopy(model),
        causal=task == "causal",
        max_sequence_length=PACK_LENGTH,
        slots=PACKS_PER_STEP * PACK_LENGTH,
        own_loss=task == "causal",
    )
    if found.isolated and found.inputs is not None:
        first = {"first_position": found.inputs.first_position}
        verdict = f"isolated, {found.inputs.mask} mask".replace("none", "no")
        return {"verdict": verdict, **first, **oracle(model, found.inputs)}
    problems = [f"{attempt.mask} mask: {attempt.problem}" for attempt in found.attempts] or [found.reason]
    least = {} if found.inputs is None else oracle(model, found.inputs)
    verdict = "cannot tell" if {attempt.verdict for attempt in found.attempts} == {"cannot tell"} else "refused"
    return {"verdict": verdict, **least, "problem": "; ".join(problems)}


def oracle(model: Any, inputs: ModelInputs) -> Row:
    """Returns differences to the documents alone, of the loss that is trained and of the worst token's, or an error."""
    batch = packs(causal=inputs.causal)
    model = copy.deepcopy(model)  # after a short row BigBird attends otherwise to long ones
    try:
        with torch.no_grad():
            slots, labels = targets_of(batch)
            given = inputs(batch)
            output = model(**{name: value for name, value in given.items() if "labels" not in name})
            packed = F.cross_entropy(output["logits"][0, slots].float(), labels, reduction="none")
            total = packed.sum()
            if inputs.causal:
                total = model(**given, num_items_in_batch=len(labels))["loss"] * len(labels)
            alone = losses_alone(model, batch, slots, labels)
    except Exception as error:
        return {"fails": in_a_line(error)}
    return {
        "loss": float((total - alone.sum()).abs() / alone.sum()),
        "token": float((packed - alone).abs().max() / alone.max()),
    }


def packs(*, causal: bool) -> PackedBatch:
    """Returns the packs of a step as a Loader makes them."""
    low, high = TOKENS
    random = np.random.default_rng(1)
    documents = [random.integers(low, high, length) for length in DOCUMENT_LENGTHS]
    masks = evenpack.RandomMasks(mask_token=high, special_tokens=range(low), vocabulary_size=high + 1)
    loader = evenpack.Loader(
        documents,
        pack_length=PACK_LENGTH,
        packs_per_step=PACKS_PER_STEP,
        objective=None if causal else masks,
        arrays="torch",
    )
    return loader[0]


def targets_of(batch: PackedBatch) -> tuple[Tensor, Tensor]:
    """Returns the slots that predict, and what."""
    (targets,) = batch.targets.values()
    if isinstance(targets, SlotTargets):
        (slots,) = torch.nonzero(targets.weights, as_tuple=True)
        return slots, targets.labels[slots]
    assert isinstance(targets, ChosenTargets)
    used = targets.weights > 0
    return targets.positions[used], targets.labels[used]


def losses_alone(model: Any, batch: PackedBatch, slots: Tensor, labels: Tensor) -> Tensor:
    """Returns the loss of each target where each document is a call of its own, as the model runs by itself."""
    logits = torch.zeros(batch.slots, 0)
    for start, stop in zip(batch.cu_seqlens[:-1].tolist(), batch.cu_seqlens[1:].tolist(), strict=True):
        if ((slots >= start) & (slots < stop)).any():
            output = model(input_ids=batch.tokens[None, start:stop], **without_cache(model))["logits"][0].float()
            logits = logits if logits.shape[1] else torch.zeros(batch.slots, output.shape[1])
            logits[start:stop] = output
    return F.cross_entropy(logits[slots], labels, reduction="none")


def disagreements(row: Row) -> list[str]:
    """Returns where the oracle contradicts the proof."""
    lines = []
    for attention in ATTENTION:
        found = row[attention]
        is_equal = found.get("loss", 1.0) <= MOST_OF_LOSS and found.get("token", 1.0) <= MOST_OF_TOKEN
        if is_equal != found["verdict"].startswith("isolated") and found["verdict"] != "cannot tell":
            what = f"loss {found['loss']:.1e}, worst token {found['token']:.1e}" if "loss" in found else found["fails"]
            lines.append(f"{attention}: {found['verdict']}, but beside documents alone: {what}")
    return lines


def counts_of(rows: Sequence[Row]) -> dict[str, list[int]]:
    """Returns how many types have each verdict: decoders on SDPA and eager attention, then encoders."""
    return {
        verdict: [sum(row["task"] == task and row[one]["verdict"] == verdict for row in rows) for task, one in COLUMNS]
        for verdict in VERDICTS
    }


def markdown(rows: Sequence[Row]) -> str:
    """Returns counts of verdicts, and a table of all types."""
    heads = [f"{'decoders' if task == 'causal' else 'encoders'}, {attention}" for task, attention in COLUMNS]
    lines = [f"| verdict | {' | '.join(heads)} |", f"|{' --- |' * (1 + len(heads))}"]
    for verdict, counts in counts_of(rows).items():
        lines.append(f"| {verdict} | {' | '.join(map(str, counts))} |")
    lines += [
        "",
        "| type | class | sdpa | eager | loss | worst token | why |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        found = [row[attention] for attention in ATTENTION]
        numbers = [max((one[name] for one in found if name in one), default=None) for name in ("loss", "token")]
        why = next((one["problem"] for one in found if one["verdict"] in ("refused", "cannot tell", "not built")), "")
        cells = [row["type"], row.get("class", "-"), *(one["verdict"] for one in found)]
        cells += ["-" if number is None else f"{number:.0e}" for number in numbers]
        lines.append(f"| {' | '.join([*cells, why])} |")
    return "\n".join([*lines, ""])


def in_a_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


if __name__ == "__main__":
    main()
