"""The READMEs of the rooms of `data/` name what exists."""

import re
from pathlib import Path

import pytest

import evenpack

PACKAGE = Path(evenpack.__file__).parent
READMES = sorted((PACKAGE / "data").rglob("README.md"))
SOURCE = "\n".join(path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*.py"))


def test_every_room_has_a_readme_of_a_screen() -> None:
    rooms = {path.parent for path in (PACKAGE / "data").glob("*/__init__.py")}
    assert {path.parent for path in READMES} == rooms | {PACKAGE / "data"}
    assert max(len(path.read_text(encoding="utf-8").splitlines()) for path in READMES) <= 40


@pytest.mark.parametrize("readme", READMES, ids=lambda path: path.parent.name)
def test_the_files_and_names_of_a_readme_exist(readme: Path) -> None:
    text = readme.read_text(encoding="utf-8")
    files = set(re.findall(r"(?<![\w/.])(?:\.\./)?[a-z_/]+\.py\b", text))
    assert len(files) > 2
    roots = (readme.parent, PACKAGE, PACKAGE.parent)
    assert [name for name in files if not any((root / name).exists() for root in roots)] == []
    camel_case_or_constant = re.findall(r"\b(?:[A-Z][a-z]+){2,}\b|\b_?[A-Z]{2,}_[A-Z_]+\b", text)
    quoted = re.findall(r"`([a-z]+_[a-z_]+)`", text)
    names = {*camel_case_or_constant, *quoted}
    known_elsewhere = {"AutoTokenizer"}
    assert [name for name in names - known_elsewhere if not re.search(rf"\b{name}\b", SOURCE)] == []
