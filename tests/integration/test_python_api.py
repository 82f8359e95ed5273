"""docs/python_api.md and examples/ as a reader runs them: from a run file to an exported model in Python.

The ranks of the documented run are forked, which spares 15 s of CPU time; a slow test starts `deepspeed` itself.
"""

import json
import re
import runpy
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from forked_ranks import run_ranks
from repository import ROOT
from run_files import write_run_file
from small_run import evenpack as evaluate_command
from small_run import metrics, small_run_values, train_on

import evenpack
from evenpack.data.sources.kinds import held_out, open_corpus
from evenpack.launcher import training
from evenpack.launcher.processes.start import LaunchPlan
from evenpack.launcher.processes.supervise import LaunchResult

STEPS = 20
"""Of the run in the documentation."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the folder of RUN.yaml."""
    folder = tmp_path_factory.mktemp("python")
    values = small_run_values(folder)
    values["training"] |= {"packs_per_micro_batch": 1, "checkpoint_every_steps": 10}
    write_run_file(folder / "RUN.yaml", values)
    return folder


def supervise_forked_ranks(plan: LaunchPlan, output_dir: Path, **_: Any) -> LaunchResult:
    """Runs a launch plan as `deepspeed` would."""
    run_file, *overrides = plan.command[plan.command.index("evenpack.launcher.worker") + 1 :]
    config = evenpack.open(run_file, *overrides).config
    assert config.run.output_dir == output_dir
    run_ranks(train_on, plan.devices.ranks, config)
    return LaunchResult(state="finished", exit_code=0, message="", error=None)


@pytest.fixture(scope="module")
def names(folder: Path) -> dict[str, Any]:
    """Runs the documentation's blocks of Python one after another; returns their variables."""
    blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / "docs/python_api.md").read_text("utf-8"), re.M | re.S)
    assert len(blocks) >= 4
    found: dict[str, Any] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(training, "supervise", supervise_forked_ranks)
        for block in blocks:
            exec(compile(block, "docs/python_api.md", "exec"), found)
    return found


def test_the_documented_lines_prepare_train_evaluate_and_export(names: dict[str, Any], folder: Path) -> None:
    result = names["result"]
    assert (result.state, result.report["step"]) == ("finished", STEPS)
    assert len(metrics(folder / "out")) == STEPS
    assert (folder / "exported" / "model.safetensors").is_file()
    assert (folder / "exported" / "tokenizer.json").is_file()


def test_the_batches_of_all_ranks_are_those_that_the_run_was_trained_on(names: dict[str, Any], folder: Path) -> None:
    for ranks in (1, 4):
        hashes = [0] * STEPS
        for rank in range(ranks):
            for step in names["run"].steps(rank=rank, ranks=ranks):
                hashes[step.step] += sum(batch.order_hash for batch in step.micro_batches)
        assert [f"{value % (1 << 64):016x}" for value in hashes] == [
            record["order_hash"] for record in metrics(folder / "out")
        ]


def test_a_checkpoint_is_evaluated_by_its_step(names: dict[str, Any]) -> None:
    run = names["run"]
    newest, earlier = run.evaluate(), run.evaluate(checkpoint=10)
    assert (newest.step, earlier.step) == (STEPS, 10)
    assert newest.sources["one"].loss < earlier.sources["one"].loss
    with pytest.raises(evenpack.CheckpointError, match="no checkpoint of step 7; it has steps 10, 20"):
        run.evaluate(checkpoint=7)


def held_out_documents(run: evenpack.Run, source: str) -> list[str]:
    """Returns the texts of a source that its run holds out."""
    documents = list(open_corpus(source, run.config.data.sources[source]).documents())
    identities = np.array([document.identity for document in documents], dtype=np.uint64)
    chosen = held_out(identities, run.config.data.sources[source], run.config.data.validation_fraction)
    return [document.text for document, is_chosen in zip(documents, chosen, strict=True) if is_chosen]


def test_a_file_of_the_held_out_documents_is_evaluated_as_they_are(
    names: dict[str, Any], folder: Path, tmp_path: Path
) -> None:
    place = (f"run.output_dir={folder / 'out'}", f"data.prepared_dir={folder / 'data'}")
    run = evenpack.open(folder / "RUN.yaml", *place, "training.evaluation_packs=null")
    expected = run.evaluate(checkpoint=10).sources["one"]
    texts = held_out_documents(run, "one")
    (tmp_path / "held out.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    # Neither the length of the training nor a limit of its evaluation counts for a file.
    long = ("training.steps=null", "training.epochs=9", "training.evaluation_packs=1", "schedule.warmup_steps=50")
    found = evenpack.open(folder / "RUN.yaml", *place, *long).evaluate(checkpoint=10, data=tmp_path / "held out.jsonl")
    assert (found.step, list(found.sources)) == (10, ["held_out"])
    of_file = found.sources["held_out"]
    assert (of_file.targets, of_file.sequences) == (expected.targets, expected.sequences)
    assert of_file.loss == pytest.approx(expected.loss, rel=1e-6)
    assert of_file.accuracy == expected.accuracy
    options = ["--checkpoint", "10", "--data", str(tmp_path / "held out.jsonl"), "--json"]
    by_command = json.loads(evaluate_command("evaluate", folder / "RUN.yaml", *place, options=options).stdout)
    assert by_command["sources"] == {"held_out": of_file.to_json()}
    assert by_command["data"] == options[3]


def test_a_run_that_fails_raises_what_its_rank_has_said(
    names: dict[str, Any], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for error, message, expected in (
        ("no space", "rank 0 ended on the error above", "no space"),
        (None, "died", "died"),
    ):
        failed = LaunchResult(state="failed", exit_code=2, message=message, error=error)
        monkeypatch.setattr(training, "supervise", lambda *_, failed=failed, **__: failed)
        with pytest.raises(evenpack.RunError, match=f"^{expected}$"):
            names["run"].train(cpu_ranks=1)
    with pytest.raises(evenpack.ConfigError, match=r"number of ranks can be 1, 2, 4, 8"):
        names["run"].train(cpu_ranks=3)


@pytest.mark.slow
def test_deepspeed_is_started_and_its_failure_is_an_error(names: dict[str, Any], folder: Path) -> None:
    run_file, data = folder / "RUN.yaml", f"data.prepared_dir={folder / 'data'}"
    run = evenpack.open(run_file, data, f"run.output_dir={folder / 'real'}", "training.steps=2")
    assert run.train(cpu_ranks=1).report["step"] == 2
    refused = evenpack.open(run_file, data, f"run.output_dir={folder / 'refused'}", "attention.backend=flash")
    with pytest.raises(evenpack.RunError, match="flash"):
        refused.train(cpu_ranks=1)


def test_an_example_trains_a_model_of_others_on_the_batches(
    names: dict[str, Any], folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert names["run"].config.training.packs_per_step == 8
    monkeypatch.setattr(sys, "argv", ["training_loop.py", str(folder / "RUN.yaml")])
    runpy.run_path(str(ROOT / "examples" / "training_loop.py"))
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+) over", capsys.readouterr().out)]
    assert len(losses) == 10
    assert losses[-1] < losses[0] - 0.2


def test_an_example_packs_lengths_of_ones_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lengths = tmp_path / "lengths.txt"
    lengths.write_text("60\n40\n100\n50\n50\n")
    monkeypatch.setattr(sys, "argv", ["packing_statistics.py", str(lengths)])
    runpy.run_path(str(ROOT / "examples" / "packing_statistics.py"))
    shown = capsys.readouterr().out
    assert "5 sequences, the longest of 100 tokens" in shown
    assert "packs of any number of sequences: 100.0%, 3 packs" in shown
    assert "holds sequences [2] of [100] tokens" in shown


def test_an_example_runs_a_study_as_a_notebook_does(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(ROOT / "examples" / "packing_study.py"))
    shown = capsys.readouterr().out
    assert "longest_pack_first" in shown
    assert re.search(r"cutting_stock, 3 sequences a pack: 99\.\d\d% full, 2\.\d\d x padding", shown)
