"""Objectives and denominators of a run file: exact ones, or means over steps."""

from pathlib import Path

import numpy as np
import pytest
from pair_sources import pair_run
from prepared_files import two_sources
from run_files import changed, run_config, run_values
from step_shapes import step_shape

from evenpack.config import validate
from evenpack.data.batches.objectives import DynamicMasks, NextTokens
from evenpack.data.batches.pipeline import evaluation_batches
from evenpack.data.order.step_plan import StepPlanner
from evenpack.data.prepare.prepare import prepare
from evenpack.data.prepared import PreparedData, packed_sources
from evenpack.data.sequences.masking import masked_count
from evenpack.engine.config import RunConfig
from evenpack.engine.resolving.resolve import resolve
from evenpack.losses import StepCounts

PACKS_PER_STEP = 5


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    """Prepares one source, so that steps can form whole epochs."""
    folder = tmp_path_factory.mktemp("pairs")
    config = pair_run(
        folder,
        data={"sources": {"wiki": {"kind": "jsonl", "path": str(folder / "wiki.jsonl")}}},
        training={"packs_per_step": PACKS_PER_STEP, "packs_per_micro_batch": 1},
    )
    prepare(config.data, config.prepared_dir)
    return config


def opened(config: RunConfig, **model: str) -> tuple[RunConfig, PreparedData]:
    config = changed(config, model=model)
    return config, PreparedData.open(config.prepared_dir, config.data)


def counts_of_whole_epochs(config: RunConfig, prepared: PreparedData) -> list[StepCounts]:
    """Returns the counts of as many steps as there are packs: together as many epochs as a step has packs."""
    sources = packed_sources(prepared, "train", seed=config.run.seed)
    objective = resolve(config, prepared).objective
    planner = StepPlanner(sources, [1], shape=step_shape(items_per_step=PACKS_PER_STEP), ranks=1, objective=objective)
    return [planner.plan(step).counts for step in range(sources[0].plan.packs)]


def test_expected_denominators_are_what_steps_hold_on_average(config: RunConfig) -> None:
    """Sequences agree up to rounding; masked tokens up to their rounding to whole ones, per sequence and full pack.

    A sequence of length l has share * l + r masked tokens with |r| <= 1/2 (lengths from 5 on, the maximum is far), a
    full pack of L slots share * L + R. The mean over steps divided by the expected number is therefore
    (share + mean r / mean l) / (share + R / L).
    """
    config, prepared = opened(config, loss_balancing="expected")
    steps = counts_of_whole_epochs(config, prepared)
    expected = resolve(config, prepared).denominators(steps[0])
    assert expected == resolve(config, prepared).denominators(steps[1]), "the same in every step"
    sequences = [step.sequences for step in steps]
    assert len(set(sequences)) > 1
    assert np.mean(sequences) == pytest.approx(expected["next_sentence"], rel=1e-12)
    lengths = prepared.view("wiki", "train").lengths()
    assert lengths.min() >= 5
    share, pack_length = config.masking.share, config.data.pack_length
    of_a_full_pack = 2 * int(masked_count(np.array([48]), config.masking)[0])
    ratio = np.mean([step.targets for step in steps]) / expected["masked_token"]
    at_most = 0.5 / lengths.mean()
    assert (share - at_most) * pack_length / of_a_full_pack <= ratio <= (share + at_most) * pack_length / of_a_full_pack
    assert ratio == pytest.approx(1.0, abs=0.1)


def test_a_mean_over_sequences_is_divided_by_sequences(config: RunConfig) -> None:
    counts = StepCounts(packs=5, sequences=9, tokens=300, targets=41)
    for balancing in ("exact", "expected"):
        run, prepared = opened(config, mlm_reduction="sequence", loss_balancing=balancing)
        denominators = resolve(run, prepared).denominators(counts)
        assert denominators["masked_token"] == denominators["next_sentence"]
        assert (denominators["masked_token"] == 9.0) == (balancing == "exact")
    run, prepared = opened(config)
    exact = resolve(run, prepared).denominators(counts)
    assert exact == {"masked_token": 41.0, "next_sentence": 9.0}


def test_each_model_gets_its_objective(config: RunConfig, corpus: Path, finished: Path) -> None:
    run, prepared = opened(config, mlm_reduction="sequence")
    objective = resolve(run, prepared).objective
    assert isinstance(objective, DynamicMasks)
    assert (objective.seed, objective.masking) == (run.run.seed, run.masking)
    assert objective.masked_token.divided_by == "sequences"
    assert objective.vocabulary.mask_id == prepared.tokenizer.pair_tokens.mask_id
    data = two_sources(corpus)
    values = {**config.model_dump(), "data": data.model_dump(), "model": {"kind": "gpt2", "preset": "tiny"}}
    gpt2 = validate(values, RunConfig, origin="test")
    assert resolve(gpt2, PreparedData.open(finished, data)).objective == NextTokens()


@pytest.mark.parametrize("predicted", ["all", "closing"])
def test_the_recipe_says_whether_padding_is_predicted(corpus: Path, tmp_path: Path, predicted: str) -> None:
    recipe = {"kind": "padding", "max_sequence_length": 32, "atom": 32, "end_of_text_in_loss": predicted}
    run = run_config(run_values("gpt2", tmp_path, data=two_sources(corpus, recipe=recipe, pack_length=32).model_dump()))
    prepare(run.data, tmp_path / "data")
    (source,) = packed_sources(PreparedData.open(tmp_path / "data", run.data), "train", seed=1)[:1]
    objective = resolve(run, PreparedData.open(tmp_path / "data", run.data)).objective
    rows = np.arange(source.view.count)
    lengths = source.view.lengths().astype(np.int64)
    counts = source.view.counts(rows, lengths)
    targets = objective.count_targets(source.view, rows, counts)
    padding = source.view.accounting.padding_slots
    assert padding > 0
    assert targets.sum() == lengths.sum() - counts.segments.sum() - (0 if predicted == "all" else padding)


def test_validation_batches_are_the_same_for_every_seed(config: RunConfig) -> None:
    of_seeds = []
    for seed in (3, 4):
        run, prepared = opened(changed(config, run={"seed": seed}))
        batches = evaluation_batches(
            prepared,
            "wiki",
            objective=resolve(run, prepared).objective,
            shape=step_shape(items_per_micro_batch=4),
            rank=0,
            ranks=1,
            max_packs=None,
            seed=seed,
        )
        of_seeds.append([(batch.tokens.tolist(), batch.targets["masked_token"].labels.tolist()) for batch in batches])
    assert of_seeds[0] == of_seeds[1]
    assert len(of_seeds[0]) > 2
