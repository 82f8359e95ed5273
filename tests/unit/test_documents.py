"""What documents name exists: tests, files, names of the code, a command; the site stands alone."""

import re
import tomllib
from importlib.metadata import EntryPoint

import pytest
from repository import ROOT

from evenpack.launcher.cli import __main__

TESTS = ROOT / "tests"
DATA = ROOT / "evenpack/data"
READMES = sorted(DATA.rglob("README.md"))


def named_tests(document: str) -> set[str]:
    """Returns the files of tests that a document names, relative to the folder of tests."""
    return set(
        re.findall(r"`((?:unit|distributed|integration|fake_cuda)/[\w/]+\.py)`", (ROOT / document).read_text("utf-8"))
    )


def test_every_test_that_a_document_names_exists() -> None:
    names = named_tests("tests/README.md")
    assert names
    assert [name for name in sorted(names) if not (TESTS / name).is_file()] == []


def test_each_invariant_has_a_test_over_real_processes() -> None:
    rows = re.findall(r"^\| (\d) \|.*\|(.*)\|$", (ROOT / "tests/README.md").read_text("utf-8"), re.MULTILINE)
    assert [number for number, _ in rows] == list("123456789")
    for number, over_processes in rows:
        assert re.search(r"`(distributed|integration)/", over_processes), number


def test_every_room_of_the_data_has_a_readme() -> None:
    rooms = {path.parent for path in DATA.glob("*/__init__.py")}
    assert {path.parent for path in READMES} == rooms | {DATA}


def test_the_files_and_names_of_a_readme_exist() -> None:
    source = "\n".join(path.read_text("utf-8") for path in (ROOT / "evenpack").rglob("*.py"))
    known = set(re.findall(r"\w+", source)) | {"AutoTokenizer"}
    for readme in READMES:
        text = readme.read_text("utf-8")
        files = set(re.findall(r"(?<![\w/.])(?:\.\./)?[a-z_/]+\.py\b", text))
        assert len(files) > 2
        roots = (readme.parent, ROOT / "evenpack", ROOT)
        assert [name for name in files if not any((root / name).exists() for root in roots)] == [], readme
        camel_case_or_constant = re.findall(r"\b(?:[A-Z][a-z]+){2,}\b|\b_?[A-Z]{2,}_[A-Z_]+\b", text)
        quoted = re.findall(r"`([a-z]+_[a-z_]+)`", text)
        assert {*camel_case_or_constant, *quoted} <= known, readme


def test_the_command_that_an_installation_makes_is_the_one_that_is_tested() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    assert EntryPoint("evenpack", project["scripts"]["evenpack"], "console_scripts").load() is __main__.main


def test_the_site_works_without_a_server_and_without_another_host() -> None:
    """Links name files, the search index is a script, and what the pages load is in the checkout."""
    (ROOT / "build/docs/pages").mkdir(parents=True, exist_ok=True)  # where scripts/docs gathers the pages
    site = pytest.importorskip("zensical.config").parse_config(str(ROOT / "zensical.toml"))
    assert site["use_directory_urls"] is False
    assert site["plugins"]["offline"]["config"]["enabled"] is True
    loaded = [*(script["path"] for script in site["extra"]["polyfills"]), *site["extra_css"]]
    assert loaded
    assert [path for path in loaded if not (ROOT / path).is_file()] == []
    assert site["theme"]["font"] is False
