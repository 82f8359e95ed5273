"""Notes on runs that are compared."""

from pathlib import Path

import pytest
from run_records import DATA, start
from written_runs import write_run

from evenpack.studies.report import Comparison, compare, read_runs


def compared(*folders: Path) -> Comparison:
    return compare(read_runs(folders))


def test_runs_over_the_same_data_share_their_steps(tmp_path: Path) -> None:
    settings = [{"optimizer": {"learning_rate": rate}, "training": {"skip_steps": []}} for rate in (1e-3, 2e-3)]
    folders = [write_run(tmp_path / name, config=config) for name, config in zip("ab", settings, strict=True)]
    found = compared(*folders)
    assert found.notes == ()
    assert found.shares_steps
    assert found.settings == {"optimizer.learning_rate": ("0.001", "0.002")}


def test_other_data_is_said_and_keeps_steps_apart(tmp_path: Path) -> None:
    for name, difference in {
        "tokenizer": "The tokenizers differ: a token is not the same amount of text, and losses do not compare.",
        "fingerprint": "The runs had other data: other documents, recipe, packing or mixture.",
    }.items():
        other = DATA.model_copy(update={name: "other"})
        found = compared(write_run(tmp_path / name / "a"), write_run(tmp_path / name / "b", data=other))
        assert found.notes == (difference, "Curves are drawn against tokens and time, and not against steps.")
        assert not found.shares_steps
    longer = compared(
        write_run(tmp_path / "short"), write_run(tmp_path / "long", data=DATA.model_copy(update={"pack_length": 128}))
    )
    assert longer.notes[0] == "The pack lengths differ: short 64, long 128."


def test_steps_of_other_sizes_are_said(tmp_path: Path) -> None:
    found = compared(write_run(tmp_path / "small"), write_run(tmp_path / "large", tokens=200))
    assert found.notes == (
        "The steps hold other numbers of tokens: small 100, large 200 on average. Against steps the runs have seen "
        "other amounts.",
    )
    assert found.shares_steps
    assert compared(write_run(tmp_path / "a"), write_run(tmp_path / "b", tokens=100.5)).notes == ()


def test_a_run_of_an_earlier_version_is_said_to_be_unknown(tmp_path: Path) -> None:
    old = write_run(tmp_path / "old", data=None)
    found = compared(old, write_run(tmp_path / "new", config={"training": {"steps": 20}}))
    assert found.notes[0] == "Whether old had the same data is not recorded (there is no run.json)."
    assert not found.shares_steps
    assert found.settings == {}, "of one run nothing differs"
    assert compared(old).shares_steps, "by itself it can be drawn against anything"


def test_what_befell_a_run_is_said(tmp_path: Path) -> None:
    resumed = write_run(tmp_path / "resumed", starts=(start(), start(steps_done=12, ranks=1)))
    bert = write_run(tmp_path / "bert", token_loss=5.0, next_sentence_loss=0.5)
    empty = write_run(tmp_path / "empty", steps=0)
    assert compared(resumed, bert, empty).notes == (
        "resumed went on after step 12 on 1 x H100.",
        "empty has no step yet and is not drawn.",
        "The losses are of masked tokens in some runs and of next tokens in others: they do not compare.",
    )


@pytest.mark.parametrize(
    ("one", "other", "is_unlike"),
    [
        ("bert", "modernbert", False),
        ("gpt2", "llama", False),
        ("modernbert", "gpt2", True),
        ("bert", "gpt2", True),
        ("bert", "of_another_package", True),
    ],
)
def test_losses_of_unlike_objectives_do_not_compare(tmp_path: Path, one: str, other: str, is_unlike: bool) -> None:
    """The model says what is learned; its losses do where it is not known."""
    sentences = {"bert": {"token_loss": 5.0, "next_sentence_loss": 0.5}}
    folders = [
        write_run(tmp_path / kind, config={"model": {"kind": kind}}, **sentences.get(kind, {})) for kind in (one, other)
    ]
    found = compared(*folders)
    assert any("they do not compare" in note for note in found.notes) == is_unlike
