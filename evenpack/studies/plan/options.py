"""The options of `evenpack plan` for values that a run file does not contain."""

from dataclasses import dataclass
from typing import Annotated

import typer

from evenpack.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """The device, and what is known of data that is not prepared."""

    device: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Hours and fitting memory on: h100, b200, a100-80gb, rtx-4090, ..."),
    ] = None
    mfu: Annotated[
        float | None,
        typer.Option(
            metavar="SHARE",
            help="Fraction of the device's dense peak that useful operations reach. Default: measured on an H100.",
        ),
    ] = None
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

    def require_valid(self) -> None:
        """Checks the options. Raises: ConfigError for an invalid share, and options that go together."""
        if self.mfu is not None and not 0.0 < self.mfu <= 1.0:
            raise ConfigError(f"--mfu is a fraction of the peak, above 0 and at most 1, not {self.mfu:g}; 0.4 is usual")
        if self.mfu is not None and self.device is None:
            raise ConfigError("--mfu is a fraction of a device's peak: give --device, such as h100")
        if (self.corpus_tokens is None) != (self.corpus_documents is None):
            raise ConfigError("--corpus-tokens and --corpus-documents go together: give both, or prepare the data")
