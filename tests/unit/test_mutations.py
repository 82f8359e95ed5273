"""The kept mutations still apply to the code, and the tests that see them are there; `scripts/mutations` runs them."""

from pathlib import Path

import pytest
from mutations.catalogue import Mutation, read_catalogue
from mutations.running import Copy
from repository import ROOT

CATALOGUE = read_catalogue()


def test_every_mutation_applies_once_and_its_tests_exist() -> None:
    assert [mutation.name for mutation in CATALOGUE if not mutation.tests] == []
    problems = {mutation.name: mutation.problem(ROOT) for mutation in CATALOGUE}
    assert {name: problem for name, problem in problems.items() if problem is not None} == {}


def test_names_are_unique() -> None:
    assert len({mutation.name for mutation in CATALOGUE}) == len(CATALOGUE)


def small_checkout(folder: Path) -> Path:
    (folder / "tests").mkdir(parents=True)
    (folder / "some.py").write_text("def twice(number):\n    return 2 * number\n")
    (folder / "tests/test_some.py").write_text(
        "from some import twice\n\n\ndef test_two():\n    assert twice(2) == 4\n\n\n"
        "def test_one():\n    assert twice(1) == 2\n"
    )
    return folder


def change(becomes: str, *tests: str) -> Mutation:
    return Mutation(
        name="a change",
        file="some.py",
        text="2 * number",
        becomes=becomes,
        tests=tuple(f"tests/test_some.py::{test}" for test in tests),
        unseen="",
    )


@pytest.mark.parametrize(
    ("mutation", "problem"),
    [
        (change("number", "test_one"), None),
        (change("2 * number", "test_one"), "it changes nothing"),
        (change("2 *", "test_one"), "some.py is not Python after it"),
        (change("number", "test_three"), "there is no test tests/test_some.py::test_three"),
    ],
)
def test_what_does_not_apply_is_said(mutation: Mutation, problem: str | None, tmp_path: Path) -> None:
    found = mutation.problem(small_checkout(tmp_path))
    assert found == problem if problem is None else str(found).startswith(problem)


@pytest.mark.slow
def test_a_mutation_is_seen_by_a_test_that_fails_and_the_copy_is_as_before(tmp_path: Path) -> None:
    checkout = small_checkout(tmp_path / "checkout")
    with Copy.of(checkout, imports=["pytest"]) as copy:
        outcomes = [
            copy.try_out(change(becomes, *tests)).outcome
            for becomes, *tests in (
                ("number + 2", "test_two"),
                ("number + 2", "test_two", "test_one"),
                ("4 // number", "test_one"),
                ("number.missing", "test_one"),
            )
        ]
        assert outcomes == ["UNSEEN", "seen", "seen", "seen"]
        assert (copy.root / "some.py").read_text() == (checkout / "some.py").read_text()
        assert copy.run(["tests/test_some.py"], limit=600.0)["code"] == 0
