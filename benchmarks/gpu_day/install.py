"""Installs the packages that evenpack and its measurements need and that are missing; never another PyTorch.

    python benchmarks/gpu_day/install.py [--wheels DIRECTORY]

With `--wheels` nothing is fetched: packages come from that folder. flash-attn is tried last and may fail: its steps
then say so.
"""

import argparse
import re
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

ROOT = Path(__file__).parents[2]
_NEVER = {"torch"}
_TESTS = ("hypothesis", "pytest", "pytest-timeout")
_OPTIONAL = "flash-attn"


def required() -> list[str]:
    """Returns the requirements of evenpack, of HDF5 corpora, figures and tests."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras: dict[str, list[str]] = project["optional-dependencies"]
    return [*project["dependencies"], "h5py", *extras["plots"], *_TESTS]


def missing(requirements: Sequence[str]) -> list[str]:
    """Returns those of which no version is installed; a version that is there is left as it is."""
    return [one for one in requirements if name_of(one) not in _NEVER and not _is_installed(name_of(one))]


def name_of(requirement: str) -> str:
    """Returns the package of a requirement such as `numpy>=2`."""
    return re.split(r"[\s<>=!~\[;]", requirement.strip(), maxsplit=1)[0]


def _is_installed(name: str) -> bool:
    try:
        version(name)
    except PackageNotFoundError:
        return False
    return True


def main() -> int:
    """Returns pip's exit code for what is needed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--wheels", type=Path)
    wheels = parser.parse_args().wheels
    origin = [] if wheels is None else ["--no-index", "--find-links", str(wheels)]
    pip = [sys.executable, "-m", "pip", "install", *origin]
    needed = missing(required())
    print(f"missing: {', '.join(needed) or 'nothing'}", flush=True)
    code = subprocess.run([*pip, *needed], check=False).returncode if needed else 0
    if missing([_OPTIONAL]):
        tried = subprocess.run([*pip, "--no-build-isolation", "--only-binary=:all:", _OPTIONAL], check=False)
        print(f"{_OPTIONAL}: {'installed' if tried.returncode == 0 else 'not to be had here'}", flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main())
