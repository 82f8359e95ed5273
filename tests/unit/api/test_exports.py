"""`import evenpack` exports its names and loads them when they are used."""

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

import evenpack

HEAVY = ("torch", "numpy", "pydantic", "deepspeed", "transformers", "datasets", "scipy", "rich")


def heavy_modules_after(script: str) -> set[str]:
    """Returns the slow modules that a new process has imported."""
    shown = f"{script}\nimport sys\nprint(sorted({HEAVY} & sys.modules.keys()))".replace(str(HEAVY), repr(set(HEAVY)))
    done = subprocess.run([sys.executable, "-c", shown], capture_output=True, text=True, check=True)
    return set(ast.literal_eval(done.stdout))


@pytest.mark.parametrize(
    ("script", "allowed"),
    [
        ("import evenpack", set()),
        ("import evenpack; evenpack.ConfigError; dir(evenpack)", set()),
        ("import evenpack; evenpack.pack([5, 3], pack_length=8).assign([5, 3])", {"numpy", "scipy"}),
        ("import evenpack; evenpack.open('demo')", {"numpy", "pydantic"}),
        ("import evenpack.launcher.training", {"numpy", "pydantic", "rich"}),
    ],
)
def test_a_name_is_loaded_when_it_is_first_used_and_no_more_than_it_needs(script: str, allowed: set[str]) -> None:
    assert heavy_modules_after(script) <= allowed


def test_every_exported_name_is_there_for_people_and_for_type_checkers() -> None:
    assert len(set(evenpack.__all__)) == len(evenpack.__all__)
    for name in evenpack.__all__:
        assert getattr(evenpack, name) is not None
        assert name in dir(evenpack)
    tree = ast.parse(Path(evenpack.__file__).read_text(encoding="utf-8"))
    checked = next(node for node in tree.body if isinstance(node, ast.If))
    imported = [alias.asname or alias.name for line in checked.body for alias in line.names]  # type: ignore[attr-defined]
    assert sorted(imported) == sorted(evenpack.__all__)


OF_ANOTHER_TYPE = {
    "pack([[1, 2], [3]], pack_length=8)": "expected one whole number for each sequence, found list [[1, 2], [3]]",
    "pack([1, None], pack_length=8)": "found an array of object",
    "LengthHistogram.from_counts([[1], [2, 3]])": "expected one whole number for each length",
    "LengthHistogram.from_lengths([1], longest='8')": "longest must be a whole number",
    "open(5)": "run_file must be a path, found 5",
    "open('demo', 5)": "override '5' is not of the form section.key=value",
    "open('demo').steps(rank='a')": "rank must be a whole number, found 'a'",
    "open('demo').evaluation_batches('builtin', rank=True)": "rank must be a whole number, found True",
    "open('demo').export(5)": "directory must be a path, found 5",
    "open('demo').train(hostfile=5)": "hostfile must be a path, found 5",
    "study('throughput', 5)": "run file 5 does not exist",
}


@pytest.mark.slow
def test_arguments_of_another_type_are_refused_in_our_own_words() -> None:
    """In a process of its own: the tests' check of types would refuse them first."""
    script = (
        "import evenpack, json, sys\n"
        "found, names = {}, {name: getattr(evenpack, name) for name in evenpack.__all__}\n"
        "for call in json.loads(sys.argv[1]):\n"
        "    try: found[call] = f'no error: {eval(call, names)}'\n"
        "    except evenpack.EvenpackError as error: found[call] = str(error)\n"
        "    except Exception as error: found[call] = f'traceback: {error!r}'\n"
        "print(json.dumps(found))"
    )
    calls = json.dumps(list(OF_ANOTHER_TYPE))
    done = subprocess.run([sys.executable, "-c", script, calls], capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    assert {call: message for call, message in found.items() if OF_ANOTHER_TYPE[call] not in message} == {}


def test_a_name_that_is_not_exported_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'evenpack' has no attribute 'PipelineSettings'"):
        evenpack.PipelineSettings  # noqa: B018
