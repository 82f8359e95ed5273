"""The options of commands that look at lengths, declared once."""

import dataclasses
import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from evenpack.studies.input_options import InputOptions

INPUT_HELP = (
    "A run (.yaml); a published name (wikipedia_512); a .json histogram; lengths in .npy, in text, or - for stdin; "
    "columns in .parquet, .csv, .tsv, .jsonl; or a dataset: a folder, NAME[:SUBSET] of the hub, glue:cola."
)


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
    pack_length: Annotated[
        int | None, typer.Option(help="Slots of a pack. Default: the run's, or the longest length.", show_default=False)
    ] = None
    long: Annotated[
        str,
        typer.Option(metavar="error|truncate|drop|split", help="What to do with sequences longer than --pack-length."),
    ] = "error"


def takes_subject(command: Callable[..., None]) -> Callable[..., None]:
    """`takes(SubjectOptions)` as parameter `options`."""
    return takes("options", SubjectOptions)(command)


def takes(name: str, options_class: type[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Gives a command with a parameter `name`, a dataclass, one option of the command line for each field."""
    fields = dataclasses.fields(options_class)

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(command)
        def run(**given: Any) -> None:
            options = options_class(**{field.name: given.pop(field.name) for field in fields})
            command(**{name: options}, **given)

        signature = inspect.signature(command)
        parameters = []
        for parameter in signature.parameters.values():
            if parameter.name == name:
                keyword = inspect.Parameter.KEYWORD_ONLY
                parameters += [
                    inspect.Parameter(field.name, keyword, default=field.default, annotation=field.type)
                    for field in fields
                ]
            else:
                parameters.append(parameter)
        run.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        return run

    return decorate
