"""Faults between two starts of a run: a file is truncated, changed by a bit, or deleted."""

import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random

from faults.subject import SubjectRun, paths_below


@dataclass(frozen=True, kw_only=True)
class Damage:
    """A damaged file, and how it is made whole."""

    name: str
    """How it was damaged, and the kind of file, without numbers."""
    path: Path
    detail: str
    is_data: bool
    """Whether it belongs to the prepared data, which a run verifies while it trains."""
    repair: Callable[[], None]


def truncate(path: Path, random: Random) -> str:
    size = path.stat().st_size
    left = random.randrange(size) if size else 0
    with path.open("r+b") as file:
        file.truncate(left)
    return f"{size} bytes cut to {left}"


def flip_a_bit(path: Path, random: Random) -> str:
    content = bytearray(path.read_bytes())
    if not content:
        return "it is empty"
    place, bit = random.randrange(len(content)), random.randrange(8)
    content[place] ^= 1 << bit
    path.write_bytes(content)
    return f"bit {bit} of byte {place} of {len(content)}"


def delete(path: Path, _random: Random) -> str:
    path.unlink()
    return "deleted"


ACTIONS: dict[str, Callable[[Path, Random], str]] = {
    "truncated": truncate,
    "one bit changed": flip_a_bit,
    "deleted": delete,
}


def kind_of(path: Path) -> str:
    """Returns the kind of a file: its name without numbers."""
    return re.sub(r"\d+", "N", re.sub(r"[0-9a-f]{16,}", "ID", path.name))


def random_file(folders: list[Path], random: Random) -> Path | None:
    """Returns a file of a random kind; None if there is none."""
    files = [path for folder in folders for path in paths_below(folder) if path.is_file()]
    if not files:
        return None
    kind = random.choice(sorted({kind_of(path) for path in files}))
    return random.choice([one for one in files if kind_of(one) == kind])


def damage_a_file(run: SubjectRun, random: Random) -> Damage | None:
    """Damages a random file of a random kind; None if the run has none."""
    path = random_file([run.output_dir, run.data_dir], random)
    if path is None:
        return None
    action = random.choice(sorted(ACTIONS))
    saved = run.folder / "saved_copy"
    shutil.copy2(path, saved)

    def repair() -> None:
        if path.parent.is_dir():
            shutil.copy2(saved, path)

    return Damage(
        name=f"{action}: {kind_of(path)}",
        path=path,
        detail=ACTIONS[action](path, random),
        is_data=path.is_relative_to(run.data_dir),
        repair=repair,
    )
