"""The origin of a number: the commit of the source."""

import subprocess
from pathlib import Path

_COMMIT_CHARACTERS = 12


def commit_of_source(package_dir: Path = Path(__file__).parents[1]) -> str | None:
    """Returns the commit of a package, marked `-dirty` if its files were changed since; None if it is not a checkout.

    Files outside the package, such as a figure that has just been drawn, do not change what its numbers come from.
    """
    if not (package_dir.parent / ".git").exists():
        return None
    try:
        commit = _git(package_dir, "rev-parse", f"--short={_COMMIT_CHARACTERS}", "HEAD")
        changed = _git(package_dir, "status", "--porcelain", "--", ".")
    except (OSError, subprocess.SubprocessError):
        return None
    return f"{commit}-dirty" if changed else commit


def _git(directory: Path, *arguments: str) -> str:
    command = ["git", "-C", str(directory), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
