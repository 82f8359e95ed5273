"""The hour on a node: its steps fit into it, are ordered by their worth, and need what they say."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from repository import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))

from gpu_day.collectives import collectives, measured
from gpu_day.isolation import row
from gpu_day.node import MINUTES, counts_of, steps_of_node
from gpu_day.report import page
from gpu_day.resuming import TOLERANCE, compared, overrides_for
from gpu_day.runner import examine_machine
from gpu_day.steps import BERT, SMALL, XL, Plan

from evenpack.engine.world.distributed import World
from evenpack.launcher.doctor import IsolationReport

SCRIPT = ROOT / "scripts/node_hour"


def plan_in(folder: Path, *, has_gpu: bool = True, is_tiny: bool = False) -> Plan:
    return Plan(scratch=folder, prefix=folder / "h100x8", has_gpu=has_gpu, is_tiny=is_tiny, installs=False, wheels=None)


def asked(*words: str, path: Path | None = None, **environment: str) -> "subprocess.CompletedProcess[str]":
    """Runs the command where PyTorch sees no GPU; `path`: a folder whose programs are found first."""
    paths = os.pathsep.join([*([] if path is None else [str(path)]), os.environ["PATH"]])
    given = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PATH": paths, **environment}
    return subprocess.run([sys.executable, str(SCRIPT), *words], env=given, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("gpus", [2, 4, 8])
def test_limits_of_all_steps_together_are_under_an_hour(gpus: int, tmp_path: Path) -> None:
    steps = steps_of_node(plan_in(tmp_path), gpus)
    assert all(step.limit_seconds > 0 for step in steps)
    assert sum(step.limit_seconds for step in steps) < 60 * MINUTES
    assert MINUTES == 60


def test_steps_are_ordered_by_their_worth_and_each_leaves_values(tmp_path: Path) -> None:
    steps = steps_of_node(plan_in(tmp_path), 8)
    runs = [f"throughput {run} on {ranks}" for ranks in (8, 1, 2, 4) for run in (BERT, XL)]
    assert [step.name for step in steps] == ["corpora", "collectives", "isolation", "resuming", *runs, "waits"]
    for step in steps[1:]:
        assert str(tmp_path / f"values/{step.name.replace(' ', '_')}.json") in step.command
    assert {SMALL, BERT, XL} <= set(steps[0].command)


def test_every_rank_has_as_much_work_on_any_number_of_ranks(tmp_path: Path) -> None:
    for step in steps_of_node(plan_in(tmp_path), 8):
        if step.name.startswith("throughput"):
            words = dict(word.split("=") for word in step.command if word.startswith("training."))
            ranks = int(step.name.split()[-1])
            assert step.command[2:4] == (str(ranks), "--module")
            packs, each = int(words["training.packs_per_step"]), int(words["training.packs_per_micro_batch"])
            assert packs / ranks == {BERT: 48, XL: 16}[step.name.split()[1]]
            assert packs % (ranks * each) == 0


def test_ranks_are_compared_by_powers_of_two_and_all() -> None:
    assert {gpus: counts_of(gpus) for gpus in (2, 3, 6, 8)} == {
        2: [2, 1],
        3: [3, 1, 2],
        6: [6, 1, 2, 4],
        8: [8, 1, 2, 4],
    }


@pytest.mark.parametrize("ranks", range(2, 17))
def test_the_step_that_is_resumed_can_be_divided_by_all_ranks_half_of_them_and_one(ranks: int) -> None:
    words = dict(word.split("=") for word in overrides_for(ranks))
    packs, each = int(words["training.packs_per_step"]), int(words["training.packs_per_micro_batch"])
    assert [packs % (count * each) for count in (ranks, ranks // 2, 1)] == [0, 0, 0]


def test_the_steps_are_listed_and_impossible_options_are_refused() -> None:
    listed = asked("--list", "--gpus", "4")
    assert listed.returncode == 0, listed.stderr
    assert [line.split()[0] for line in listed.stdout.splitlines()][:4] == [
        "corpora",
        "collectives",
        "isolation",
        "resuming",
    ]
    for words, reason in (
        (("--gpus", "1"), "expected 2 or more; one GPU is measured by scripts/gpu_day"),
        (("--minutes", "0"), "expected more than 0"),
        ((), "expected 8 GPUs, and PyTorch sees none here"),
    ):
        refused = asked(*words)
        assert (refused.returncode, reason in refused.stderr) == (2, True), refused.stderr


@pytest.mark.parametrize(
    ("machine", "reason"),
    [
        ({"gpus": 4, "nccl": "2.28.3"}, "expected 8 GPUs, PyTorch sees 4: give --gpus 4"),
        ({"gpus": 8, "nccl": None}, "expected NCCL in torch 2.13, found none: install a build of PyTorch for CUDA"),
        ({"gpus": 8, "nccl": "2.28.3"}, None),
    ],
)
def test_what_a_machine_lacks_is_named_with_what_to_do(machine: dict[str, Any], reason: str | None) -> None:
    names: dict[str, Any] = {"__file__": str(SCRIPT), "__name__": "node_hour"}
    exec(compile(SCRIPT.read_text(), SCRIPT, "exec"), names)
    found = names["_what_is_missing"]({"torch": "2.13", **machine}, 8, is_tiny=False)
    assert found is None if reason is None else reason in found


def test_the_driver_and_the_links_are_what_nvidia_smi_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text('#!/bin/sh\n[ "$1" = topo ] && echo "GPU0 NV18" || printf "580.65.06\\n580.65.06\\n"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    found = examine_machine({"CUDA_VISIBLE_DEVICES": ""})
    assert (found["driver"], found["topology"]) == ("580.65.06", "GPU0 NV18")
    program.write_text("#!/bin/sh\nexit 9\n")
    found = examine_machine({"CUDA_VISIBLE_DEVICES": ""})
    assert (found["driver"], found["topology"]) == (None, None)


def test_a_wrong_collective_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two ranks with nobody else: what the other one gives is missing from the sum."""
    world = World(rank=0, size=2, local_rank=0, device=torch.device("cpu"))
    monkeypatch.setattr(World, "any", lambda _, flag: flag)
    monkeypatch.setattr(World, "barrier", lambda _: None)
    monkeypatch.setattr(World, "all_gather", lambda _, seconds: [seconds, 0.5])
    monkeypatch.setattr("torch.distributed.all_reduce", lambda _: None)
    right = measured(world, collectives(world, 8)[0], values=8, repeats=1)
    assert (right["is_right"], right["seconds"], right["bytes"]) == (False, 0.5, 32)
    monkeypatch.setattr("torch.distributed.all_reduce", lambda whole: whole.fill_(3.0))  # 1 + 2
    assert measured(world, collectives(world, 8)[0], values=8, repeats=1)["is_right"]


def test_a_backend_is_as_bad_as_on_its_worst_rank() -> None:
    def probe(deviation: float | None, control: float | None, error: str | None = None) -> IsolationReport:
        passed = error is None
        values = {"max_deviation": deviation, "control_deviation": control, "tolerance": 0.1, "passed": passed}
        return IsolationReport(backend="flash", request="cuda", error=error, **values)  # type: ignore[arg-type]

    found = row((probe(0.0, 9.0), probe(0.05, 7.0), probe(None, None, "RuntimeError: no kernel")))
    assert (found["max_deviation"], found["control_deviation"], found["passed_on"]) == (0.05, 7.0, 2)
    assert found["errors"] == ["RuntimeError: no kernel"]
    assert row((probe(None, None, "x"),))["max_deviation"] is None


def test_losses_are_compared_step_by_step_and_the_order_as_a_whole() -> None:
    run = {"losses": [2.0, 4.0], "order": ["a", "b"]}
    found = compared(run, [2.0, 4.0 * (1 + 3 * TOLERANCE)], ["a", "b"])
    assert found["largest_difference"] == pytest.approx(3 * TOLERANCE, rel=0.01)
    assert found["is_planned_order"]
    assert not compared(run, run["losses"], ["b", "a"])["is_planned_order"]
    with pytest.raises(ValueError, match="shorter"):
        compared(run, [2.0], ["a"])


def test_the_page_names_what_is_wrong() -> None:
    results = {
        "collectives": {
            "rows": [
                {
                    "collective": "all-reduce",
                    "bytes": 2**30,
                    "seconds": 0.004,
                    "algorithm_bytes_per_second": 2.7e11,
                    "bus_bytes_per_second": 4.7e11,
                    "is_right": False,
                }
            ]
        },
        "resuming": {
            "runs": [
                {"starts": [8, 4, 8], "losses": [3.0], "largest_difference": 2e-3, "is_planned_order": False},
            ]
        },
    }
    facts = {"command": "scripts/node_hour", "commit": "abc", "date": "2026-11-24", "device": "H100", "torch": "2.13"}
    shown = page("h100x8_2026-11-24", json.loads(json.dumps({**facts, "steps": {}, "results": results})))
    assert "| all-reduce | 1,073.7 | 4.000 | 270.00 | 470.00 | WRONG |" in shown
    assert "| 8 -> 4 -> 8 | 1 | 3.000000 | 2.0e-03 | NOT AS PLANNED |" in shown
