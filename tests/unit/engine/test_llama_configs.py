"""Llama's shipped run files for 8 GPUs divide, and fit by the estimate."""

from pathlib import Path

import pytest

from evenpack.config import load_run_file
from evenpack.engine.config import RunConfig
from evenpack.engine.memory.estimate import MicroBatchSize, training_memory
from evenpack.models.cost import parameter_count

CONFIGS = Path(__file__).parents[3] / "configs"
GPUS = 8
GPU_BYTES = 80e9
VOCABULARY = 32_000


@pytest.mark.parametrize(("name", "parameters"), [("llama_160m", 162_417_408), ("llama_1.1b", 1_100_048_384)])
def test_a_run_file_for_eight_gpus_divides_and_fits(name: str, parameters: int) -> None:
    config = load_run_file(CONFIGS / f"{name}.yaml", RunConfig)
    sizes = {"vocabulary_size": VOCABULARY, "max_positions": config.positions_needed}
    assert parameter_count(config.model, **sizes) == parameters
    assert f"{parameters:,} parameters" in (CONFIGS / f"{name}.yaml").read_text()
    assert config.training.step_size.micro_batches(GPUS) > 1
    slots = config.training.packs_per_micro_batch * config.data.pack_length
    size = MicroBatchSize(slots=slots, head_rows=slots)
    peak = training_memory(config, size, vocabulary_size=VOCABULARY, ranks=GPUS).peak
    assert GPU_BYTES / 8 < peak.total < 2 / 3 * GPU_BYTES
