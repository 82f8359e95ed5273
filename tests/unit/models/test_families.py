"""The registry of model families: accepted and refused ones, and that no other code names a family."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import evenpack
from evenpack.errors import ConfigError
from evenpack.models.families import config_of, family_of, find_family, known_families

PACKAGE = Path(evenpack.__file__).parent
TOKENIZERS = (PACKAGE / "data" / "config.py", PACKAGE / "data" / "prepare", PACKAGE / "data" / "tokenizers")
"""Kinds of tokenizers are not model families."""


@pytest.mark.parametrize("name", known_families())
def test_each_family_is_whole(name: str) -> None:
    family = find_family(name)
    assert family.name == name
    section = config_of(name).model_validate({"kind": name})
    assert family_of(section) is family
    assert set(family.recipes) <= {"documents", "concat", "padding", "sentence_pairs", "masked_pairs"}
    assert family.load_model().__name__
    assert family.huggingface is None or family.load_huggingface().model_type


def test_an_unknown_family_is_reported_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=f"'brt'; did you mean 'bert'\\? known: {', '.join(known_families())}"):
        find_family("brt")


def test_a_run_file_is_checked_without_loading_torch_or_another_family() -> None:
    script = (
        "import sys\n"
        "from evenpack.config import validate\n"
        "from evenpack.engine.config import RunConfig\n"
        "from evenpack.models.families import config_of\n"
        "config_of('gpt2')\n"
        "print(sorted(name for name in sys.modules if name in ('torch', 'transformers', 'evenpack.models.bert')))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("if config.kind == 'gpt2': pass", ["'gpt2'"]),
        ("from evenpack.models.bert.config import BertConfig", ["evenpack.models.bert.config", "BertConfig"]),
        ("'''Speaks of gpt2 and Bert.'''\nx = 'bert_large_estimate'", []),
        ("def load_gpt2(): pass\nclass Gpt2Thing: pass\ny = model.bert", ["load_gpt2", "Gpt2Thing", "bert"]),
        ("raise ConfigError('set model.kind=bert')", ["'set model.kind=bert'"]),
    ],
)
def test_the_search_for_families_finds_code_that_names_one(source: str, found: list[str]) -> None:
    assert sorted(_names_of_families(ast.parse(source))) == sorted(found)


def test_no_code_outside_the_models_names_a_family() -> None:
    sources = {
        path.relative_to(PACKAGE): path.read_text(encoding="utf-8")
        for path in PACKAGE.rglob("*.py")
        if not path.is_relative_to(PACKAGE / "models") and not any(path.is_relative_to(place) for place in TOKENIZERS)
    }
    assert len(sources) > 100
    speaking = {path: text for path, text in sources.items() if any(name in text.lower() for name in known_families())}
    found = {f"{path}: {name}" for path, text in speaking.items() for name in _names_of_families(ast.parse(text))}
    assert found == set()


def _names_of_families(tree: ast.AST) -> Iterator[str]:
    """Returns identifiers and modules with a family's name, and strings that are one or set `model.kind` to one."""
    families = known_families()
    for node in ast.walk(tree):
        for name in _identifiers(node):
            if any(family in name.lower() for family in families):
                yield name
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            kinds = [text for family in families for text in (f"kind={family}", f"kind: {family}", f"kind {family}")]
            if node.value in families or any(kind in node.value for kind in kinds):
                yield repr(node.value)


def _identifiers(node: ast.AST) -> list[str]:
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name) | ast.arg(arg=name) | ast.alias(name=name):
            return [name]
        case ast.FunctionDef(name=name) | ast.ClassDef(name=name) | ast.keyword(arg=str(name)):
            return [name]
        case ast.ImportFrom(module=str(name)):
            return [name]
    return []
