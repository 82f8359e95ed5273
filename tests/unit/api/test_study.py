"""Studies in Python: the options of the command line, by name."""

import json
from pathlib import Path

import command_line
import pytest

import evenpack
from evenpack.console import save_json


def test_a_study_gives_what_its_command_prints(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    command = ["study", "packing", "glue:cola", "--depths", "2,none", "--algorithms", "longest_pack_first"]
    by_command = command_line.evenpack(*command, "--pack-length", "64", "--json").json()
    report = evenpack.study("packing", "glue:cola", depths="2,none", algorithms="longest_pack_first", pack_length=64)
    save_json(report.value, tmp_path / "report.json")
    by_python = json.loads((tmp_path / "report.json").read_text())
    for row in (*by_command["packings"], *by_python["packings"]):
        del row["cpu_seconds"]
    assert by_python == by_command
    report.show()
    assert "Packs of 64 slots" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("pakcing", {}, "no study 'pakcing'; did you mean 'packing'"),
        ("packing", {"depth": "2"}, "study packing has no option 'depth'; did you mean 'depths'"),
        ("packing", {"pack_lenght": 3}, "did you mean 'pack_length'"),
        ("throughput", {"pack_length": 3}, "study throughput has no option 'pack_length'"),
        ("equivalence", {}, "run file none.yaml does not exist"),
    ],
)
def test_what_there_is_not_is_refused_with_the_nearest_name(
    name: str, options: dict[str, object], message: str
) -> None:
    with pytest.raises(evenpack.ConfigError, match=message):
        evenpack.study(name, "none.yaml", **options)
