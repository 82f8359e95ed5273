"""Installs the packages that evenpack, its measurements and its GPU tests need; never another PyTorch.

    python benchmarks/gpu_day/install.py                                  what is missing, from the package index
    python benchmarks/gpu_day/install.py --wheels DIRECTORY --target SITE the wheels of a folder, without a network

A folder's wheels are installed as they are, without looking for what they depend on. A package that fails is named and
stops no other; the exit code is then 1, as where something that is needed is still missing.
"""

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import distributions
from pathlib import Path

ROOT = Path(__file__).parents[2]
PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--no-cache-dir", "--quiet")
_NEVER = "torch"


def required() -> list[str]:
    """Returns the requirements of evenpack, of what trains with it, of HDF5 corpora and of the tests."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    trains = [one for one in (*extras["torch"], *extras["train"]) if name_of(one) != project["name"]]
    return [*project["dependencies"], *trains, "beartype", "h5py", "pytest"]


def name_of(requirement: str) -> str:
    """Returns the package of `numpy>=2`, or of the wheel `numpy-2.3-cp312-cp312-linux_x86_64.whl`, as pip compares
    them."""
    first = r"-" if requirement.endswith(".whl") else r"[\s<>=!~\[;]"
    return re.sub(r"[-_.]+", "-", re.split(first, requirement.strip(), maxsplit=1)[0]).lower()


def installed(target: Path | None) -> dict[str, str]:
    """Returns the version of each package that this Python finds, in `target` first."""
    found: dict[str, str] = {}
    for one in distributions(path=[*([] if target is None else [str(target)]), *sys.path]):
        found.setdefault(name_of(one.metadata["Name"]), one.version)
    return found


def install_wheels(wheels: Path, target: Path) -> list[str]:
    """Installs the wheels whose version is not there. Returns the names of those that failed.

    Each goes into a folder of its own first: pip overwrites or leaves out what two have in common (`bin`).
    """
    present = installed(target)
    wanted = [one for one in sorted(wheels.glob("*.whl")) if present.get(name_of(one.name)) != one.name.split("-")[1]]
    wanted = [one for one in wanted if name_of(one.name) != _NEVER]
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(8) as pool:
        apart = [Path(folder) / one.stem for one in wanted]
        commands = [
            [*PIP, "--no-index", "--no-deps", "--no-compile", "--target", str(place), str(one)]
            for one, place in zip(wanted, apart, strict=True)
        ]
        codes = list(pool.map(lambda command: subprocess.run(command, check=False).returncode, commands))
        for place, code in zip(apart, codes, strict=True):
            if code == 0:
                shutil.copytree(place, target, dirs_exist_ok=True)
    return [one.name for one, code in zip(wanted, codes, strict=True) if code]


def install_missing(requirements: Sequence[str]) -> list[str]:
    """Installs from the index, one by one, those of which there is no version. Returns those that failed."""
    present = installed(None)
    wanted = [one for one in requirements if name_of(one) not in (*present, _NEVER)]
    return [one for one in wanted if subprocess.run([*PIP, one], check=False).returncode]


def main() -> int:
    """Returns 1 if a package failed or is still missing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--wheels", type=Path)
    parser.add_argument("--target", type=Path)
    given = parser.parse_args()
    if (given.wheels is None) != (given.target is None):
        parser.error("--wheels and --target belong together")
    failed = install_missing(required()) if given.wheels is None else install_wheels(given.wheels, given.target)
    present = installed(given.target)
    missing = [one for one in required() if name_of(one) not in present]
    print(f"failed: {', '.join(failed) or 'nothing'}; missing: {', '.join(missing) or 'nothing'}")
    return 1 if failed or missing else 0


if __name__ == "__main__":
    sys.exit(main())
