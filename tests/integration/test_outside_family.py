"""A model family of another package is found by its entry point, prepared for, trained and evaluated."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from repository import ROOT
from small_run import COMMAND, Done, evenpack, metrics, process

from evenpack.models.families import known_families
from evenpack.testing import run_values, text_sources, write_run_file

STEPS = 3

FAMILY = '''
"""Predicts the next token from the last one alone."""

from typing import ClassVar, Literal

from evenpack.models.common.section import TransformerConfig
from evenpack.models.families import ModelFamily


class BigramConfig(TransformerConfig):
    presets: ClassVar = {"tiny": {"layers": 1, "hidden_size": 16, "heads": 1}}
    kind: Literal["bigram"]
    preset: Literal["tiny"] = "tiny"
    positions: Literal["none"] = "none"
    scale: float = 1.0
    """Times the scores."""


FAMILY = ModelFamily(
    config=BigramConfig,
    causal=True,
    objective="next_tokens",
    recipes=("documents",),
    model="bigram_model:Bigram",
    huggingface=None,
)
'''

MODEL = """
from torch import nn

from evenpack.kernels.cross_entropy import linear_cross_entropy
from evenpack.models.common.loss_sums import LossOutput
from evenpack.models.common.transformer import PackedTransformer


class Bigram(PackedTransformer):
    def _build(self, attention_backend):
        self.token_embedding = nn.Embedding(self.vocabulary_size, self.config.shape["hidden_size"])
        self.blocks = nn.ModuleList()
        self.next = nn.Linear(self.config.shape["hidden_size"], self.vocabulary_size, bias=False)

    def forward(self, batch):
        hidden = self.config.scale * self.token_embedding(batch.tokens)
        targets = batch.targets["next_token"]
        loss_sum, correct = linear_cross_entropy(hidden, self.next.weight, targets.labels, targets.weights)
        return {"next_token": LossOutput(loss_sum, correct)}
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Writes a folder of installed packages, like pip."""
    folder = tmp_path_factory.mktemp("site")
    (folder / "bigram_family.py").write_text(FAMILY)
    (folder / "bigram_model.py").write_text(MODEL)
    install(folder, "bigram", "bigram = bigram_family:FAMILY")
    return folder


def install(folder: Path, package: str, *entry_points: str) -> None:
    """Writes the metadata of a package's entry points."""
    info = folder / f"{package}-1.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.2\n")
    (info / "entry_points.txt").write_text("\n".join(["[evenpack.model_families]", *entry_points]) + "\n")


def write_run(folder: Path, **model: Any) -> Path:
    texts = [" ".join(f"word{(number * place) % 7}" for place in range(4 + number % 20)) for number in range(200)]
    values = run_values(
        "bigram",
        folder,
        data={"sources": text_sources(folder, {"words": texts}), "validation_fraction": 0.1},
        model={"kind": "bigram", "hidden_size": 24, "heads": 1, **model},
        training={"steps": STEPS, "evaluate_every_steps": STEPS, "evaluation_packs": 4, "layout": "unpadded"},
        optimizer={"learning_rate": 0.05},
    )
    return write_run_file(folder / "run.yaml", values)


SCRIPT = """
import json, sys
from small_run import evenpack

for command, run_file, options, overrides, expected in json.loads(sys.argv[1]):
    print(json.dumps(evenpack(command, run_file, *overrides, options=options, expected=expected)))
"""


def run_each(*commands: tuple[str, Path, list[str], list[str], int], sites: list[Path]) -> list[Done]:
    """Runs commands in one process that has the packages in `sites` installed beside this evenpack.

    Args:
        commands: the command, the run file, options, overrides and the exit code of each.
    """
    paths = [*sites, Path(__file__).parent, ROOT / "tests", ROOT]
    words = json.dumps([[command, str(run_file), *others] for command, run_file, *others in commands])
    done = process([sys.executable, "-c", SCRIPT, words], PYTHONPATH=os.pathsep.join(map(str, paths)))
    return [Done(*json.loads(line)) for line in done.stdout.splitlines()]


@pytest.fixture(scope="module")
def run_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("bigram"))


@pytest.fixture(scope="module")
def answers(site: Path, run_file: Path) -> list[str]:
    """Prepares a run and trains it on two ranks; returns what five other commands then say."""
    show = "config show"
    _, _, *answers = run_each(
        ("prepare", run_file, [], [], 0),
        ("train", run_file, ["--cpu-ranks", "2"], [], 0),
        (show, run_file, [], ["model.scale=2.5"], 0),
        (show, run_file, [], ["model.scle=2.5"], 2),
        (show, run_file, [], ["model.kind=bigrm"], 2),
        (show, run_file, [], ["data.recipe.kind=concat"], 2),
        ("export", run_file, [], [str(run_file.parent / "exported")], 2),
        sites=[site],
    )
    return [" ".join((done.stdout + done.stderr).split()) for done in answers]


@pytest.mark.slow
def test_three_steps_on_two_ranks_learn(run_file: Path, answers: list[str]) -> None:
    records = metrics(run_file.parent / "out")
    assert [record["step"] for record in records] == [1, 2, 3]
    assert records[-1]["loss"] < records[0]["loss"]
    assert records[-1]["validation"]["words"]["targets"] > 0
    summary = json.loads((run_file.parent / "out" / "summary.json").read_text())
    assert summary["step"] == STEPS


@pytest.mark.slow
def test_its_section_recipes_and_export_are_checked_as_those_of_other_families(
    run_file: Path, answers: list[str]
) -> None:
    shown, unknown_key, unknown_family, recipe, export = answers
    assert "scale: 2.5" in shown
    assert "model.scle: no such key; did you mean 'scale'?" in unknown_key
    assert "there is no model family 'bigrm'; did you mean 'bigram'?" in unknown_family
    assert "model.kind bigram and data.recipe.kind concat do not go together: bigram learns from documents" in recipe
    assert "transformers has no model of family 'bigram'" in export
    assert not (run_file.parent / "exported").exists()


def test_without_the_package_its_run_file_names_the_known_families(run_file: Path) -> None:
    refused = evenpack("config show", run_file, expected=2).stderr
    assert f"there is no model family 'bigram'; known: {', '.join(known_families())}" in " ".join(refused.split())


def test_two_packages_with_one_family_are_reported(site: Path, run_file: Path, tmp_path: Path) -> None:
    install(tmp_path, "another", "bigram = another_family:FAMILY")
    paths = os.pathsep.join(map(str, [site, tmp_path, ROOT]))
    refused = process([*COMMAND, "config", "show", str(run_file)], expected=2, PYTHONPATH=paths).stderr
    words = " ".join(refused.split())
    assert "model family 'bigram' is registered twice" in words
    for origin in ("bigram_family:FAMILY of bigram 1.2", "another_family:FAMILY of another 1.2"):
        assert origin in words
