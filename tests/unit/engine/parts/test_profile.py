"""Steps of a run are profiled after a warm-up: a trace, and seconds by category."""

import gzip
import json
import logging
from pathlib import Path

import pytest
import torch
from loop_steps import ALONE, step_of

from evenpack.engine.parts.profile import PROFILE, StepProfile, category_of, table_of


def run_steps(folder: Path, *, steps: int | None, trained: int) -> list[str]:
    profile = StepProfile(folder, ALONE, steps)
    for number in range(11, 11 + trained):
        step = step_of(number)
        profile.before_step(step)
        torch.ones(40, 40) @ torch.ones(40, 40)
        profile.after_step(step)
        torch.ones(900, 900) @ torch.ones(900, 900)  # an evaluation, as it were
    profile.ending(step_of(10 + trained))
    return sorted(path.name for path in (folder / PROFILE).glob("*"))


def traces(*steps: int) -> list[str]:
    return [f"step_{step}.trace.json.gz" for step in steps]


def test_the_steps_after_the_warm_up_have_a_trace_and_their_seconds(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="evenpack")
    assert run_steps(tmp_path, steps=2, trained=7) == [*traces(14, 15), "steps_14_to_15.json"]
    value = json.loads((tmp_path / PROFILE / "steps_14_to_15.json").read_text())
    assert (value["steps"], value["device"]) == ([14, 15], ALONE.device_name)
    seconds = value["seconds_per_step"]
    assert 0.0 < seconds["matmul"] <= sum(seconds.values()) <= value["step_seconds"]
    assert value["longest"][0]["seconds"] == max(one["seconds"] for one in value["longest"])
    with gzip.open(tmp_path / PROFILE / "step_15.trace.json.gz") as file:
        names = [event.get("name") for event in json.load(file)["traceEvents"]]
    assert names.count("aten::mm") == 1
    assert table_of(value) in caplog.text
    assert "steps 14 to 15 on rank 0" in caplog.text


def test_a_run_that_ends_early_writes_what_there_is_and_says_if_there_is_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert run_steps(tmp_path / "one", steps=9, trained=4) == [*traces(14), "steps_14_to_14.json"]
    assert run_steps(tmp_path / "unasked", steps=None, trained=6) == []
    assert caplog.text == ""
    assert run_steps(tmp_path / "none", steps=9, trained=3) == []
    assert "nothing was profiled" in caplog.text


@pytest.mark.parametrize(
    ("kernel", "category"),
    [
        ("void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64, 128>>", "attention"),
        ("triton_tem_fused_flex_attention_0", "attention"),
        ("nvjet_tst_256x128_64x4_1x2_h_bz_coopA_TNT", "matmul"),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64", "matmul"),
        ("void at::native::(anonymous namespace)::multi_tensor_apply_kernel<FusedAdamMathFunctor>", "optimizer"),
        ("Memcpy HtoD (Pinned -> Device)", "memory copies"),
        ("ncclDevKernel_AllReduce_Sum_f32_RING_LL", "communication"),
        ("void at::native::vectorized_layer_norm_kernel<float, float>", "elementwise"),
        ("void at::native::unrolled_elementwise_kernel<at::native::direct_copy_kernel_cuda>", "elementwise"),
        ("triton_poi_fused_add_native_layer_norm_1", "elementwise"),
    ],
)
def test_kernels_are_told_apart_by_their_names(kernel: str, category: str) -> None:
    assert category_of(kernel) == category
