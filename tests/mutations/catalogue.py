"""Harmful changes of the code, kept with the tests that see them: `catalogue.toml`."""

import ast
import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path

CATALOGUE = Path(__file__).with_name("catalogue.toml")


@dataclass(frozen=True, kw_only=True)
class Mutation:
    """One change of one place."""

    name: str
    file: str
    """Path below the checkout."""
    text: str
    """The text that is replaced; it is in the file exactly once."""
    becomes: str
    tests: tuple[str, ...]
    """Ids of test functions, `PATH::NAME` or `PATH::CLASS::NAME`, at least one of which fails with the change."""
    unseen: str
    """What would be wrong and go unseen without these tests, in a line."""

    def problem(self, root: Path) -> str | None:
        """Returns why the change does not apply to the checkout at `root`, or which test is not there; None if it does.

        It runs nothing.
        """
        path = root / self.file
        if not path.is_file():
            return f"{self.file} does not exist"
        found = path.read_text(encoding="utf-8").count(self.text)
        if found != 1:
            return f"its text is {found} times in {self.file}, expected once"
        if self.text == self.becomes:
            return "it changes nothing"
        try:
            ast.parse(self.applied(root))
        except SyntaxError as error:
            return f"{self.file} is not Python after it: {error}"
        missing = [test for test in self.tests if not _exists(root, test)]
        return f"there is no test {missing[0]}" if missing else None

    def applied(self, root: Path) -> str:
        """Returns the file's text with the change."""
        return (root / self.file).read_text(encoding="utf-8").replace(self.text, self.becomes)


def read_catalogue(path: Path = CATALOGUE) -> tuple[Mutation, ...]:
    """Reads the catalogue; keys that are missing or unknown are errors."""
    entries = tomllib.loads(path.read_text(encoding="utf-8"))["mutation"]
    return tuple(Mutation(**entry | {"tests": tuple(entry["tests"])}) for entry in entries)


def _exists(root: Path, test: str) -> bool:
    path, _, name = test.partition("::")
    return name in _functions(root / path)


@cache
def _functions(path: Path) -> frozenset[str]:
    """Returns the names of a file's functions and of its classes' methods; none if there is no such file."""
    if not path.is_file():
        return frozenset()
    names = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        inside = node.body if isinstance(node, ast.ClassDef) else []
        names |= {f"{node.name}::{one.name}" for one in inside if isinstance(one, ast.FunctionDef)}
        names |= {node.name} if isinstance(node, ast.FunctionDef) else set()
    return frozenset(names)
