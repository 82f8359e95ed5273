"""`import evenpack` exports its names and loads them when they are used."""

import ast
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


def test_a_name_that_is_not_exported_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'evenpack' has no attribute 'PipelineSettings'"):
        evenpack.PipelineSettings  # noqa: B018


def test_the_package_says_that_it_is_typed() -> None:
    assert Path(evenpack.__file__).with_name("py.typed").is_file()
