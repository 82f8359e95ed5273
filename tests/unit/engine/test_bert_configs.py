"""BERT's shipped run files for 8 GPUs divide, fit by the estimate, follow one another, and have a padded twin."""

import re
from fractions import Fraction
from functools import cache
from pathlib import Path

import pytest

from evenpack.config import load_run_file
from evenpack.data.packing import pack
from evenpack.differences import differences
from evenpack.engine.config import RunConfig
from evenpack.engine.deepspeed_config import deepspeed_config
from evenpack.engine.memory.estimate import MicroBatchSize, training_memory
from evenpack.engine.memory.phases import PhaseMemory
from evenpack.engine.resolving.data_facts import AverageItem, DataFacts
from evenpack.engine.resolving.settle import settle
from evenpack.models.cost import parameter_count
from evenpack.studies.lengths.reading import published_histogram

ROOT = Path(__file__).parents[3]
GPUS = 8
GPU_BYTES = 80e9
BERT_VOCABULARY = 30_522
PHASES = {"phase1": 128, "phase2": 512, "phase2_384": 384}
SPRINT = "bert_large_phase2_sprint"
NAMES = [*(f"bert_{size}_{phase}" for size in ("base", "large") for phase in PHASES), SPRINT]


def load(name: str, overrides: list[str] | None = None) -> RunConfig:
    return load_run_file(ROOT / "configs" / f"{name}.yaml", RunConfig, overrides or [])


def twin_overrides(name: str) -> list[str]:
    """Returns the overrides that the file's header names."""
    header = (ROOT / "configs" / f"{name}.yaml").read_text()
    (line,) = re.findall(r"^# Padded twin, the same sequences in each step: (.+)$", header, re.MULTILINE)
    return line.split()


def packed_and_twin(name: str) -> tuple[RunConfig, RunConfig]:
    return load(name), load(name, twin_overrides(name))


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


def memory(config: RunConfig) -> PhaseMemory:
    """Returns the peak of an average micro-batch; one of single rows has more slots by the sequences per pack."""
    rows = config.training.packs_per_micro_batch
    slots = rows * config.data.pack_length * (factor_of(config) if config.training.layout == "padded" else 1.0)
    size = MicroBatchSize(slots=round(slots), head_rows=round(slots * 0.15))
    return training_memory(settled(config), size, vocabulary_size=BERT_VOCABULARY, ranks=GPUS).peak


@pytest.mark.parametrize("name", NAMES)
def test_eight_gpus_divide_a_step_packed_and_padded(name: str) -> None:
    for config in packed_and_twin(name):
        adjusted = settled(config)
        assert adjusted.training.micro_batches(GPUS) * GPUS * adjusted.training.packs_per_micro_batch == (
            adjusted.training.packs_per_step
        )
        assert deepspeed_config(adjusted, GPUS)["train_batch_size"] == adjusted.training.packs_per_step
        sequences = adjusted.training.packs_per_step * factor_of(config)
        meant = 768 if name == SPRINT else config.training.packs_per_step
        assert sequences == pytest.approx(meant, rel=0.01), "the batch that the learning rate was chosen for"


def test_a_second_phase_at_512_trains_on_as_many_pairs_whatever_the_model() -> None:
    """NVIDIA's recipe, and PackedBERT's; the sprint is MLPerf's, from a model that has nearly converged."""
    pairs = {}
    for name in ("bert_base_phase2", "bert_large_phase2", SPRINT):
        config = settled(load(name))
        assert config.training.steps is not None
        pairs[name] = config.training.packs_per_step * factor_of(config) * config.training.steps
    assert pairs["bert_base_phase2"] == pairs["bert_large_phase2"] == pytest.approx(51.2e6, rel=0.01)
    assert pairs[SPRINT] == pytest.approx(2.83e6, rel=0.01)


@pytest.mark.parametrize("name", NAMES)
def test_the_padded_twin_differs_in_layout_and_micro_batch_alone(name: str) -> None:
    packed, padded = packed_and_twin(name)
    changed = differences(packed.model_dump(mode="json"), padded.model_dump(mode="json"))
    assert changed["training.layout"] == ("packed", "padded")
    assert changed.keys() <= {"training.layout", "training.packs_per_micro_batch"}


@pytest.mark.parametrize("name", NAMES)
def test_micro_batches_leave_a_third_of_the_gpu_free_by_the_estimate(name: str) -> None:
    packed, padded = packed_and_twin(name)
    for config in (packed, padded):
        assert memory(config).total < 2 / 3 * GPU_BYTES
    keys = ("packs_per_step", "packs_per_micro_batch")
    larger = {key: 8 * getattr(packed.training, key) for key in keys}
    eightfold = packed.model_copy(update={"training": packed.training.model_copy(update=larger)})
    assert memory(eightfold).total > 2 / 3 * GPU_BYTES, "micro-batches are of a size that fills the GPU"


@pytest.mark.parametrize("size", ["base", "large"])
def test_phase_2_takes_what_phase_1_leaves(size: str) -> None:
    first = load(f"bert_{size}_phase1")
    assert first.training.initialize_from is None
    for name in [name for name in NAMES if name.startswith(f"bert_{size}_phase2")]:
        second = load(name)
        assert second.training.initialize_from == first.run.output_dir
        assert second.model == first.model
        assert second.data.tokenizer == first.data.tokenizer
        assert first.model.max_positions is not None
        assert first.model.max_positions >= second.positions_needed == second.data.pack_length


@pytest.mark.parametrize("name", NAMES)
def test_what_all_have_in_common(name: str) -> None:
    config = load(name)
    assert config.optimizer.kind == "lamb"
    assert (config.training.gradient_clipping, config.training.precision) == (1.0, "bf16_autocast")
    assert (config.model.dropout, config.data.packing.max_sequences_per_pack) == (0.1, 3)
    count = parameter_count(config.model, vocabulary_size=BERT_VOCABULARY, max_positions=512)
    assert count == {"base": 110_106_428, "large": 336_226_108}[name.split("_")[1]]
