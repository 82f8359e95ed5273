"""Options of an input of lengths, and of its packs."""

from dataclasses import dataclass, fields
from typing import Annotated

import typer

from evenpack.errors import ConfigError

_OF_READING = {"name", "histogram", "column", "tokenizer", "glue_dir"}
"""Options by which an input is read, each of which suits some kinds of input."""


@dataclass(frozen=True, kw_only=True)
class SubjectOptions:
    """The input of lengths, and its packs."""

    name: Annotated[str | None, typer.Option(help="Name of a histogram in a .json file of several.")] = None
    histogram: Annotated[
        bool,
        typer.Option("--histogram", help="INPUT (.npy, text) counts sequences by length; index i: length i + 1."),
    ] = False
    column: Annotated[
        str | None, typer.Option(help="Integers, lists (their lengths) or text; A,B: a pair of texts.")
    ] = None
    tokenizer: Annotated[
        str | None, typer.Option(metavar="NAME|FOLDER", help="Measures text, including special tokens.")
    ] = None
    glue_dir: Annotated[
        str | None,
        typer.Option(
            metavar="FOLDER", help="For glue:TASK: folder with CoLA/train.tsv and the like. Needs --tokenizer."
        ),
    ] = None
    source: Annotated[str | None, typer.Option(help="One source of a run. Default: all together.")] = None
    pack_length: Annotated[
        int | None, typer.Option(help="Slots of a pack. Default: the run's, or the longest length.")
    ] = None
    long: Annotated[
        str,
        typer.Option(metavar="error|truncate|drop|split", help="What to do with sequences longer than --pack-length."),
    ] = "error"

    def refuse_all_but(self, *accepted: str, source: str, what: str) -> None:
        """Checks the options. Raises: ConfigError for an option that does not apply to `source`, which is `what`."""
        for option in fields(self):
            is_given = option.name in _OF_READING and getattr(self, option.name) != option.default
            if is_given and option.name not in accepted:
                takes = " and ".join(_flag(name) for name in accepted)
                raise ConfigError(
                    f"{_flag(option.name)} does not apply to {source}, which is {what}: that "
                    f"takes {takes or 'no such option'}"
                )


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
