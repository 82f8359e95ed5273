"""Whose an output directory is: the claim of the process that writes a run's files.

Rank 0 of a start keeps `OUTPUT_DIR/.writer` locked as long as it lives, and has written its claim into it. Where a file
system has no locks, or has lost one, a later start replaces the claim. So whatever publishes or removes a file of the
run reads the claim again immediately before: a process that was stopped meanwhile changes nothing any more.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from evenpack.errors import RunError
from evenpack.files import explained

WRITER = ".writer"
"""Name of the file in a run's output directory."""

_claims: dict[Path, bytes] = {}
"""What this process has written, by the directories that it owns."""


@contextmanager
def owning(output_dir: Path, claim: bytes) -> Iterator[None]:
    """Makes this process the owner, within the block, of a directory into whose `WRITER` it has written `claim`."""
    place = output_dir.absolute()
    _claims[place] = claim
    try:
        yield
    finally:
        del _claims[place]


def require_owned(output_dir: Path) -> None:
    """Checks that no later start has taken a directory that this process owns; that of nobody is not checked.

    Raises: RunError if the directory is another's now, or if that cannot be told.
    """
    claim = _claims.get(output_dir.absolute())
    if claim is None:  # this process writes a run's files without a start: a part of evenpack in other code
        return
    then = "leave run.output_dir alone while a run is on: this one writes nothing more, and ends"
    with explained(output_dir / WRITER, then=then, missing=True):
        found = (output_dir / WRITER).read_bytes()
    if found != claim:
        raise RunError(
            f"another start of the run has taken {output_dir} since this one was last seen: this one has written and "
            "removed nothing more, and ends"
        )
