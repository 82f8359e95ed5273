"""The `~` of a path is expanded wherever a user may give one: on the command line, in run files, in Python."""

import importlib
import json
import pkgutil
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import pytest
import typer
from pydantic import BeforeValidator
from run_files import run_values, write_run_file

import evenpack
from evenpack.api.run import Run
from evenpack.config import Section
from evenpack.console import Report
from evenpack.data.tokenizers.config import BertTokenizer
from evenpack.errors import EvenpackError
from evenpack.files import expand_user, expand_users
from evenpack.launcher.cli.app import app
from evenpack.launcher.cli.arguments import reporting


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A home of one's own; the current directory is another, and nobody may make a folder `~` there."""
    (tmp_path / "home").mkdir()
    (tmp_path / "here").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path / "here")
    yield tmp_path / "home"
    assert list((tmp_path / "here").iterdir()) == []


def test_arguments_are_expanded_at_their_beginning_and_nowhere_else(home: Path) -> None:
    assert expand_users(["~/a", Path("~/b"), "a/~", None, 3]) == [f"{home}/a", home / "b", "a/~", None, 3]
    assert expand_users("~nobody_of_this_name/a") == "~nobody_of_this_name/a"
    assert expand_user("~") == home


def commands(group: typer.Typer) -> Iterator[Callable[..., Any]]:
    yield from (one.callback for one in group.registered_commands if one.callback is not None)
    for inner in group.registered_groups:
        assert inner.typer_instance is not None
        yield from commands(inner.typer_instance)


def test_every_command_expands_all_its_arguments(home: Path) -> None:
    found, made = list(commands(app)), reporting(Report, saves=False)
    assert len(found) > 20
    for command in found:
        assert command.__code__ is made.__code__, f"{command.__name__} is without it"
    given: dict[str, Any] = {}

    def keep(*, data: list[str], output: Path, steps: int) -> Report:
        given.update(data=data, output=output, steps=steps)
        return Report(value=[*given])

    reporting(keep, saves=True)(data=["~/a", "b"], output=Path("~/c"), steps=3, save=Path("~/kept.json"))
    assert given == {"data": [f"{home}/a", "b"], "output": home / "c", "steps": 3}
    assert json.loads((home / "kept.json").read_text()) == ["data", "output", "steps"]


def bare_paths(hint: Any) -> bool:
    """Returns whether a type has a path in it that nothing expands."""
    if typing.get_origin(hint) is Annotated:
        inner, *marks = typing.get_args(hint)
        return not any(isinstance(mark, BeforeValidator) for mark in marks) and bare_paths(inner)
    return hint is Path or any(map(bare_paths, typing.get_args(hint)))


def sections(base: type[Section]) -> Iterator[type[Section]]:
    for section in base.__subclasses__():
        yield section
        yield from sections(section)


def test_every_path_of_a_run_file_is_expanded() -> None:
    for module in pkgutil.walk_packages(evenpack.__path__, "evenpack."):
        if module.name.endswith(("config", "section", "study_file")):
            importlib.import_module(module.name)
    found = [one for one in sections(Section) if one.__module__.startswith("evenpack.")]
    names = {one.__name__ for one in found}
    assert {"RunSection", "StudySection", "FinetuneDataSection", "JsonlSource", "BertTokenizer"} <= names
    for section in found:
        hints = typing.get_type_hints(section, include_extras=True)
        bare = [name for name in section.model_fields if bare_paths(hints[name])]
        assert not bare, f"{section.__name__}.{bare} needs UserPath"


def test_what_python_is_given_is_expanded(home: Path) -> None:
    values = run_values("gpt2", home, data={"tokenizer": {"kind": "hub", "name": "~/tokenizer"}})
    write_run_file(home / "run.yaml", values)
    run = evenpack.open("~/run.yaml", "data.prepared_dir=~/data", "training.cost_model=~/cost.json")
    assert (run.run_file, run.config.prepared_dir) == (home / "run.yaml", home / "data")
    assert run.config.data.tokenizer.name == str(home / "tokenizer")  # type: ignore[union-attr]

    assert BertTokenizer(kind="bert", name="~/tokenizer").name == str(home / "tokenizer")
    loader = evenpack.Loader(
        [[1, 2, 3]] * 4, pack_length=8, packs_per_step=1, vocabulary_size=9, padding_token=0, cache="~/c"
    )
    next(iter(loader))
    assert list((home / "c").iterdir())
    calls: dict[str, Callable[[], Any]] = {
        "Loader": lambda: evenpack.Loader(
            "~/corpus", pack_length=8, packs_per_step=1, vocabulary_size=9, padding_token=0
        ),
        "study of lengths": lambda: evenpack.study("packing", "~/corpus.npy"),
        "study of a run": lambda: evenpack.study("throughput", "~/corpus.yaml"),
        "cost model of a study": lambda: evenpack.study("imbalance", "squad", cost_model="~/corpus.json"),
        "prepared data": lambda: evenpack.PreparedData.open(Path("~/corpus"), run.config.data),
        "hostfile": lambda: Run.train(run, hostfile="~/corpus"),
    }
    for name, call in calls.items():
        with pytest.raises(EvenpackError) as error:
            call()
        assert f"{home}/corpus" in str(error.value), f"{name}: {error.value}"
