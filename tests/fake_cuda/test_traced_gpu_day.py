"""What only a GPU runs of the GPU day, on a CUDA device that does not exist: events, streams, counters, profiles."""

import json
import os
import subprocess
import sys
from collections import Counter

import pytest
from fake_gpu.device import DEVICE_NAME, compile_hooks, why_not_here
from gpu_day_values import check_checks, check_design, check_law, check_profile
from repository import ROOT

from evenpack.kernels.cross_entropy import default_chunk_tokens

_reason = why_not_here()
if _reason is not None:  # one line for all of them
    pytest.skip(_reason, allow_module_level=True)

PATHS = os.pathsep.join(str(ROOT / folder) for folder in (".", "benchmarks", "tests"))


@pytest.fixture(scope="module")
def day(tmp_path_factory):
    """The values of each program, and what it asked of the device."""
    folder = tmp_path_factory.mktemp("day")
    environment = {**os.environ, "PYTHONPATH": PATHS, "OMP_NUM_THREADS": "1"}

    def run(*words):
        done = subprocess.run([sys.executable, *words], env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    run(str(ROOT / "benchmarks/gpu_day/corpus.py"), str(folder), "gpt2_small", "--tiny")
    library = compile_hooks(ROOT / "build/fake_cuda")
    program = str(ROOT / "tests/fake_cuda/gpu_day_process.py")
    said = run(program, str(library), str(folder), str(folder / "run_files/gpt2_small.yaml"))
    values = {path.stem: json.loads(path.read_text()) for path in folder.glob("*.json")}
    return values, json.loads(said.splitlines()[-1])


def test_devices_and_dtypes_are_not_mixed(day):
    assert day[1]["faults"] == []


def test_questions_of_design_are_timed_by_events_and_weighed_by_the_peak_of_memory(day):
    values, said = day
    design, asked = values["design"], said["asked"]["design"]
    check_design(design, on_gpu=True)
    assert design["ceilings"][0]["value"] == pytest.approx(2 * 8192**3 / 2e-3 / 1e12)  # events are 2 ms apart
    assert design["ceilings"][1]["value"] == pytest.approx(2 * 4 * 2**29 / 2e-3 / 1e12)
    assert {row["compiled"] for row in design["loss"]} == {False, True}
    chunks = {row["chunk_bytes"] // (4 * row["vocabulary"]) for row in design["loss"]}
    assert {default_chunk_tokens("cuda", 50_257)} < chunks
    weighed = [row for rows in design.values() for row in rows if "megabytes" in row]
    assert {(row["milliseconds"], row["megabytes"]) for row in weighed} == {(2.0, 7.0)}  # of 10 MB 3 were there before
    counters = [one for one in asked if one != "elapsed_time"]
    assert counters == len(weighed) * ["reset_peak_memory_stats", "memory_allocated", "max_memory_allocated"]
    timed = [name for rows in design.values() for row in rows for name in row if name == "value" or "gradient" in name]
    assert Counter(asked)["elapsed_time"] > len(timed)


def test_waits_are_counted_by_torch_s_own_mode_and_copies_go_beside_a_product(day):
    values, said = day
    check_checks(values["checks"], steps=2, on_gpu=True)
    assert values["checks"]["device"] == DEVICE_NAME
    asked = Counter(said["asked"]["checks"])
    assert asked["sync_debug_mode warn"] == asked["sync_debug_mode default"] == 2
    assert asked["pin_memory"] > 0
    assert len(said["asked"]["a wait"]) == 1


def test_steps_of_the_law_are_timed(day):
    values, said = day
    check_law(values["law"], steps=2)
    asked = Counter(said["asked"]["law"])
    steps = 2 * (1 + 2)  # two layouts, a first round and two that count
    assert asked["reset_peak_memory_stats"] == asked["max_memory_allocated"] == steps
    assert asked["elapsed_time"] > steps  # each phase of each step


def test_a_profile_counts_kernels_and_neither_operators_nor_regions_around_them(day):
    values, said = day
    check_profile(values["profile_step"], steps=1)
    assert values["profile_step"]["longest"] == [{"kernel": "nvjet_gemm", "seconds": 0.003, "category": "matmul"}]
    assert {"ProfilerActivity.CPU", "ProfilerActivity.CUDA"} <= set(said["asked"]["profile_step"])
