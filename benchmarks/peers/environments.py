"""Creates the environments of peers in build/peers, each with the versions of environments.toml.

    python benchmarks/peers/environments.py [trl transformers torchtitan litdata packers]

The environment that runs this stays as it is. One that is complete is left alone; delete its folder to make it again.
"""

import argparse
import re
import subprocess
import sys
import tomllib
import venv
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
FOLDER = REPOSITORY / "build/peers"
ENVIRONMENTS: dict[str, dict[str, list[str]]] = tomllib.loads(
    Path(__file__).with_name("environments.toml").read_text("utf-8")
)


def python_of(name: str) -> Path:
    """Returns the interpreter of an environment, which may not exist."""
    return FOLDER / name / "bin/python"


def create(name: str) -> None:
    """Creates an environment, torch first: nothing else shall choose its version."""
    complete = FOLDER / name / "complete"
    if complete.exists():
        return
    venv.create(FOLDER / name, with_pip=True, clear=True)
    wanted = ENVIRONMENTS[name]
    pinned = re.search(r"^torch==\S+", (REPOSITORY / "constraints.txt").read_text("utf-8"), re.MULTILINE)
    assert pinned, "constraints.txt pins torch"
    _install(name, [pinned[0]])
    _install(name, wanted["packages"])
    if "without_dependencies" in wanted:
        _install(name, ["--no-deps", "--ignore-requires-python", *wanted["without_dependencies"]])
    complete.touch()


def _install(name: str, arguments: list[str]) -> None:
    subprocess.run([python_of(name), "-m", "pip", "install", "--quiet", *arguments], check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", choices=[*ENVIRONMENTS, []], metavar="NAME")
    for name in parser.parse_args().names or ENVIRONMENTS:
        print(f"{FOLDER / name}: {', '.join(ENVIRONMENTS[name]['packages'][:3])}", file=sys.stderr)
        create(name)


if __name__ == "__main__":
    main()
