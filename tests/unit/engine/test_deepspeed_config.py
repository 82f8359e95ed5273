"""The settings of DeepSpeed are derived from the run file, and no setting is given twice."""

from pathlib import Path
from typing import Any

import pytest
import run_files
from hypothesis import given
from hypothesis import strategies as st
from run_files import run_values

from evenpack.data.order.step_shape import micro_batch_choices
from evenpack.engine.config import RunConfig, TrainingSection
from evenpack.engine.deepspeed_config import deepspeed_config
from evenpack.errors import ConfigError


def run_config(*, deepspeed: dict[str, Any] | None = None, **training: Any) -> RunConfig:
    return run_files.run_config(
        run_values("gpt2", Path("nowhere"), training={"packs_per_step": 24, **training}, deepspeed=deepspeed or {})
    )


def test_batch_sizes_follow_from_the_step_the_micro_batch_and_the_ranks():
    settings = deepspeed_config(run_config(), 4)
    assert settings["train_batch_size"] == 24
    assert settings["train_micro_batch_size_per_gpu"] == 2
    assert settings["gradient_accumulation_steps"] == 3


@pytest.mark.parametrize(
    ("training", "stage", "key", "written"),
    [
        ({"gradient_clipping": None}, 1, "gradient_clipping", 0.0),  # always written: DeepSpeed's default is 1
        ({"gradient_clipping": 0.5}, 1, "gradient_clipping", 0.5),
        ({"gradient_clipping": 0.5}, 0, "gradient_clipping", 0.0),  # the engine clips
        ({}, 0, "zero_optimization", {"stage": 0}),
        ({}, 1, "zero_optimization", {"stage": 1}),
        ({"precision": "fp32"}, 1, "torch_autocast", None),
        (
            {"precision": "bf16_autocast"},  # gradients stay FP32 between ranks
            1,
            "torch_autocast",
            {"enabled": True, "dtype": "bfloat16", "lower_precision_safe_modules": []},
        ),
        ({"precision": "bf16_autocast"}, 1, "bf16", None),
    ],
)
def test_each_setting_is_that_of_the_run_file(training: dict[str, Any], stage: int, key: str, written: Any):
    assert deepspeed_config(run_config(deepspeed={"zero_stage": stage}, **training), 1).get(key) == written


def test_extra_keys_are_added_section_by_section():
    extra = {"wall_clock_breakdown": True, "zero_optimization": {"reduce_bucket_size": 1000}, "csv_monitor": {"a": 1}}
    settings = deepspeed_config(run_config(deepspeed={"zero_stage": 1, "extra": extra}), 1)
    assert settings["wall_clock_breakdown"] is True
    assert settings["csv_monitor"] == {"a": 1}
    assert settings["zero_optimization"] == {"stage": 1, "reduce_bucket_size": 1000}
    assert extra["zero_optimization"] == {"reduce_bucket_size": 1000}, "the run file's own dict stays as it was"


@pytest.mark.parametrize(
    ("extra", "key", "place"),
    [
        ({"train_batch_size": 24}, "train_batch_size", "training.packs_per_step"),
        ({"train_micro_batch_size_per_gpu": 2}, "train_micro_batch_size_per_gpu", "training.packs_per_micro_batch"),
        ({"gradient_accumulation_steps": 2}, "gradient_accumulation_steps", "training.packs_per_step"),
        ({"gradient_clipping": 1.0}, "gradient_clipping", "training.gradient_clipping"),
        ({"bf16": {"enabled": True}}, "bf16", "training.precision"),
        ({"fp16": {"enabled": True}}, "fp16", "training.precision"),
        ({"torch_autocast": {"enabled": True}}, "torch_autocast", "training.precision"),
        ({"optimizer": {"type": "Lamb"}}, "optimizer", "the optimizer: section"),
        ({"scheduler": {"type": "WarmupLR"}}, "scheduler", "the schedule: section"),
        ({"zero_optimization": {"stage": 2}}, "zero_optimization.stage", "deepspeed.zero_stage"),
        ({"timers": {"throughput": {"enabled": True}}}, "timers.throughput", "metrics.jsonl"),
    ],
)
def test_a_key_that_evenpack_derives_is_refused_by_name(extra: dict[str, Any], key: str, place: str):
    with pytest.raises(ConfigError, match=f"'{key}', which evenpack derives: set {place}"):
        deepspeed_config(run_config(deepspeed={"extra": extra}), 1)


@pytest.mark.parametrize(
    ("extra", "key"),
    [
        ({"gradient_allreduce_op": "sum"}, "gradient_allreduce_op"),
        ({"checkpoint": {"writer": {"type": "fast"}}}, "checkpoint"),
        ({"datastates_ckpt": {"host_cache_size": 1}}, "datastates_ckpt"),
        ({"managed_gradient_accumulation": False}, "managed_gradient_accumulation"),
        ({"zero_optimization": {"compute_grad_norm": False}}, "zero_optimization.compute_grad_norm"),
        ({"zero_optimization": {"round_robin_gradients": True}}, "zero_optimization.round_robin_gradients"),
        ({"zero_optimization": {"elastic_checkpoint": True}}, "zero_optimization.elastic_checkpoint"),
        ({"zero_optimization": {"zero_hpz_partition_size": 2}}, "zero_optimization.zero_hpz_partition_size"),
        ({"zero_optimization": {"mics_shard_size": 2}}, "zero_optimization.mics_shard_size"),
    ],
)
def test_a_key_that_would_break_a_guarantee_is_refused(extra: dict[str, Any], key: str):
    with pytest.raises(ConfigError, match=f"'{key}', which must keep its default"):
        deepspeed_config(run_config(deepspeed={"extra": extra}), 1)


@pytest.mark.parametrize("kind", ["adamw", "lamb", "muon"])
@pytest.mark.parametrize("key", ["offload_optimizer", "offload_param", "cpu_offload", "cpu_offload_param"])
def test_nothing_is_offloaded_at_zero_0_by_any_optimizer(kind: str, key: str):
    deepspeed = {"extra": {"zero_optimization": {key: {"device": "cpu"}}}}
    values = run_values("gpt2", Path("nowhere"), optimizer={"kind": kind, "learning_rate": 1e-3}, deepspeed=deepspeed)
    with pytest.raises(ConfigError, match=rf"'zero_optimization\.{key}' at deepspeed\.zero_stage=0, .* {kind}"):
        deepspeed_config(run_files.run_config(values), 1)


def test_a_single_value_in_place_of_a_section_is_refused():
    with pytest.raises(ConfigError, match=r"extra\.zero_optimization must be a section .* found True"):
        deepspeed_config(run_config(deepspeed={"extra": {"zero_optimization": True}}), 1)


def test_ranks_that_cannot_divide_the_step_get_the_numbers_that_can():
    for ranks, parts in {
        8: ("can be 1, 2, 3, 4, 6, 12", "8 ranks can do packs_per_micro_batch 1, 3"),
        5: ("no packs_per_micro_batch helps 5 ranks", "only a new run or a later stage"),
    }.items():
        with pytest.raises(ConfigError, match=rf"{ranks} ranks x .* \(2\) must divide .* \(24\)") as caught:
            deepspeed_config(run_config(), ranks)
        assert all(part in str(caught.value) for part in parts)


@given(step=st.integers(1, 300), micro_batch=st.integers(1, 300), ranks=st.integers(1, 40))
def test_every_rank_gets_the_same_number_of_packs_or_the_step_is_refused(step: int, micro_batch: int, ranks: int):
    training = TrainingSection(packs_per_step=step, packs_per_micro_batch=micro_batch, steps=1)
    if step % (ranks * micro_batch) == 0:
        assert ranks * micro_batch * training.micro_batches(ranks) == step
    else:
        with pytest.raises(ConfigError):
            training.micro_batches(ranks)
    choices = [items for items in range(1, step + 1) if step % (ranks * items) == 0]
    assert micro_batch_choices(step, ranks=ranks) == choices
