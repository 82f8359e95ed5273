"""Masked tokens of documents, without pairs: from text to an exported model, on two ranks."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from forked_ranks import run_ranks
from masked_batches import roughen
from run_files import changed, pair_run_values, prepared, run_config, text_sources
from scored_tokens import masked_token_logits
from tiny_training import never
from transformers import AutoModelForMaskedLM, AutoTokenizer

from evenpack.batch import ChosenTargets, PackedBatch
from evenpack.data.batches.pipeline import StepBatches, training_batches
from evenpack.engine.build import build_at, build_model, find_start
from evenpack.engine.config import RunConfig
from evenpack.engine.evaluate import evaluate_model
from evenpack.engine.reporting.metrics import read_metrics
from evenpack.engine.resolving.resolve import open_run
from evenpack.engine.train import train_in
from evenpack.engine.world.distributed import World
from evenpack.errors import ConfigError
from evenpack.launcher.trained import export_run
from evenpack.models.common.encoder import PackedEncoder
from evenpack.models.huggingface import from_huggingface

LONGEST = 24
RECIPES: dict[str, dict[str, Any]] = {
    "documents": {"kind": "documents", "max_sequence_length": LONGEST},
    "concat": {"kind": "concat", "max_sequence_length": LONGEST},
    "joined": {"kind": "concat", "max_sequence_length": LONGEST, "isolate_documents": False},
}
MODELS: dict[str, dict[str, Any]] = {
    "modernbert": {"kind": "modernbert", "layers": 4, "feed_forward_size": 48, "window": 3},
}
"""Models other than BERT, by the run, whose recipe is `documents`."""
RUNS = (*RECIPES, *MODELS)
TRAINED = ("documents", "modernbert")
LAYOUTS = ("packed", "unpadded", "padded")
SPECIAL = {"[PAD]": 0, "[CLS]": 2, "[SEP]": 3, "[MASK]": 4}
ALONE = World(rank=0, size=1, local_rank=0, device=torch.device("cpu"))


def documents(count: int) -> list[str]:
    """Returns one word again and again, so that what is masked follows from any other; some exceed a sequence."""
    words = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"]
    draw = random.Random(1)
    return [" ".join([draw.choice(words)] * draw.choice((3, 5, 9, 14, 40))) for _ in range(count)]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, RunConfig]:
    """Prepares a run of each recipe, and of each model."""
    folder = tmp_path_factory.mktemp("documents")
    sources = text_sources(folder, {"repeating": documents(200)})
    found = {}
    for name in RUNS:
        values = pair_run_values(
            "bert",
            folder / name,
            data={
                "sources": sources,
                "tokenizer": {"kind": "train_word_pieces", "vocabulary_size": 64},
                "recipe": RECIPES.get(name, RECIPES["documents"]),
                "pack_length": 2 * LONGEST,
                "validation_fraction": 0.1,
            },
            model={"dropout": 0.0, **MODELS.get(name, {"next_sentence": False})},
            training={"steps": 60, "evaluate_every_steps": 60, "checkpoint_every_steps": 60},
            optimizer={"kind": "adamw", "learning_rate": 1e-2},
            schedule={"warmup_steps": 5},
        )
        found[name] = prepared(run_config({**values, "masking": {"share": 0.3, "max_predictions": 12}}))
    return found


def batches(config: RunConfig, layout: str = "packed") -> list[PackedBatch]:
    """Returns the micro-batches of the first two steps on one rank."""
    run = open_run(changed(config, training={"layout": layout}))
    steps = training_batches(run.prepared, run.pipeline_settings(ALONE), start_step=0, stop_step=2)
    return [batch for step in steps if isinstance(step, StepBatches) for batch in step.micro_batches]


def masked(batch: PackedBatch) -> ChosenTargets:
    (name,) = batch.targets
    targets = batch.targets[name]
    assert name == "masked_token"
    assert isinstance(targets, ChosenTargets)
    return targets


def measure(world: World, configs: dict[str, RunConfig]) -> dict[tuple[str, str], tuple[float, torch.Tensor]]:
    """Returns loss and gradient of a step by run and layout, and trains the runs of documents."""
    found = {}
    for name, config in configs.items():
        for layout in LAYOUTS:
            run = build_at(
                find_start(open_run(changed(config, training={"layout": layout, "gradient_clipping": None})), world)
            )
            roughen(run.engine.model)
            (step,) = run.start.batches(stop_step=1)
            assert step.counts.targets > 0
            sums, _, _ = run.engine.compute_gradients(0, step.micro_batches)
            run.engine.reduction.finish()
            loss = world.all_sum(sums["masked_token"].double().sum().view(1)).item()
            gradients = [parameter.grad for parameter in run.engine.model.parameters()]
            found[name, layout] = (loss, torch.cat([one.flatten() for one in gradients if one is not None]))
            run.engine.deepspeed.destroy()
    for name in TRAINED:
        train_in(world, configs[name], stop_requested=never)
    return found


@pytest.fixture(scope="module")
def measured(runs: dict[str, RunConfig]) -> dict[tuple[str, str], tuple[float, torch.Tensor]]:
    first, second = run_ranks(measure, 2, runs)
    for key, (loss, _) in first.items():
        assert second[key][0] == loss
    return first


@pytest.mark.parametrize("recipe", RECIPES)
def test_special_tokens_surround_documents_and_are_never_masked(runs: dict[str, RunConfig], recipe: str) -> None:
    config = runs[recipe]
    run = open_run(config)
    view = run.prepared.view("repeating", "train")
    tokens, firsts = view.read(np.arange(view.count)).tokens, np.cumsum(view.lengths()) - view.lengths()
    assert tokens[0] == SPECIAL["[CLS]"]
    assert np.count_nonzero(tokens == SPECIAL["[CLS]"]) == np.count_nonzero(tokens == SPECIAL["[SEP]"])
    assert (tokens[firsts] != SPECIAL["[CLS]"]).any(), "a long document has pieces that begin with its text"
    for batch in batches(config):
        targets, count = masked(batch), batch.local_counts.targets
        assert not set(targets.labels[:count].tolist()) & set(SPECIAL.values())
        assert targets.weights.tolist() == [1.0] * count + [0.0] * (len(targets.weights) - count)
        counts = batch.local_counts  # each sequence's share is rounded
        assert abs(count - 0.3 * counts.tokens) <= 0.5 * counts.sequences
        assert not batch.token_type_ids.any()


@pytest.mark.parametrize("name", RUNS)
@pytest.mark.slow
def test_every_layout_has_the_same_loss_and_gradient(measured: dict[Any, Any], name: str) -> None:
    loss, gradient = measured[name, "packed"]
    assert gradient.norm() > 0
    for layout in LAYOUTS:
        other_loss, other_gradient = measured[name, layout]
        assert other_loss == pytest.approx(loss, rel=1e-5)
        assert (other_gradient - gradient).norm() <= 1e-5 * gradient.norm()


@pytest.mark.parametrize("name", ["documents", "concat", "modernbert"])
def test_changing_one_document_changes_no_other_logits(runs: dict[str, RunConfig], name: str) -> None:
    run = open_run(runs[name])
    model = build_model(run, torch.device("cpu")).eval()
    roughen(model)
    batch = batches(runs[name])[0]
    first, stop = batch.cu_seqlens[1:3].tolist()
    tokens = batch.tokens.clone()
    tokens[first:stop] = (tokens[first:stop] + 7) % run.prepared.vocabulary_size
    changed_batch = batch.with_tensors(lambda tensor: tokens if tensor is batch.tokens else tensor)
    with torch.no_grad():
        before, after = masked_token_logits(model, batch), masked_token_logits(model, changed_batch)
    inside = (masked(batch).positions >= first) & (masked(batch).positions < stop)
    assert torch.equal(before[~inside], after[~inside])
    with torch.no_grad():
        assert not torch.equal(model.hidden_states(batch)[first:stop], model.hidden_states(changed_batch)[first:stop])


@pytest.mark.slow
@pytest.mark.usefixtures("measured")
@pytest.mark.parametrize("name", TRAINED)
def test_a_run_learns_and_its_export_has_the_same_loss(runs: dict[str, RunConfig], name: str, tmp_path: Path) -> None:
    config = runs[name]
    records = read_metrics(config.run.output_dir / "metrics.jsonl")
    first, last = records[0], records[-1]
    vocabulary = open_run(config).prepared.vocabulary_size
    assert first["loss"] == pytest.approx(np.log(vocabulary), rel=0.2)
    assert last["validation"]["repeating"]["loss"] < np.log(12), "what the frequencies of the words give"
    assert last["validation"]["repeating"]["accuracy"] > 2 / 12
    assert not {"token_loss", "next_sentence_loss"} & first.keys()
    exported = export_run(config, tmp_path / "exported").directory
    ours = from_huggingface(exported)
    assert isinstance(ours, PackedEncoder)
    found = evaluate_model(ours, open_run(config), ALONE)["repeating"]
    assert found.to_json() == pytest.approx(last["validation"]["repeating"], rel=1e-5)
    theirs = AutoModelForMaskedLM.from_pretrained(exported).eval()
    encoded = AutoTokenizer.from_pretrained(exported)("two three four", return_tensors="pt")
    ids = encoded["input_ids"][0].tolist()
    assert (ids[0], ids[-1]) == (SPECIAL["[CLS]"], SPECIAL["[SEP]"])
    with torch.no_grad():
        assert theirs(**encoded).logits.shape == (1, len(ids), vocabulary)


def test_a_model_of_documents_alone_refuses_pairs(runs: dict[str, RunConfig]) -> None:
    pairs = {"recipe": {"kind": "sentence_pairs", "max_sequence_length": LONGEST}}
    with pytest.raises(ConfigError, match=r"modernbert learns from documents or concat"):
        changed(runs["modernbert"], data=pairs)


def test_next_sentences_without_pairs_are_refused_with_what_to_do(runs: dict[str, RunConfig]) -> None:
    with pytest.raises(Exception, match=r"has no pairs of them: set model\.next_sentence=false"):
        changed(runs["documents"], model={"next_sentence": True})
