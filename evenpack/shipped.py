"""The run files that come with evenpack, by name: `demo`, `mlperf/bert_large_packed`, `studies/equivalence_mini`."""

import re
from functools import cache
from itertools import takewhile
from pathlib import Path

_PACKAGE = Path(__file__).parent


@cache
def shipped_run_files() -> dict[str, Path]:
    """Returns their paths by name, sorted. A name is the path below the folder `configs`, without `.yaml`."""
    folder = _configs()
    found = {path.relative_to(folder).as_posix().removesuffix(".yaml"): path for path in folder.rglob("*.yaml")}
    return dict(sorted(found.items()))


def names_run_file(word: str | Path) -> bool:
    """Returns whether a word that may name other inputs too names a run file: one in .yaml, or a shipped one.

    A file or folder here that has the name of a shipped one comes before it.
    """
    path = Path(word)
    return path.suffix in (".yaml", ".yml") or (path.as_posix() in shipped_run_files() and not path.exists())


def first_comment(path: Path) -> str:
    """Returns the description of a run file: the first sentence of the comment at its beginning, without a command."""
    lines = takewhile(re.compile(r"# ?\S").match, path.read_text(encoding="utf-8").splitlines())
    words = " ".join(line.removeprefix("#").strip() for line in lines)
    sentence = re.match(r".*?\.(?= [A-Z]|$)", words)
    return f"{(sentence.group() if sentence else words).rstrip('.:')}."


def _configs() -> Path:
    """Returns their folder: inside the package in a wheel, beside it in a checkout."""
    inside = _PACKAGE / "configs"
    return inside if inside.is_dir() else _PACKAGE.parent / "configs"
