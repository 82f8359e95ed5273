"""The tables at the end of a run."""

from typing import Any

import pytest

from evenpack import console
from evenpack.launcher.training import TrainingReport, report_table


def shown(capsys: pytest.CaptureFixture[str], **values: Any) -> dict[str, str]:
    """Returns the rows of a run's table."""
    report = {
        "step": 7,
        "packing_efficiency": 0.99,
        "packing_factor": 1.5,
        "padding_share": 0.02,
        "ranks": 2,
        "tokens_per_second": 1000.0,
        "first_loss": 10.0,
        "last_loss": 5.0,
        "losses_apart": {},
        "target": None,
        "validation_loss": {"wiki": 4.5},
    }
    console.print_apart([report_table(TrainingReport(**report | values), title="tried: finished")])
    lines = capsys.readouterr().out.splitlines()[1:]
    return {name.strip(): value.strip() for name, _, value in (line.partition("  ") for line in lines)}


def test_packings_are_distinguished_from_what_the_steps_computed(capsys: pytest.CaptureFixture[str]) -> None:
    assert shown(capsys) == {
        "steps": "7",
        "packing, all data": "99.00 % efficient, 1.500 sequences per pack",
        "padding share, these steps": "2.00 %",
        "tokens/s on 2 ranks": "1.00k",
        "first loss": "10.0000",
        "last loss": "5.0000",
        "validation loss, wiki": "4.5000",
    }
    without = shown(capsys, packing_efficiency=None, packing_factor=None)
    assert not any("packing" in name for name in without), "of a layout that computes no packs"


def test_each_of_two_losses_stands_beside_the_validation_of_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    losses = {"first_token_loss": 9.0, "first_next_sentence_loss": 1.0, "last_token_loss": 4.6}
    found = shown(capsys, losses_apart=losses | {"last_next_sentence_loss": 0.4})
    assert list(found.items())[-5:] == [
        ("first masked-token loss", "9.0000"),
        ("last masked-token loss", "4.6000"),
        ("first next-sentence loss", "1.0000"),
        ("last next-sentence loss", "0.4000"),
        ("validation masked-token loss, wiki", "4.5000"),
    ]
