"""Shipped run files of Llama and ModernBERT for 8 GPUs divide, fit by the estimate, and are what their header says."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
from run_files import prepared

from evenpack.config import load_run_file
from evenpack.data.sequences.masking import masked_count
from evenpack.engine.config import RunConfig
from evenpack.engine.memory.estimate import MicroBatchSize, training_memory
from evenpack.errors import ConfigError
from evenpack.launcher.planning import plan_training
from evenpack.models.cost import parameter_count

CONFIGS = Path(__file__).parents[3] / "configs"
GPUS = 8
GPU_BYTES = 80e9


@pytest.mark.parametrize(
    ("name", "vocabulary", "parameters", "share"),
    [
        ("llama_160m", 32_000, 162_417_408, 2 / 3),
        ("llama_1.1b", 32_000, 1_100_048_384, 2 / 3),
        ("llama_8b", 128_256, 8_030_261_248, 3 / 4),
    ],
)
def test_a_run_file_for_eight_gpus_divides_and_fits(name: str, vocabulary: int, parameters: int, share: float) -> None:
    config = load_run_file(CONFIGS / f"{name}.yaml", RunConfig)
    sizes = {"vocabulary_size": vocabulary, "max_positions": config.positions_needed}
    assert parameter_count(config.model, **sizes) == parameters
    assert f"{parameters:,} parameters" in (CONFIGS / f"{name}.yaml").read_text()
    assert config.training.micro_batches(GPUS) > 1
    slots = config.training.packs_per_micro_batch * config.data.pack_length
    size = MicroBatchSize(slots=slots, head_rows=slots)
    peak = training_memory(config, size, vocabulary_size=vocabulary, ranks=GPUS).peak
    assert GPU_BYTES / 8 < peak.total < share * GPU_BYTES


@pytest.mark.parametrize("name", ["modernbert_base", "modernbert_base_8192"])
def test_modernbert_masks_its_share_and_needs_the_memory_of_its_page(name: str) -> None:
    config = load_run_file(CONFIGS / f"{name}.yaml", RunConfig)
    sizes = {"vocabulary_size": 50_368, "max_positions": config.positions_needed}
    assert f"({parameter_count(config.model, **sizes):,} parameters" in (CONFIGS / f"{name}.yaml").read_text()
    assert config.training.micro_batches(GPUS) >= 1
    longest = config.data.recipe.max_sequence_length
    assert masked_count(np.array([longest]), config.masking, 2) == round(0.3 * longest)
    slots = config.training.packs_per_micro_batch * config.data.pack_length
    size = MicroBatchSize(slots=slots, head_rows=math.ceil(config.masking.share * slots))
    peak = training_memory(config, size, vocabulary_size=50_368, ranks=GPUS).peak.total
    assert f"of {slots:,} slots is {peak / 1e9:.1f} GB per GPU" in (CONFIGS.parent / "docs/modernbert.md").read_text()


@pytest.mark.parametrize(
    ("name", "most"), [("modernbert_base", 306), ("modernbert_mini_wiki", 75), ("bert_mini_wiki", 18)]
)
def test_a_limit_that_would_mask_less_than_the_share_is_refused(name: str, most: int) -> None:
    """76 at 512 tokens and 15 %, which are 76.8, is the published BERT's, and no cut."""
    with pytest.raises(ConfigError, match=rf"set masking.max_predictions={most + 1} or more, or masking.share=0"):
        load_run_file(CONFIGS / f"{name}.yaml", RunConfig, [f"masking.max_predictions={most}"])
    load_run_file(CONFIGS / f"{name}.yaml", RunConfig, [f"masking.max_predictions={most + 1}"])


def test_a_dry_run_plans_llama_8b_on_eight_gpus(tmp_path: Path) -> None:
    text = tmp_path / "web.jsonl"
    text.write_text("".join(json.dumps({"text": "abcdefgh" * 1100}) + "\n" for _ in range(40)))
    overrides = {
        "data.sources.web.path": text,
        "data.tokenizer": "{kind: train, vocabulary_size: 260}",
        "data.validation_fraction": "0.1",
        "data.prepared_dir": tmp_path / "data",
    }
    file = load_run_file(CONFIGS / "llama_8b.yaml", RunConfig, [f"{key}={value}" for key, value in overrides.items()])
    plan = plan_training(prepared(file), ranks=GPUS)
    assert (plan.step.micro_batches, plan.step.slots_per_micro_batch) == (16, 2 * 8192)
    assert plan.cost.parameters == 8_030_261_248 - 2 * 4096 * (128_256 - 260)
    assert plan.start.deepspeed["zero_optimization"]["stage"] == 3
    assert plan.memory.total < 0.75 * GPU_BYTES
