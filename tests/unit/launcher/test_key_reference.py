"""The reference of keys agrees with the schemas and is complete, and its pages are up to date."""

import runpy
from typing import Annotated, Any, Literal

import pytest
from json_schemas import accepts
from pydantic import Field
from repository import ROOT

from evenpack.config import _USUAL_NAMES, Section, usual_keys
from evenpack.errors import ConfigError
from evenpack.launcher.key_reference import FILES, Key, find_keys, json_schema, keys_at, keys_of, schema_of
from evenpack.shipped import first_comment, shipped_run_files
from evenpack.units import Tokens
from evenpack.yaml_text import read_yaml

WITHOUT_UNIT = {
    "seed",
    "seeds",
    "weight",
    "weights",
    "learning_rate",
    "weight_decay",
    "beta1",
    "beta2",
    "momentum",
    "epsilon",
    "local_rotary_base",
    "norm_epsilon",
    "degree",
    "rotary_base",
    "factor",
    "low_frequency_factor",
    "high_frequency_factor",
    "gradient_clipping",
    "zero_stage",
    "end_of_text_id",
    "smoothing",
    "skip_steps",
    "options",
}
"""Numbers that count nothing, or each of its own kind."""


class Plain(Section):
    """A section alone."""

    name: str = Field(min_length=1)
    """What it is called."""
    size: Tokens | None = Field(default=None, ge=1, le=1 << 22)
    """How large it is,
    in a docstring of two lines."""


class Round(Plain):
    """One that is round."""

    kind: Literal["round"] = "round"
    radius: float = Field(default=0.5, gt=0.0)
    """From the middle to the edge."""


class Square(Plain):
    """One that has corners."""

    kind: Literal["square"]
    corners: tuple[Plain, ...] = ()
    """All of them."""


class Whole(Section):
    """A file."""

    shapes: dict[str, Annotated[Round | Square, Field(discriminator="kind")]] = Field(min_length=1)
    """What there is."""
    best: Plain = Plain(name="x")


KEYS = {key.place: key for key in keys_of(Whole)}


@pytest.fixture(scope="module", params=FILES)
def keys(request: pytest.FixtureRequest) -> tuple[Key, ...]:
    """Returns the keys of each kind of file."""
    return keys_of(schema_of(request.param))


def test_keys_come_in_the_order_of_the_file_and_those_of_several_kinds_once() -> None:
    assert list(KEYS) == [
        "shapes",
        "shapes.NAME.kind",
        "shapes.NAME.name",
        "shapes.NAME.size",
        "shapes.NAME.radius",
        "shapes.NAME.corners",
        "shapes.NAME.corners[].name",
        "shapes.NAME.corners[].size",
        "best",
        "best.name",
        "best.size",
    ]
    assert len(KEYS) == len(keys_of(Whole))


def test_a_key_says_type_limits_unit_default_and_meaning() -> None:
    size = KEYS["shapes.NAME.size"]
    assert (size.type, size.limits, size.unit, size.default) == (
        "whole number",
        "at least 1, at most 2^22",
        "tokens",
        "null",
    )
    assert size.meaning == "How large it is, in a docstring of two lines."
    radius = KEYS["shapes.NAME.radius"]
    assert (radius.type, radius.limits, radius.unit, radius.default) == ("number", "above 0", None, "0.5")
    assert KEYS["shapes.NAME.name"].default is None
    assert KEYS["shapes"].type == "sections by name"
    assert (KEYS["best"].default, KEYS["best"].meaning) == ("{}", "A section alone.")


def test_a_union_lists_its_kinds_and_each_key_the_kinds_that_have_it() -> None:
    assert [(kind.name, kind.about) for kind in KEYS["shapes"].variants] == [
        ("round", "One that is round."),
        ("square", "One that has corners."),
    ]
    assert (KEYS["shapes.NAME.kind"].type, KEYS["shapes.NAME.kind"].default) == ("one of round, square", "round")
    assert KEYS["shapes.NAME.name"].kinds == ()
    assert KEYS["shapes.NAME.radius"].kinds == ("round",)
    assert KEYS["shapes.NAME.corners[].size"].kinds == ("square",)


def test_a_key_is_found_below_a_name_of_the_users_and_below_an_entry_of_a_list() -> None:
    whole = keys_of(Whole)
    for asked, found in {
        "shapes.mine.radius": "shapes.NAME.radius",
        "shapes.mine": "shapes",
        "shapes.mine.corners.name": "shapes.NAME.corners[].name",
        "shapes.mine.corners[0].name": "shapes.NAME.corners[].name",
    }.items():
        assert [key.place for key in find_keys(whole, asked)] == [found]
    assert [key.name for key in keys_at(whole, "best")] == ["best", "name", "size"]


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
        ("packs_per_step", ["training.packs_per_step"]),
        ("pack-length", ["data.pack_length"]),
        ("training.lr", ["optimizer.learning_rate"]),
        ("lr", ["optimizer.learning_rate"]),
        ("batch_size", ["training.packs_per_step", "training.packs_per_micro_batch"]),
        ("Grad-Clip", ["training.gradient_clipping"]),
        ("steps", ["training.steps"]),
        ("seed", ["run.seed", "data.recipe.seed", "data.shuffle.seed"]),
        ("data.seed", None),
        ("fa4", ["attention.backend"]),
        ("flash_attention_4", ["attention.backend"]),
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


def test_every_key_and_every_kind_says_what_it_means(keys: tuple[Key, ...]) -> None:
    assert [key.place for key in keys if not key.meaning or not all(kind.about for kind in key.variants)] == []


def test_every_number_has_a_unit_unless_it_counts_nothing(keys: tuple[Key, ...]) -> None:
    numbers = [key for key in keys if "number" in key.type]
    assert numbers
    for key in numbers:
        assert (key.unit is None) == (key.name in WITHOUT_UNIT), key.place


def test_all_kinds_of_sources_and_all_families_are_there() -> None:
    of_run = {key.place: key for key in keys_of(schema_of("run"))}
    assert {kind.name for kind in of_run["model"].variants} >= {"gpt2", "bert", "llama"}
    assert of_run["model.token_types"].kinds == ("bert",)
    assert {kind.name for kind in of_run["data.sources"].variants} >= {"jsonl", "text", "hdf5", "hub"}


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
