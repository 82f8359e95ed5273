"""`evenpack plan` as a user types it."""

import json
import shlex
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from command_line import Done, evenpack
from repository import ROOT
from run_files import run_values, text_sources, write_run_file
from small_run import COMMAND, process

RUN = ROOT / "configs" / "gpt2_small.yaml"
DOCUMENTS = [f"{number} {'pack ' * (number % 11)}{number * number}" for number in range(60)]
Run = Callable[..., Done]


@pytest.fixture
def plan(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    """Returns the command, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    return partial(evenpack, "plan")


def test_what_one_looks_for_comes_first_and_the_file_holds_the_same(plan: Run, tmp_path: Path) -> None:
    options = ("--ranks", "8", "--device", "h100", "--mfu", "0.5", "--save", tmp_path / "plan.json")
    code, out, _ = plan(RUN, *options, "training.steps=null", "training.chinchilla_ratio=20")
    assert code == 0
    values = json.loads((tmp_path / "plan.json").read_text())
    first = out.splitlines()[:4]
    assert first[0].startswith("gpt2_small on 8 ranks")
    assert [line.split()[0] for line in first[1:]] == ["tokens", "memory", "time"]
    assert "in 4,748 steps" in first[1]
    assert "fits into h100" in first[2]
    assert f"{60 * values['cost']['hours']['hours']:,.3g} minutes on 8 x h100" in first[3]
    assert "512 packs = 8 ranks x 2 (gradient accumulation) x 32 packs" in out
    assert "training.chinchilla_ratio 20 (124,439,808 parameters): training.steps 4748" in out
    assert values["cost"]["tokens_per_parameter"] == pytest.approx(20, rel=1e-3)
    assert list(tmp_path.iterdir()) == [tmp_path / "plan.json"], "nothing is prepared or begun"


def test_what_the_page_on_plans_types_works_without_prepared_data(plan: Run) -> None:
    lines = (ROOT / "docs" / "plan.md").read_text("utf-8").splitlines()
    typed = [line for line in lines if line.startswith("evenpack plan ") and "RUN.yaml" not in line]
    assert len(typed) == 2
    shown = []
    for line in typed:
        code, out, err = plan(*shlex.split(line)[2:])
        assert code == 0, err
        shown.append(out)
    assert "training.steps 28125" in shown[-1]


@pytest.mark.slow
def test_a_rank_of_many_is_rehearsed_by_the_command(tmp_path: Path) -> None:
    data = {"sources": text_sources(tmp_path, {"lines": DOCUMENTS})}
    training = {"packs_per_step": 128, "packs_per_micro_batch": 2}
    run_file = write_run_file(tmp_path / "run.yaml", run_values("gpt2", tmp_path, data=data, training=training))
    done = process([*COMMAND, "plan", str(run_file), "--prepare", "--ranks", "64", "--rank", "63", "--json"])
    values = json.loads(done.stdout)
    found = values["rehearsal"]
    assert (found["rank"], found["ranks"], found["items"]) == (63, 64, [2])
    assert found["faked_gradients"] == values["cost"]["parameters"]
    assert not (tmp_path / "out" / "ranks").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("training.epochs=2",), "found steps=19000 and epochs=2.0"),
        (("training.tokens_per_step=5000000",), "both give the size of a step"),
        (
            ("training.packs_per_step=null", "training.tokens_per_step=65536", "--ranks", "8"),
            "tokens_per_step 65,536: training.packs_per_step 64 (exactly",
        ),
        (("--device", "h1000"), "did you mean 'h100'"),
    ],
)
def test_bad_input_is_refused_before_anything_is_written(
    plan: Run, tmp_path: Path, arguments: tuple[str, ...], message: str
) -> None:
    code, out, err = plan(RUN, *arguments)
    assert (code, out) == (2, "")
    assert message in err
    assert list(tmp_path.iterdir()) == []
