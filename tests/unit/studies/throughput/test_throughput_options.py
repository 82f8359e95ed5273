"""The options of `study throughput`."""

from pathlib import Path

import pytest
from command_line import evenpack

from evenpack.errors import ConfigError
from evenpack.studies.throughput.command import ThroughputCommand
from evenpack.studies.throughput.contenders import (
    parse_forms,
)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"layouts": "paded"}, "no layout 'paded'; did you mean 'padded'"),
        ({"layouts": "packed,packed"}, "given twice"),
        ({"depths": "two"}, "'two' is neither a number"),
        ({"plot": Path("figure.pdf")}, "--plot writes a PNG file"),
        ({"samples": 0, "cost_model": Path("c.json")}, "--cost-model needs --samples"),
        ({"cost_model": Path("/nowhere/at/all/c.json")}, "there is no folder /nowhere/at/all"),
    ],
)
def test_options_that_cannot_be_are_refused_before_anything_is_read(given: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ThroughputCommand(**given).options()  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("option", "value"), [("--rounds", 0), ("--warmup", -1), ("--samples", -1), ("--clock", "sun")]
)
def test_the_command_line_refuses_what_is_out_of_range(option: str, value: object) -> None:
    refused = evenpack("study", "throughput", "demo", option, value)
    assert refused.code == 2
    assert f"'{option}'" in refused.stderr


def test_options_have_their_defaults() -> None:
    assert parse_forms("packed, unpadded/max_tokens") == ("packed", "unpadded/max_tokens")
    none = ThroughputCommand(depths="").options()
    assert none.depths == ()
    assert none.layouts == ("padded", "unpadded", "packed")
