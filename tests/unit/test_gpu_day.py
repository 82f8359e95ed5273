"""The GPU day: values are written when they are known, failures stop no other step, lengths are the published ones."""

import json
import os
import subprocess
import sys
import time
import zipfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gpu_day_values import PART, check_design
from repository import ROOT

from evenpack.studies.lengths.reading import published_histogram

sys.path.insert(0, str(ROOT / "benchmarks"))

from gpu_day import runner
from gpu_day.corpus import RUNS, published_lengths, run_values
from gpu_day.design import TINY, Bench, answer
from gpu_day.install import install_wheels, installed, name_of, required
from gpu_day.report import page
from gpu_day.runner import GRACE_SECONDS, Part, Step, examine_machine, run_part, short_name
from gpu_day.steps import BERT, PART_SECONDS, PARTS, SMALL, XL, Plan, steps_of

NINE_MINUTES = 540.0
FACTS = {
    "command": "scripts/gpu_day A",
    "commit": "abc",
    "date": "2026-11-24",
    "device": "NVIDIA H200",
    "torch": "2.11",
}


def new_part(folder: Path) -> Part:
    for name in ("values", "out"):
        (folder / name).mkdir()
    return Part(prefix=folder / "out/h200_2026-11-24_A", values=folder / "values", facts=FACTS)


def python(name: str, code: str, *, limit_seconds: float = 60.0) -> Step:
    return Step(name=name, command=(sys.executable, "-c", code), limit_seconds=limit_seconds)


def written(part: Part) -> dict[str, Any]:
    value: dict[str, Any] = json.loads(part.file("json").read_text())
    return value


def test_a_failing_step_is_recorded_and_the_others_go_on(tmp_path: Path) -> None:
    part = new_part(tmp_path)
    steps = (
        python("fails", "print('why'); raise SystemExit(3)"),
        python("hangs", "import time; print('before', flush=True); time.sleep(60)", limit_seconds=2.0),
        python("works", "import os; print(os.environ['GIVEN'])"),
        Step(name="is not there", command=("/nowhere/at/all",), limit_seconds=1.0),
    )
    assert not run_part(part, steps, limit_seconds=1000.0, environment={"GIVEN": "to a step"})
    found = {name: (one["status"], one["exit_code"], one["last_line"]) for name, one in written(part)["steps"].items()}
    assert found["fails"] == ("failed", 3, "why")
    assert found["hangs"] == ("timed out", None, "over its limit of 2 s, after: before")
    assert found["works"] == ("done", 0, "to a step")
    assert found["is not there"][:2] == ("failed", None)
    log = part.file("txt").read_text()
    assert log.index("=== fails") < log.index("why") < log.index("=== hangs") < log.index("=== works")
    shown = part.file("md").read_text()
    assert "| hangs | timed out | 2 |" in shown
    assert run_part(part, steps[2:3], limit_seconds=1000.0, environment={"GIVEN": "again"})


def test_a_value_is_written_while_its_step_still_runs(tmp_path: Path) -> None:
    part = new_part(tmp_path)
    waits = f"""
import json, pathlib, time
pathlib.Path({str(part.values)!r}, "design.json").write_text('{{"ceilings": [{{"value": 7.5}}]}}')
page = pathlib.Path({str(part.file("md"))!r})
while not (page.exists() and "7.5" in page.read_text()):
    time.sleep(0.05)
"""
    assert run_part(part, (python("waits for its value", waits),), limit_seconds=1000.0, environment={})
    assert written(part)["results"] == {"design": {"ceilings": [{"value": 7.5}]}}
    assert {name: written(part)[name] for name in FACTS} == FACTS


def test_a_part_ends_in_time_and_a_step_gets_what_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    part = new_part(tmp_path)
    monkeypatch.setattr(runner, "LEAST_SECONDS", 1.0)
    steps = (python("long", "import time; time.sleep(60)", limit_seconds=100.0), python("late", "", limit_seconds=5.0))
    assert not run_part(part, steps, limit_seconds=GRACE_SECONDS + 1.8, environment={})
    long, late = (written(part)["steps"][name] for name in ("long", "late"))
    assert (long["status"], late["status"], late["last_line"]) == (
        "timed out",
        "left out",
        "the part's time is used up",
    )
    assert long["seconds"] < 60


def test_a_step_that_ends_leaves_no_process(tmp_path: Path) -> None:
    part = new_part(tmp_path)
    leaves = "import subprocess, sys; print(subprocess.Popen(['sleep', '600']).pid)"
    run_part(part, (python("leaves one", leaves),), limit_seconds=1000.0, environment={})
    number = int(written(part)["steps"]["leaves one"]["last_line"])
    while _runs(number):  # for ever, if it was not ended
        time.sleep(0.05)


def _runs(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().split()[2] != "Z"  # a zombie, where nobody collects orphans
    except OSError:
        return False


@pytest.mark.parametrize("part", PARTS)
def test_parts_are_within_nine_minutes_and_begin_with_what_they_need(part: str, tmp_path: Path) -> None:
    assert PART_SECONDS < NINE_MINUTES
    prefix, wheels = tmp_path / "h200", tmp_path / "wheels"
    plan = Plan(scratch=tmp_path, prefix=prefix, has_gpu=True, is_tiny=False, installs=True, wheels=wheels)
    steps = steps_of(part, plan)
    names = [step.name for step in steps]
    assert len(set(names)) == len(names)
    assert names[:2] == ["install", "corpora"]
    assert steps[0].command[-4:] == ("--wheels", str(wheels), "--target", str(plan.site))
    assert all(0 < step.limit_seconds < PART_SECONDS for step in steps)
    runs = [name for name in (BERT, SMALL, XL) if any(plan.run_file(name) in step.command for step in steps)]
    assert set(runs) <= set(steps[1].command)
    values = {Path(word).stem for step in steps for word in step.command if word.startswith(str(tmp_path / "values"))}
    assert values == {name.replace(" ", "_") for name in names[2:]} - {"tests_on_the_GPU"}


def test_the_parts_are_ordered_by_their_worth_and_headlines_are_compiled(tmp_path: Path) -> None:
    assert list(PARTS) == ["A", "R", "B", "C"]
    plan = Plan(scratch=tmp_path, prefix=tmp_path, has_gpu=True, is_tiny=False, installs=False, wheels=None)
    steps = {step.name: step.command for step in steps_of("A", plan)}
    headlines = [f"throughput {run} compiled" for run in (SMALL, BERT, XL)]
    assert list(steps)[1:5] == [headlines[0], "tests on the GPU", *headlines[1:]]
    for name in headlines:
        assert "training.compile=true" in steps[name]
        assert not [word for word in steps[name] if word.startswith(("training.packs", "model."))]  # as it is shipped
    assert "--collect-only" not in steps["tests on the GPU"]
    eager = {step.name: step.command for step in steps_of("C", plan)}[f"throughput {SMALL} eager"]
    assert "training.compile=true" not in eager


def test_the_steps_are_listed_by_a_python_without_packages() -> None:
    command = [sys.executable, "-S", "-E", str(ROOT / "scripts/gpu_day"), "A", "C", "--list", "--wheels"]
    done = subprocess.run([*command, str(ROOT)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("A  install ")
    assert {line[0] for line in lines} == {"A", "C"}
    refused = subprocess.run([*command, "/nowhere/at/all"], capture_output=True, text=True, check=False)
    assert (refused.returncode, "is no folder" in refused.stderr) == (2, True)
    some = subprocess.run([*command, str(ROOT), "--only", "throughput"], capture_output=True, text=True, check=False)
    named = [line.split("  ")[1] for line in some.stdout.splitlines()]
    assert len(named) < len(lines)
    assert all(name in ("install", "corpora") or name.startswith("throughput ") for name in named)
    none = subprocess.run([*command, str(ROOT), "--only", "replay"], capture_output=True, text=True, check=False)
    assert (none.returncode, "no step of part A has this in its name" in none.stderr) == (2, True)
    unknown = subprocess.run([*command[:4], "D", "--list"], capture_output=True, text=True, check=False)
    assert (unknown.returncode, "invalid choice: 'D'" in unknown.stderr) == (2, True)


def test_without_a_gpu_only_tiny_parts_are_run(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "scripts/gpu_day"), "A", "--directory", str(tmp_path)]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, "PyTorch sees no GPU" in done.stderr) == (2, True)
    assert list(tmp_path.iterdir()) == []


def test_results_are_named_by_the_device_that_is_there() -> None:
    found = examine_machine({"CUDA_VISIBLE_DEVICES": ""})
    assert set(found) == PART - {"part", "command", "commit", "date", "steps", "results"}
    assert (found["device"], found["torch"], found["gpu_memory_bytes"]) == ("CPU", torch.__version__, None)
    assert found["gpus"] == 0
    with pytest.raises(RuntimeError, match="PyTorch does not start"):
        examine_machine({"PYTHONHOME": "/nowhere/at/all"})
    names = {
        "CPU": "cpu",
        "NVIDIA H200": "h200",
        "NVIDIA H100 80GB HBM3": "h100",
        "NVIDIA H100 PCIe": "h100_pcie",
        "NVIDIA A100-SXM4-80GB": "a100",
        "NVIDIA GeForce RTX 4090": "rtx_4090",
        "Tesla T4": "t4",
    }
    assert {device: short_name(device) for device in names} == names


def wheel(folder: Path, name: str, version: str, *scripts: str) -> Path:
    """Writes a wheel of one module, with scripts."""
    path, info = folder / f"{name}-{version}-py3-none-any.whl", f"{name}-{version}.dist-info"
    files = {
        f"{name}.py": f"VERSION = {version!r}\n",
        **{f"{name}-{version}.data/scripts/{script}": "#!python\nprint('started')\n" for script in scripts},
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\nRequires-Dist: not-to-be-had\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: a test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    with zipfile.ZipFile(path, "w") as archive:
        for file, text in files.items():
            entry = zipfile.ZipInfo(file)
            entry.external_attr = 0o100755 << 16
            archive.writestr(entry, text)
        archive.writestr(f"{info}/RECORD", "".join(f"{file},,\n" for file in (*files, f"{info}/RECORD")))
    return path


def test_wheels_are_installed_side_by_side_and_one_that_fails_stops_no_other(tmp_path: Path) -> None:
    wheels, site = tmp_path / "wheels", tmp_path / "site"
    wheels.mkdir()
    wheel(wheels, "dayone", "1.0", "dayone")
    wheel(wheels, "daytwo", "2.0", "daytwo")
    wheel(wheels, "torch", "99.0")
    (wheels / "broken-1.0-py3-none-any.whl").write_bytes(b"no archive")
    assert install_wheels(wheels, site) == ["broken-1.0-py3-none-any.whl"]
    for name in ("dayone", "daytwo"):  # pip itself would leave out the second folder `bin`
        started = subprocess.run([site / "bin" / name], capture_output=True, text=True, check=False)
        assert started.stdout == "started\n"
    assert not (site / "torch.py").exists()
    present = installed(site)
    assert (present["dayone"], present["daytwo"]) == ("1.0", "2.0")
    assert present["torch"] == version("torch")  # its metadata: torch.__version__ also names the build (+cu130)
    (site / "dayone.py").write_text("as it is")
    wheel(wheels, "daytwo", "2.1")
    (wheels / "daytwo-2.0-py3-none-any.whl").unlink()
    assert install_wheels(wheels, site) == ["broken-1.0-py3-none-any.whl"]
    assert (site / "dayone.py").read_text() == "as it is"  # that version is there
    assert (site / "daytwo.py").read_text() == "VERSION = '2.1'\n"


def test_what_is_needed_is_named() -> None:
    given = ("numpy>=2", "evenpack[docs]", "rich", "PyYAML", "typing_extensions-4.1-py3-none-any.whl")
    assert [name_of(one) for one in given] == ["numpy", "evenpack", "rich", "pyyaml", "typing-extensions"]
    needed = {name_of(one) for one in required()}
    assert {"beartype", "deepspeed", "h5py", "numpy", "pytest", "sentencex", "torch", "typer"} <= needed
    assert needed <= set(installed(None)) - {"evenpack"}  # the checkout itself is imported from where it is


@pytest.mark.parametrize(("name", "count"), [("wikipedia_512", 5000), ("wikipedia_1024", 3000)])
def test_corpora_have_the_published_lengths(name: str, count: int) -> None:
    lengths, counts = published_lengths(name, count), published_histogram(name).counts
    every = 1 + np.arange(len(counts))
    for power in (1, 2):
        published = float((counts * every**power).sum() / counts.sum())
        assert float((lengths.astype(np.float64) ** power).mean()) == pytest.approx(published, rel=0.01)
    assert lengths.max() == len(counts)


def test_runs_of_the_day_have_the_step_of_one_gpu_of_the_shipped_ones(tmp_path: Path) -> None:
    sizes = {}
    for name in RUNS:
        values, tiny = run_values(name, tmp_path, tiny=False), run_values(name, tmp_path, tiny=True)
        assert values["training"]["precision"] == "bf16_autocast"
        assert "initialize_from" not in values["training"]
        assert (tiny["model"]["preset"], values["model"]["preset"] == "tiny") == ("tiny", False)
        sizes[name] = (values["training"]["packs_per_step"], values["training"]["packs_per_micro_batch"])
    assert sizes == {BERT: (48, 48), SMALL: (64, 32), XL: (128, 8)}


def test_questions_of_design_are_answered_on_a_cpu_and_a_failure_leaves_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(device=torch.device("cpu"), sizes=TINY)
    assert answer(bench, tmp_path / "design.json")
    found = json.loads((tmp_path / "design.json").read_text())
    check_design(found, on_gpu=False)
    same, other = (row["relative_difference"] for row in found["dropout_gradient"])
    assert same < 0.005
    assert other > 0.02

    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("no such kernel")

    monkeypatch.setattr("gpu_day.design.linear_cross_entropy", broken)
    assert not answer(bench, tmp_path / "design.json")
    found = json.loads((tmp_path / "design.json").read_text())
    assert {row["error"] for row in found["loss"]} == {"RuntimeError: no such kernel"}
    assert all("error" not in row for question, rows in found.items() if question != "loss" for row in rows)


def test_the_page_holds_what_there_is() -> None:
    law = {"location": 1.9, "scale": 0.3}
    results = {
        "law_of_one_device": {"fitted": law, "published": law, "fitted_distance": 0.02, "published_distance": 0.03},
        "design": {"loss": [{"width": 768, "milliseconds": 1.23456}, {"width": 1024, "error": "a | b"}]},
    }
    steps = {
        "law of one device": {"status": "done", "seconds": 9.6, "exit_code": 0, "last_line": "{...}"},
        "fails": {"status": "failed", "seconds": 1.0, "exit_code": 1, "last_line": "why"},
    }
    shown = page("h200_2026-11-24_B", {**FACTS, "steps": steps, "results": results})
    assert "on NVIDIA H200, torch 2.11, commit abc, 2026-11-24" in shown
    assert "| fitted | 1.900 | 0.300 | 2.0 % |" in shown
    assert "| width | milliseconds | error |" in shown
    assert "| 768 | 1.235 |  |" in shown
    assert "| 1024 |  | a \\| b |" in shown
    assert "| law of one device | done | 10 |  |" in shown
    assert "| fails | failed | 1 | why |" in shown
    assert "Throughput" not in shown
