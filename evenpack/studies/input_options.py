"""What may be said about an input beside its name."""

from dataclasses import dataclass, fields

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

    def refuse_all_but(self, *accepted: str, source: str, what: str) -> None:
        """Raises: ConfigError for an option that is set and says nothing about `source`, which is `what`."""
        for option in fields(InputOptions):
            if getattr(self, option.name) != option.default and option.name not in accepted:
                takes = " and ".join(f"--{name}" for name in accepted)
                raise ConfigError(
                    f"--{option.name} says nothing about {source}, which is {what}: that "
                    f"takes {takes or 'no such option'}"
                )
