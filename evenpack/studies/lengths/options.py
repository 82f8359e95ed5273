"""What may be said about an input beside its name, and about the packs to look at it in."""

from dataclasses import dataclass, fields
from typing import Annotated

import typer

from evenpack.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class InputOptions:
    """How an input is read; named as the options of the command line."""

    name: str | None = None
    """Which of several histograms in a .json file."""
    histogram: bool = False
    """The numbers count sequences by length: index i holds those of length i + 1."""
    column: str | None = None
    """The column of a table; `a,b` are the two texts of a pair."""
    tokenizer: str | None = None
    """Folder or name on the hub; texts become lengths by it."""
    split: str | None = None
    """Of a dataset; `train` if None."""
    glue_dir: str | None = None
    """Folder that holds the task folders of GLUE (`CoLA/train.tsv`, ...), for `glue:TASK`."""

    @property
    def of_texts(self) -> bool:
        """Whether an option asks for texts to be measured."""
        return any(option is not None for option in (self.column, self.tokenizer, self.split, self.glue_dir))

    def refuse_all_but(self, *accepted: str, source: str, what: str) -> None:
        """Raises: ConfigError for an option that is set and says nothing about `source`, which is `what`."""
        for option in fields(InputOptions):
            if getattr(self, option.name) != option.default and option.name not in accepted:
                takes = " and ".join(_flag(name) for name in accepted)
                raise ConfigError(
                    f"{_flag(option.name)} says nothing about {source}, which is {what}: that "
                    f"takes {takes or 'no such option'}"
                )


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


@dataclass(frozen=True, kw_only=True)
class SubjectOptions(InputOptions):
    """What to look at, and in which packs."""

    source: Annotated[
        str | None, typer.Option(help="Of a run: this source alone. Default: all together.", show_default=False)
    ] = None
    name: Annotated[
        str | None, typer.Option(help="Of a .json file with several histograms: which one.", show_default=False)
    ] = None
    histogram: Annotated[
        bool,
        typer.Option("--histogram", help="INPUT (.npy, text) counts sequences by length; index i: length i + 1."),
    ] = False
    column: Annotated[
        str | None,
        typer.Option(help="Integers, lists (their lengths) or text; A,B: a pair of texts.", show_default=False),
    ] = None
    tokenizer: Annotated[
        str | None,
        typer.Option(metavar="NAME|FOLDER", help="Makes lengths of text, special tokens included.", show_default=False),
    ] = None
    split: Annotated[str | None, typer.Option(help="Of a dataset. Default: train.", show_default=False)] = None
    glue_dir: Annotated[
        str | None,
        typer.Option(
            metavar="FOLDER",
            help="For glue:TASK: holds CoLA/train.tsv and the like. Needs --tokenizer.",
            show_default=False,
        ),
    ] = None
    pack_length: Annotated[
        int | None, typer.Option(help="Slots of a pack. Default: the run's, or the longest length.", show_default=False)
    ] = None
    long: Annotated[
        str,
        typer.Option(metavar="error|truncate|drop|split", help="What to do with sequences longer than --pack-length."),
    ] = "error"
