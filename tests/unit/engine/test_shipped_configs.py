"""Shipped run files for GPUs divide, fit by the estimate, follow one another, and are what their headers say."""

import json
import math
import re
from fractions import Fraction
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from repository import CONFIGS, ROOT
from run_files import prepared

from evenpack.config import load_run_file
from evenpack.data.packing import pack
from evenpack.data.sequences.masking import masked_count
from evenpack.differences import differences
from evenpack.engine.config import RunConfig
from evenpack.engine.deepspeed_config import deepspeed_config
from evenpack.engine.memory.estimate import MicroBatchSize, training_memory
from evenpack.engine.resolving.data_facts import AverageItem, DataFacts
from evenpack.engine.resolving.settle import settle
from evenpack.errors import ConfigError
from evenpack.launcher.planning import plan_training
from evenpack.models.cost import parameter_count
from evenpack.studies.lengths.reading import published_histogram

GPUS = 8
GPU_BYTES = 80e9
BERT_VOCABULARY = 30_522
SPRINT = "bert_large_phase2_sprint"
BERT = [f"bert_{size}_{phase}" for size in ("base", "large") for phase in ("phase1", "phase2", "phase2_384")] + [SPRINT]
MLPERF = {
    "mlperf/bert_large_packed": 768,
    "mlperf/bert_large_unpadded_768": 768,
    "mlperf/bert_large_padded_768": 768,
    "mlperf/bert_large_unpadded": 448,
    "mlperf/bert_large_padded": 448,
    "mlperf/bert_large_packed_64": 3072,
}
"""The batch for which learning rate, betas and steps were chosen."""


def load(name: str, overrides: list[str] | None = None) -> RunConfig:
    return load_run_file(CONFIGS / f"{name}.yaml", RunConfig, overrides or [])


def text_of(name: str) -> str:
    return (CONFIGS / f"{name}.yaml").read_text()


def padded_twin(name: str) -> RunConfig:
    """Returns the run with the overrides that the file's header names."""
    (line,) = re.findall(r"^# Padded twin, the same sequences in each step: (.+)$", text_of(name), re.MULTILINE)
    return load(name, line.split())


@cache
def packing_factor(length: int, depth: int) -> float:
    """Returns the packing factor of Wikipedia, for whose lengths the run files are written."""
    histogram = published_histogram(f"wikipedia_{length}")
    return pack(histogram, algorithm="auto", pack_length=length, max_sequences_per_pack=depth).packing_factor


def factor_of(config: RunConfig) -> float:
    depth = config.data.packing.max_sequences_per_pack
    assert depth is not None
    return packing_factor(config.data.pack_length, depth)


def settled(config: RunConfig) -> RunConfig:
    """Returns the run as it is over Wikipedia; the tokens of a pack decide nothing of it."""
    item = AverageItem(sequences=Fraction(factor_of(config)), tokens=Fraction(1), row_slots=config.data.pack_length)
    return settle(config, DataFacts(item=item, items_per_epoch=None, vocabulary_size=BERT_VOCABULARY)).config


def peak_bytes(config: RunConfig, *, slots: float, share: float, vocabulary: int, ranks: int = GPUS) -> int:
    """Returns the peak of a micro-batch of so many slots, a share of which is predicted."""
    size = MicroBatchSize(slots=round(slots), head_rows=math.ceil(share * slots))
    return training_memory(config, size, vocabulary_size=vocabulary, ranks=ranks).peak.total


@pytest.mark.parametrize("name", BERT)
def test_eight_gpus_divide_a_step_of_bert_packed_and_padded(name: str) -> None:
    for config in (load(name), padded_twin(name)):
        training = settled(config).training
        assert training.micro_batches(GPUS) * GPUS * training.packs_per_micro_batch == training.packs_per_step
        assert deepspeed_config(settled(config), GPUS)["train_batch_size"] == training.packs_per_step
        meant = 768 if name == SPRINT else config.training.packs_per_step
        sequences = training.packs_per_step * factor_of(config)
        assert sequences == pytest.approx(meant, rel=0.01), "the batch that the learning rate was chosen for"


def test_each_run_file_of_mlperf_is_held_here() -> None:
    assert {f"mlperf/{path.stem}" for path in (CONFIGS / "mlperf").glob("*.yaml")} == MLPERF.keys()


@pytest.mark.parametrize("name", MLPERF)
def test_gpus_divide_a_step_of_mlperf_fit_and_have_the_rules_target(name: str) -> None:
    config, ranks = load(name), 64 if name.endswith("_64") else GPUS
    training = config.training
    assert training.micro_batches(ranks) >= 1
    per_item = factor_of(config) if training.batching == "packs" else 1.0
    assert training.items_per_step * per_item == pytest.approx(MLPERF[name], rel=0.01)
    assert (training.target_accuracy, training.evaluate_every_samples) == (0.72, "mlperf")
    slots = training.items_per_micro_batch * config.data.pack_length
    assert peak_bytes(config, slots=slots, share=0.15, vocabulary=BERT_VOCABULARY, ranks=ranks) < 2 / 3 * GPU_BYTES


def test_a_second_phase_at_512_trains_on_as_many_pairs_whatever_the_model() -> None:
    """NVIDIA's recipe, and PackedBERT's; the sprint is MLPerf's, from a model that has nearly converged."""
    pairs = {}
    for name in ("bert_base_phase2", "bert_large_phase2", SPRINT):
        config = settled(load(name))
        assert config.training.steps is not None
        pairs[name] = config.training.packs_per_step * factor_of(config) * config.training.steps
    assert pairs["bert_base_phase2"] == pairs["bert_large_phase2"] == pytest.approx(51.2e6, rel=0.01)
    assert pairs[SPRINT] == pytest.approx(2.83e6, rel=0.01)


@pytest.mark.parametrize("name", BERT)
def test_the_padded_twin_differs_in_layout_and_micro_batch_alone(name: str) -> None:
    changed = differences(load(name).model_dump(mode="json"), padded_twin(name).model_dump(mode="json"))
    assert changed["training.layout"] == ("packed", "padded")
    assert changed.keys() <= {"training.layout", "training.packs_per_micro_batch"}


@pytest.mark.parametrize("layout", ["padded", "unpadded"])
def test_a_twin_of_mlperfs_packed_run_differs_in_its_layout_alone(layout: str) -> None:
    packed, twin = load("mlperf/bert_large_packed"), load(f"mlperf/bert_large_{layout}_768")
    changed = differences(packed.model_dump(mode="json"), twin.model_dump(mode="json"))
    assert changed.pop("training.layout") == ("packed", layout)
    assert changed.keys() == {
        *("run.name", "run.output_dir", "training.batching"),
        *(f"training.{kind}_per_{of}" for kind in ("packs", "sequences") for of in ("step", "micro_batch")),
    }


@pytest.mark.parametrize("name", BERT)
def test_micro_batches_of_bert_leave_a_third_of_the_gpu_free_and_fill_it(name: str) -> None:
    """An average micro-batch of single rows has more slots than one of packs, by the sequences per pack."""
    packed, padded = load(name), padded_twin(name)
    for config, rows in ((packed, 1.0), (padded, factor_of(padded)), (packed, 8.0)):
        slots = rows * config.training.packs_per_micro_batch * config.data.pack_length
        peak = peak_bytes(settled(config), slots=slots, share=0.15, vocabulary=BERT_VOCABULARY)
        assert (peak < 2 / 3 * GPU_BYTES) == (rows < 8.0)


@pytest.mark.parametrize("size", ["base", "large"])
def test_phase_2_takes_what_phase_1_leaves(size: str) -> None:
    first = load(f"bert_{size}_phase1")
    assert first.training.initialize_from is None
    for name in [name for name in BERT if name.startswith(f"bert_{size}_phase2")]:
        second = load(name)
        assert second.training.initialize_from == first.run.output_dir
        assert second.model == first.model
        assert second.data.tokenizer == first.data.tokenizer
        assert first.model.max_positions is not None
        assert first.model.max_positions >= second.positions_needed == second.data.pack_length


@pytest.mark.parametrize(
    ("name", "vocabulary", "share"),
    [("llama_160m", 32_000, 2 / 3), ("llama_1.1b", 32_000, 2 / 3), ("llama_8b", 128_256, 3 / 4)],
)
def test_llama_on_eight_gpus_divides_and_fits(name: str, vocabulary: int, share: float) -> None:
    config = load(name)
    parameters = parameter_count(config.model, vocabulary_size=vocabulary, max_positions=config.positions_needed)
    assert f"{parameters:,} parameters" in text_of(name)
    assert config.training.micro_batches(GPUS) > 1
    slots = config.training.packs_per_micro_batch * config.data.pack_length
    assert GPU_BYTES / 8 < peak_bytes(config, slots=slots, share=1.0, vocabulary=vocabulary) < share * GPU_BYTES


@pytest.mark.parametrize("name", ["modernbert_base", "modernbert_base_8192"])
def test_modernbert_masks_its_share_and_needs_the_memory_of_its_page(name: str) -> None:
    config = load(name)
    sizes = {"vocabulary_size": 50_368, "max_positions": config.positions_needed}
    assert f"({parameter_count(config.model, **sizes):,} parameters" in text_of(name)
    assert config.training.micro_batches(GPUS) >= 1
    longest = config.data.recipe.max_sequence_length
    assert masked_count(np.array([longest]), config.masking, 2) == round(0.3 * longest)
    slots = config.training.packs_per_micro_batch * config.data.pack_length
    peak = peak_bytes(config, slots=slots, share=config.masking.share, vocabulary=50_368)
    assert f"of {slots:,} slots is {peak / 1e9:.1f} GB per GPU" in (ROOT / "docs/modernbert.md").read_text()


@pytest.mark.parametrize(
    ("name", "most"), [("modernbert_base", 306), ("modernbert_mini_wiki", 75), ("bert_mini_wiki", 18)]
)
def test_a_limit_that_would_mask_less_than_the_share_is_refused(name: str, most: int) -> None:
    """76 at 512 tokens and 15 %, which are 76.8, is the published BERT's, and no cut."""
    with pytest.raises(ConfigError, match=rf"set masking.max_predictions={most + 1} or more, or masking.share=0"):
        load(name, [f"masking.max_predictions={most}"])
    load(name, [f"masking.max_predictions={most + 1}"])


def test_a_dry_run_plans_llama_8b_on_eight_gpus(tmp_path: Path) -> None:
    text = tmp_path / "web.jsonl"
    text.write_text("".join(json.dumps({"text": "abcdefgh" * 1100}) + "\n" for _ in range(40)))
    overrides = {
        "data.sources.web.path": text,
        "data.tokenizer": "{kind: train, vocabulary_size: 260}",
        "data.validation_fraction": "0.1",
        "data.prepared_dir": tmp_path / "data",
    }
    plan = plan_training(prepared(load("llama_8b", [f"{key}={value}" for key, value in overrides.items()])), ranks=GPUS)
    assert (plan.step.micro_batches, plan.step.slots_per_micro_batch) == (16, 2 * 8192)
    assert plan.cost.parameters == 8_030_261_248 - 2 * 4096 * (128_256 - 260)
    assert plan.start.deepspeed["zero_optimization"]["stage"] == 3
    assert plan.memory.total < 0.75 * GPU_BYTES
