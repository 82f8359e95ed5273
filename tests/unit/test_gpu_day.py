"""The first day on a GPU: steps are remembered, failures stop no other step, corpora have the published lengths."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from repository import ROOT

from evenpack.studies.lengths.published import published_histogram

sys.path.insert(0, str(ROOT / "benchmarks"))

from gpu_day.corpus import RUNS, published_lengths, run_values
from gpu_day.install import missing, name_of, required
from gpu_day.profile_step import by_category, category_of
from gpu_day.report import write_report
from gpu_day.runner import Day, Step, table
from gpu_day.steps import Plan, steps_of

NINE_MINUTES = 540.0


def python(name: str, code: str, *, limit_seconds: float = 60.0, needs: tuple[str, ...] = ()) -> Step:
    return Step(name=name, command=(sys.executable, "-c", code), limit_seconds=limit_seconds, needs=needs)


def adds_a_line(path: Path) -> str:
    return f"open({str(path)!r}, 'a').write('x\\n')"


def test_a_failing_step_is_recorded_and_the_others_go_on(tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    steps = (
        python("fails", "print('why'); raise SystemExit(3)"),
        python("depends", "raise AssertionError", needs=("fails",)),
        python("hangs", "import time; time.sleep(60)", limit_seconds=0.5),
        python("works", adds_a_line(ran)),
        Step(name="is not there", command=("/nowhere/at/all",), limit_seconds=1.0),
    )
    day = Day(tmp_path)
    assert not day.run(steps, limit_seconds=1000.0, environment={})
    found = {name: (one.status, one.exit_code) for name, one in day.results.items()}
    assert found == {
        "fails": ("failed", 3),
        "depends": ("left out", None),
        "hangs": ("timed out", None),
        "works": ("done", 0),
        "is not there": ("failed", None),
    }
    assert "why" in day.log_of("fails").read_text()
    assert day.results["depends"].reason == "needs fails"
    shown = table(steps, day.results)
    assert "| hangs | timed out |" in shown
    assert "| works | done |" in shown


def test_a_second_start_goes_on_and_tries_again_what_failed(tmp_path: Path) -> None:
    ran, flag = tmp_path / "ran", tmp_path / "flag"
    steps = (
        python("first", adds_a_line(ran)),
        python("second", f"import os; raise SystemExit(not os.path.exists({str(flag)!r}))", needs=("first",)),
        python("third", adds_a_line(ran), needs=("second",)),
    )
    assert not Day(tmp_path).run(steps, limit_seconds=1000.0, environment={})
    flag.touch()
    assert Day(tmp_path).run(steps, limit_seconds=1000.0, environment={})
    assert ran.read_text() == "x\nx\n"  # the first step ran once
    assert Day(tmp_path).run(steps, limit_seconds=0.0, environment={})


def test_no_step_begins_that_could_end_after_the_day(tmp_path: Path) -> None:
    steps = (python("long", "", limit_seconds=100.0), python("short", "", limit_seconds=5.0))
    day = Day(tmp_path)
    assert not day.run(steps, limit_seconds=50.0, environment={})
    assert (day.results["long"].status, day.results["short"].status) == ("left out", "done")
    assert "start again" in day.results["long"].reason


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_steps_are_within_nine_minutes_and_need_only_what_comes_before(device: str, tmp_path: Path) -> None:
    plan = Plan(directory=tmp_path, device=device, is_tiny=device == "cpu", installs=True, wheels=tmp_path)
    steps = steps_of(plan)
    names = [step.name for step in steps]
    assert len(set(names)) == len(names)
    assert not [name for name in names if "," in name]  # --only takes names with commas between them
    for place, step in enumerate(steps):
        assert 0 < step.limit_seconds <= NINE_MINUTES
        assert set(step.needs) <= set(names[:place])
    assert steps[0].command[-2:] == ("--wheels", str(tmp_path))
    for kernel in ("varlen", "flash", "flex", "sdpa") if device == "cuda" else ("sdpa",):
        assert f"throughput bert_large_phase2 {kernel}" in names
    (kernel,) = [step for step in steps if step.name.startswith("throughput bert_large_phase2 sdpa")]
    assert {"attention.backend=sdpa", "model.attention_dropout=0"} <= set(kernel.command)


def test_the_first_step_is_listed_by_a_python_without_packages() -> None:
    command = [sys.executable, "-S", "-E", str(ROOT / "scripts/gpu_day"), "--list", "--wheels", str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("install ")
    refused = subprocess.run([*command[:-1], "/nowhere/at/all"], capture_output=True, text=True, check=False)
    assert (refused.returncode, "is no folder" in refused.stderr) == (2, True)
    unknown = subprocess.run([*command, "--only", "corpora,lunch"], capture_output=True, text=True, check=False)
    assert (unknown.returncode, "no such step: lunch" in unknown.stderr) == (2, True)


def test_only_missing_packages_are_installed_and_never_another_torch() -> None:
    assert missing(["numpy>=2", "no-such-package-as-this[x]>=1", "torch>=99"]) == ["no-such-package-as-this[x]>=1"]
    assert [name_of(one) for one in ("numpy>=2", "evenpack[docs]", "rich")] == ["numpy", "evenpack", "rich"]
    assert {"deepspeed", "h5py", "matplotlib", "pytest"} <= {name_of(one) for one in required()}


@pytest.mark.parametrize(("name", "count"), [("wikipedia_512", 5000), ("wikipedia_2048", 3000)])
def test_corpora_have_the_published_lengths(name: str, count: int) -> None:
    lengths, counts = published_lengths(name, count), published_histogram(name).counts
    every = 1 + np.arange(len(counts))
    for power in (1, 2):
        published = float((counts * every**power).sum() / counts.sum())
        assert float((lengths.astype(np.float64) ** power).mean()) == pytest.approx(published, rel=0.01)
    assert lengths.max() == len(counts)


@pytest.mark.parametrize("name", RUNS)
def test_runs_of_the_day_keep_the_sizes_of_the_shipped_ones(name: str, tmp_path: Path) -> None:
    values, tiny = run_values(name, tmp_path, tiny=False), run_values(name, tmp_path, tiny=True)
    assert values["training"]["precision"] == "bf16_autocast"
    assert values["training"]["packs_per_step"] == values["training"]["packs_per_micro_batch"] >= 4
    assert "initialize_from" not in values["training"]
    assert (tiny["model"]["preset"], values["model"]["preset"] == "tiny") == ("tiny", False)


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


def test_seconds_are_added_up_by_category() -> None:
    found = by_category([("aten::mm", 1.0), ("aten::addmm", 2.0), ("aten::gelu", 4.0)])
    assert found == {
        "communication": 0.0,
        "attention": 0.0,
        "memory copies": 0.0,
        "optimizer": 0.0,
        "matmul": 3.0,
        "elementwise": 4.0,
    }


def test_the_report_holds_what_there_is_and_names_what_failed(tmp_path: Path) -> None:
    for folder in ("results", "figures"):
        (tmp_path / folder).mkdir()
    law = {"location": 1.9, "scale": 0.3}
    values = {"fitted": law, "published": law, "fitted_distance": 0.02, "published_distance": 0.03}
    (tmp_path / "results/law_of_one_device.json").write_text(json.dumps(values))
    (tmp_path / "figures/one.png").write_bytes(b"png")
    steps = (python("fails", "raise SystemExit(1)"),)
    day = Day(tmp_path)
    day.run(steps, limit_seconds=1000.0, environment={})
    page = write_report(tmp_path / "out/h100", tmp_path, steps, day.results, command="scripts/gpu_day")
    assert "| fitted | 1.900 | 0.300 | 2.0 % |" in page
    assert "| fails | failed |" in page
    assert page.count("Not measured.") == 3
    assert json.loads((tmp_path / "out/h100.json").read_text())["steps"]["fails"]["exit_code"] == 1
    assert (tmp_path / "out/h100_one.png").read_bytes() == b"png"
