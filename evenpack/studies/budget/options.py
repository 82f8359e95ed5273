"""The options of `evenpack budget`."""

import math
from dataclasses import dataclass, fields
from typing import Annotated

import typer

from evenpack.errors import ConfigError

_WITHOUT_RUN = ("compute", "served_tokens", "scaling_law")
"""Options that need no run file."""


@dataclass(frozen=True, kw_only=True)
class BudgetOptions:
    """Options for values that a run file does not contain."""

    devices: Annotated[int, typer.Option(min=1, help="Devices, which are the ranks of the run.")] = 1
    device: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Hours and fitting memory on: h100, b200, a100-80gb, rtx-4090, ..."),
    ] = None
    mfu: Annotated[
        float, typer.Option(help="Fraction of the device's dense peak that useful operations reach; for the hours.")
    ] = 0.4
    corpus_tokens: Annotated[
        int | None,
        typer.Option(min=1, help="In place of prepared data: an epoch's tokens for training, without end-of-text."),
    ] = None
    corpus_documents: Annotated[
        int | None, typer.Option(min=1, help="Documents of --corpus-tokens, each with an end-of-text token.")
    ] = None
    vocabulary_size: Annotated[
        int | None, typer.Option(min=2, help="Vocabulary size of unprepared data. Default: the tokenizer's.")
    ] = None
    compute: Annotated[
        float | None,
        typer.Option(
            metavar="FLOPS", help="Show parameters and tokens for so many operations, at 20 tokens per parameter."
        ),
    ] = None
    served_tokens: Annotated[
        float | None,
        typer.Option(
            metavar="TOKENS",
            help="Tokens read and written in use: show smaller models, trained longer to the same loss.",
        ),
    ] = None
    scaling_law: Annotated[str, typer.Option(metavar="besiroglu|hoffmann", help="Law that predicts the loss.")] = (
        "besiroglu"
    )

    def require_valid(self, *, has_run: bool) -> None:
        """Checks the options.

        Raises: ConfigError for invalid numbers, options that exclude each other, and those of a run without one.
        """
        if not 0.0 < self.mfu <= 1.0:
            raise ConfigError(f"--mfu is a fraction of the peak, above 0 and at most 1, not {self.mfu:g}; 0.4 is usual")
        for name, value in (("--compute", self.compute), ("--served-tokens", self.served_tokens)):
            if value is not None and not 0.0 < value < math.inf:
                raise ConfigError(f"{name} must be a number above 0, such as 1e21, not {value:g}")
        if (self.corpus_tokens is None) != (self.corpus_documents is None):
            raise ConfigError("--corpus-tokens and --corpus-documents go together: give both, or prepare the data")
        if not has_run and self.compute is None:
            raise ConfigError("give a RUN.yaml, or --compute FLOPS")
        of_runs = [
            one.name for one in fields(self) if one.name not in _WITHOUT_RUN and getattr(self, one.name) != one.default
        ]
        if not has_run and of_runs:
            raise ConfigError(f"--{of_runs[0].replace('_', '-')} is of a run: give a RUN.yaml, or leave the option out")
