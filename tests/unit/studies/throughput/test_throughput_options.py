"""The options of `study throughput`."""

from pathlib import Path

import pytest

from evenpack.errors import ConfigError
from evenpack.studies.throughput.command import ThroughputCommand


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
