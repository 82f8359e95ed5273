"""`evenpack budget` as a user types it."""

import json
import re
import shlex
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from command_line import Done, evenpack
from repository import ROOT

RUN = ROOT / "configs" / "gpt2_small.yaml"
PAPER = ("--corpus-tokens", "114400095", "--corpus-documents", "803000")
Run = Callable[..., Done]


@pytest.fixture
def budget(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    """Returns the command, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    return partial(evenpack, "budget")


@pytest.mark.parametrize(("length", "packs", "steps"), [(32, 256, 28_126), (64, 256, 14_063), (128, 128, 14_063)])
def test_the_papers_runs_have_their_steps(budget: Run, length: int, packs: int, steps: int) -> None:
    recipe = f"data.recipe={{kind: concat, max_sequence_length: {length}, isolate_documents: false}}"
    step = ("training.steps=null", "training.epochs=2", f"training.packs_per_step={packs}", "model.positions=alibi")
    code, out, _ = budget(RUN, recipe, f"data.pack_length={length}", *step, *PAPER, "--json")
    values = json.loads(out)
    assert (code, values["steps"]) == (0, steps)
    assert values["batch"]["slots"] == length * packs


def test_tables_go_from_the_batch_to_the_hours_and_the_file_holds_the_same(budget: Run, tmp_path: Path) -> None:
    options = ("--devices", "8", "--device", "h100", "--mfu", "0.5", "--save", tmp_path / "budget.json")
    code, out, _ = budget(RUN, *options, "training.steps=null", "training.chinchilla_ratio=20")
    assert code == 0
    values = json.loads((tmp_path / "budget.json").read_text())
    for words in (
        "512 packs = micro-batch of 32 packs x 2 (accumulation) x 8 devices",
        "training.chinchilla_ratio 20 (124,439,808 parameters): training.steps 4748",
        "8 x h100, 989.4 TFLOP/s dense each at 50.00 % MFU",
        f"{values['time']['device_hours']:,.3g}",
        "Assumptions",
    ):
        assert words in out
    assert values["tokens_per_parameter"] == pytest.approx(20, rel=1e-3)
    assert list(tmp_path.iterdir()) == [tmp_path / "budget.json"], "nothing is prepared or begun"


def test_what_the_page_on_budgets_types_works_without_prepared_data(budget: Run) -> None:
    lines = (ROOT / "docs" / "budget.md").read_text("utf-8").splitlines()
    typed = [line for line in lines if line.startswith("evenpack budget ") and "RUN.yaml" not in line]
    assert len(typed) == 3
    shown = []
    for line in typed:
        words = [ROOT / word if word.startswith("configs/") else word for word in shlex.split(line)[2:]]
        code, out, err = budget(*words)
        assert code == 0, err
        shown.append(out)
    assert "training.tokens_per_step 16,384: training.packs_per_step 64" in shown[0]
    assert "training.steps 28126" in shown[1]
    assert re.search(r"1\.086 B +37\.61 % +249\.6 B .* fewest", shown[2])


def test_operations_need_no_run_file(budget: Run) -> None:
    code, out, _ = budget("--compute", "1.2e20", "--served-tokens", "1e12", "--json")
    values = json.loads(out)
    assert code == 0
    assert values["compute_optimal"] == {"flops": 1.2e20, "parameters": 1e9, "tokens": 2e10}
    (least,) = (model for model in values["serving"]["models"] if model["is_least"])
    assert least["total_flops"] == min(model["total_flops"] for model in values["serving"]["models"])
    assert 0.2 < least["share"] < 0.5, "a model that serves 50 times its training's tokens is smaller than the optimum"
    code, out, _ = budget("--compute", "1.2e20", "--served-tokens", "1e12")
    assert code == 0
    (line,) = (line for line in out.splitlines() if "fewest" in line)
    assert f"{100 * least['share']:.2f} %" in line


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("training.epochs=2",), "found steps=19000 and epochs=2.0"),
        (("training.tokens=5000000",), "found steps=19000 and tokens=5000000"),
        (("training.tokens_per_step=5000000",), "both give the size of a step"),
        (
            ("training.packs_per_step=null", "training.tokens_per_step=65536", "--devices", "8"),
            "training.tokens_per_step (65,536) is 64 packs and is below one micro-batch per rank",
        ),
        (("--devices", "3"), "3 ranks x training.packs_per_micro_batch (32) must divide"),
        (("--device", "h1000"), "did you mean 'h100'"),
        (("--corpus-tokens", "12"), "--corpus-tokens and --corpus-documents go together"),
        (("--devices", "0"), "Invalid value for '--devices'"),
    ],
)
def test_bad_input_is_refused_before_anything_is_written(
    budget: Run, tmp_path: Path, arguments: tuple[str, ...], message: str
) -> None:
    code, out, err = budget(RUN, *arguments)
    assert (code, out) == (2, "")
    assert message in err
    assert list(tmp_path.iterdir()) == []


def test_without_a_run_there_must_be_operations(budget: Run) -> None:
    code, _, err = budget()
    assert code == 2
    assert "give a RUN.yaml, or --compute FLOPS" in err
