"""A number carries the commit of the package, and a mark only if the package itself was changed."""

import subprocess
from pathlib import Path

import pytest

from evenpack.engine.provenance import commit_of_source


def git(root: Path, *arguments: str) -> str:
    identity = ("-c", "user.name=a", "-c", "user.email=a@b")
    command = ["git", *identity, "-C", str(root), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def package(tmp_path: Path) -> Path:
    package = tmp_path / "package"
    package.mkdir()
    (package / "module.py").write_text("one = 1\n")
    (tmp_path / "figure.png").write_text("old")
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-qm", "first")
    return package


def test_a_package_has_the_commit_alone_also_after_a_figure_was_drawn_again(package: Path) -> None:
    assert commit_of_source(package) == git(package, "rev-parse", "HEAD")[:12]
    (package.parent / "figure.png").write_text("new")
    assert commit_of_source(package) == git(package, "rev-parse", "HEAD")[:12]


@pytest.mark.parametrize("name", ["module.py", "not_committed_yet.py"])
def test_a_changed_package_is_marked(package: Path, name: str) -> None:
    (package / name).write_text("one = 2\n")
    assert commit_of_source(package) == git(package, "rev-parse", "HEAD")[:12] + "-dirty"


def test_a_package_outside_a_checkout_has_no_commit(tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    assert commit_of_source(tmp_path / "package") is None
