"""A model family of another package is found by its entry point, prepared for, trained and evaluated."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from small_run import COMMAND, Done, metrics, process

import evenpack
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
    foreign=None,
)
'''

MODEL = """
from torch import nn

from evenpack.kernels.cross_entropy import linear_cross_entropy
from evenpack.models.common.losses import LossOutput
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


def run(command: str, run_file: Path, *arguments: str, sites: list[Path], expected: int = 0) -> Done:
    """Runs a command with the packages in `sites` installed beside this evenpack."""
    own = Path(evenpack.__file__).parents[1]
    paths = os.pathsep.join(map(str, [*sites, own]))
    return process([*COMMAND, *command.split(), str(run_file), *arguments], expected=expected, PYTHONPATH=paths)


@pytest.fixture(scope="module")
def run_file(site: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the output of a run that was trained on two ranks."""
    path = write_run(tmp_path_factory.mktemp("bigram"))
    run("prepare", path, sites=[site])
    run("train --cpu-ranks 2", path, sites=[site])
    return path


def test_three_steps_on_two_ranks_learn(run_file: Path) -> None:
    records = metrics(run_file.parent / "out")
    assert [record["step"] for record in records] == [1, 2, 3]
    assert records[-1]["loss"] < records[0]["loss"]
    assert records[-1]["validation"]["words"]["targets"] > 0
    summary = json.loads((run_file.parent / "out" / "summary.json").read_text())
    assert summary["step"] == STEPS


def test_its_section_is_checked_by_its_own_schema(site: Path, run_file: Path) -> None:
    shown = run("config show", run_file, "model.scale=2.5", sites=[site]).stdout
    assert "scale: 2.5" in shown
    refused = run("config show", run_file, "model.scle=2.5", sites=[site], expected=2).stderr
    assert "model.scle: no such key; did you mean 'scale'?" in refused
    refused = run("config show", run_file, "model.kind=bigrm", sites=[site], expected=2).stderr
    known = ", ".join(sorted(("bigram", *known_families())))
    assert f"there is no model family 'bigrm'; did you mean 'bigram'? known: {known}" in refused


def test_a_recipe_that_it_cannot_learn_from_is_refused(site: Path, run_file: Path) -> None:
    refused = run("config show", run_file, "data.recipe.kind=concat", sites=[site], expected=2).stderr
    words = " ".join(refused.split())
    assert "model.kind bigram and data.recipe.kind concat do not go together: bigram learns from documents" in words


def test_what_has_no_counterpart_in_transformers_says_so(site: Path, run_file: Path, tmp_path: Path) -> None:
    refused = run("export", run_file, str(tmp_path / "exported"), sites=[site], expected=2).stderr
    assert "transformers has no model of family 'bigram'" in " ".join(refused.split())
    assert not (tmp_path / "exported").exists()


def test_without_the_package_its_run_file_names_the_known_families(run_file: Path) -> None:
    refused = run("config show", run_file, sites=[], expected=2).stderr
    assert "there is no model family 'bigram'" in refused
    assert f"known: {', '.join(known_families())}" in refused


def test_two_packages_with_one_family_are_reported(site: Path, run_file: Path, tmp_path: Path) -> None:
    install(tmp_path, "another", "bigram = another_family:FAMILY")
    refused = run("config show", run_file, sites=[site, tmp_path], expected=2).stderr
    words = " ".join(refused.split())
    assert "model family 'bigram' is registered twice" in words
    for origin in ("bigram_family:FAMILY of bigram 1.2", "another_family:FAMILY of another 1.2"):
        assert origin in words
