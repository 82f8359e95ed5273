"""The options of commands that inspect lengths, declared once."""

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any

from evenpack.studies.lengths.options import SubjectOptions

INPUT_HELP = (
    "A run (.yaml); a published name (wikipedia_512); a .json histogram; lengths in .npy, in text, or - for stdin; "
    "columns in .parquet, .csv, .tsv, .jsonl; a dataset: a folder, NAME[:SUBSET] of the hub; or a task, glue:cola."
)


def takes_subject(command: Callable[..., None]) -> Callable[..., None]:
    """Adds `SubjectOptions` to a command as parameter `options`."""
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
