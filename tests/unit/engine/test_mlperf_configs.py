"""The run files of MLPerf's BERT divide over their GPUs, have the rules' target, and fit by the estimate."""

import pytest
from repository import CONFIGS

from evenpack.config import load_run_file
from evenpack.data.packing import pack
from evenpack.differences import differences
from evenpack.engine.config import RunConfig
from evenpack.engine.memory.estimate import MicroBatchSize, training_memory
from evenpack.studies.lengths.reading import published_histogram

SAMPLES = {
    "bert_large_packed": 768,
    "bert_large_unpadded_768": 768,
    "bert_large_padded_768": 768,
    "bert_large_unpadded": 448,
    "bert_large_padded": 448,
    "bert_large_packed_64": 3072,
}
"""The batch for which learning rate, betas and steps were chosen."""
GPUS = {name: 64 if name.endswith("_64") else 8 for name in SAMPLES}
VOCABULARY = 30_522


def load(name: str) -> RunConfig:
    return load_run_file(CONFIGS / "mlperf" / f"{name}.yaml", RunConfig)


def test_each_run_file_is_held_here() -> None:
    assert {path.stem for path in (CONFIGS / "mlperf").glob("*.yaml")} == GPUS.keys()


@pytest.fixture(scope="module")
def packing_factor() -> float:
    """Returns the packing factor of the published lengths, in packs of up to 3."""
    histogram = published_histogram("wikipedia_512")
    return pack(histogram, algorithm="auto", pack_length=512, max_sequences_per_pack=3).packing_factor


@pytest.mark.parametrize("name", GPUS)
def test_the_gpus_divide_a_step_of_the_samples_that_its_settings_are_for(name: str, packing_factor: float) -> None:
    config = load(name)
    training = config.training
    assert training.micro_batches(GPUS[name]) >= 1
    per_item = packing_factor if training.batching == "packs" else 1.0
    assert training.items_per_step * per_item == pytest.approx(SAMPLES[name], rel=0.01)
    assert training.target_accuracy == 0.72
    assert training.evaluate_every_samples == "mlperf"
    assert config.mlperf is not None
    assert (config.mlperf.submission_benchmark, config.mlperf.submission_division) == ("bert", "closed")
    assert config.run.name == f"mlperf_{name}"


@pytest.mark.parametrize("layout", ["padded", "unpadded"])
def test_a_twin_of_the_packed_run_differs_in_its_layout_alone(layout: str) -> None:
    packed, twin = load("bert_large_packed"), load(f"bert_large_{layout}_768")
    changed = differences(packed.model_dump(mode="json"), twin.model_dump(mode="json"))
    assert changed.pop("training.layout") == ("packed", layout)
    assert changed.keys() == {
        *("run.name", "run.output_dir", "training.batching"),
        *(f"training.{kind}_per_{of}" for kind in ("packs", "sequences") for of in ("step", "micro_batch")),
    }


@pytest.mark.parametrize("name", GPUS)
def test_micro_batches_leave_a_third_of_80_gb_free_by_the_estimate(name: str) -> None:
    config = load(name)
    slots = config.training.items_per_micro_batch * config.data.pack_length
    size = MicroBatchSize(slots=slots, head_rows=round(slots * 0.15))
    assert training_memory(config, size, vocabulary_size=VOCABULARY, ranks=GPUS[name]).peak.total < 2 / 3 * 80e9
