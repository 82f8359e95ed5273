"""What a number comes from: the commit of the source."""

import subprocess
from pathlib import Path


def commit_of_source() -> str | None:
    """Returns the commit of the source, with a mark if it was changed since; None if it is not a checkout."""
    root = Path(__file__).parents[2]
    if not (root / ".git").exists():
        return None
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
