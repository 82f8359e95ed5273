"""The reference of keys agrees with the schemas and is complete, and its pages are up to date."""

import runpy
from typing import Any

import pytest
from json_schemas import accepts
from repository import ROOT

from evenpack.config import _USUAL_NAMES, usual_keys
from evenpack.errors import ConfigError
from evenpack.launcher.key_reference import FILES, find_keys, json_schema, keys_at, keys_of, schema_of
from evenpack.shipped import first_comment, shipped_run_files
from evenpack.yaml_text import read_yaml


def test_a_key_is_found_below_a_name_of_the_users_and_below_an_entry_of_a_list() -> None:
    run = keys_of(schema_of("run"))
    for asked, found in {
        "data.sources.mine.text_key": "data.sources.NAME.text_key",
        "data.sources.mine": "data.sources",
        "stages.step": "stages[].step",
        "stages[0].step": "stages[].step",
    }.items():
        assert {key.place for key in find_keys(run, asked)} == {found}
    assert {key.place.partition(".")[0] for key in keys_at(run, "metrics")} == {"metrics"}


def test_keys_of_one_name_that_mean_different_things_are_all_found() -> None:
    found = find_keys(keys_of(schema_of("run")), "data.recipe.max_sequence_length")
    assert [key.kinds for key in found] == [
        ("documents",),
        ("concat",),
        ("padding",),
        ("sentence_pairs",),
        ("masked_pairs",),
    ]


@pytest.mark.parametrize(
    ("place", "message"),
    [
        ("training.stepps", "did you mean training.steps"),
        ("kind", r"did you mean data\.sources\.NAME\.kind"),  # of most sections
        ("stages.setp", r"stages\.step"),
        ("qqq", "`evenpack config explain` lists all keys"),
        ("run.name.first", "there is no key"),
    ],
)
def test_an_unknown_key_is_refused_with_the_nearest_ones(place: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        find_keys(keys_of(schema_of("run")), place)


@pytest.mark.parametrize(
    ("asked", "found"),
    [
        ("pack-length", ["data.pack_length"]),
        ("training.lr", ["optimizer.learning_rate"]),
        ("batch_size", ["training.packs_per_step", "training.packs_per_micro_batch"]),
        ("Grad-Clip", ["training.gradient_clipping"]),
        ("seed", ["run.seed", "data.recipe.seed", "data.shuffle.seed"]),
        ("data.seed", None),
        ("fa4", ["attention.backend"]),
    ],
)
def test_a_key_is_found_by_its_usual_name_and_without_its_section(asked: str, found: list[str] | None) -> None:
    run = keys_of(schema_of("run"))
    if found is None:
        with pytest.raises(ConfigError):
            find_keys(run, asked)
    else:
        assert list(dict.fromkeys(key.place for key in find_keys(run, asked))) == found


def test_each_usual_name_leads_to_keys_that_exist() -> None:
    places = {key.place for file in ("run", "finetune") for key in keys_of(schema_of(file))}
    names = [name for line in _USUAL_NAMES for name in line.split()]
    assert len(names) == len(set(names))
    for name in names:
        assert usual_keys(name)
        assert set(usual_keys(name)) <= places, name


def test_an_unknown_kind_of_file_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="did you mean 'finetune'"):
        schema_of("finetunes")


@pytest.mark.parametrize("file", FILES)
def test_every_key_and_every_kind_says_what_it_means(file: str) -> None:
    keys = keys_of(schema_of(file))
    assert [key.place for key in keys if not key.meaning or not all(kind.about for kind in key.variants)] == []


def test_the_pages_of_the_documentation_are_those_of_todays_schemas() -> None:
    pages = runpy.run_path(str(ROOT / "scripts/write_run_file_pages.py"))["pages"]()
    assert set(pages) == {"run_file.md", "other_files.md"}
    for name, text in pages.items():
        stale = f"docs/{name} is stale: run `python scripts/write_run_file_pages.py`"
        assert (ROOT / "docs" / name).read_text(encoding="utf-8") == text, stale


def shipped(name: str) -> Any:
    return read_yaml(shipped_run_files()[name].read_text(encoding="utf-8"), name)


def test_the_json_schema_accepts_every_shipped_file() -> None:
    kinds = {"finetune": "finetune", "studies": "equivalence"}
    schemas = {kind: json_schema(kind) for kind in FILES}
    for name in shipped_run_files():
        values = shipped(name)
        own = "chunking" if "chunking" in values else None
        assert accepts(schemas[own or kinds.get(name.partition("/")[0], "run")], values), name


@pytest.mark.parametrize(
    ("section", "values"),
    [
        ("training", {"stepps": 3}),
        ("model", {"kind": "gpt3"}),
        ("model", {"token_types": 2}),
        ("data", {"shuffle": "gird"}),
        ("data", {"sources": {"builtin": {"kind": "builtin", "path": "x"}}}),
    ],
)
def test_the_json_schema_refuses_what_the_run_file_may_not_hold(section: str, values: dict[str, Any]) -> None:
    file = shipped("demo")
    assert accepts(json_schema("run"), file)
    assert not accepts(json_schema("run"), {**file, section: {**file[section], **values}})


def test_the_json_schema_accepts_short_shuffles_and_sizes_with_units() -> None:
    file = shipped("demo")
    for shuffle in ("grid", {"kind": "grid", "memory": "4GiB"}):
        assert accepts(json_schema("run"), {**file, "data": {**file["data"], "shuffle": shuffle}})


def test_every_shipped_file_says_what_it_is() -> None:
    for name, path in shipped_run_files().items():
        assert first_comment(path), name
