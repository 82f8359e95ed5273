"""Ranks of a dry run that are not here: their number, the one that is rehearsed, and their GPU."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.console import RenderableType

from evenpack.errors import ConfigError

if TYPE_CHECKING:
    from evenpack.engine.config import RunConfig
    from evenpack.engine.memory.rehearsal import RankRehearsal
    from evenpack.models.common.device_peaks import DevicePeak


@dataclass(frozen=True, kw_only=True)
class RehearsedRanks:
    """The options `--ranks`, `--rank` and `--device` of `evenpack train --dry-run`."""

    ranks: int | None
    rank: int | None
    device: str | None

    def require_valid(self, *, dry_run: bool, places_given: bool) -> None:
        """Checks the options against the others. Raises: ConfigError."""
        given = {"--ranks": self.ranks, "--rank": self.rank, "--device": self.device}
        names = [name for name, value in given.items() if value is not None]
        if names and not dry_run:
            raise ConfigError(f"{', '.join(names)}: for --dry-run alone; training takes the ranks that it can start")
        if self.ranks is not None and places_given:
            raise ConfigError(
                "--ranks is for ranks without machines: leave --num-gpus, --cpu-ranks and --hostfile out, or leave "
                "--ranks out"
            )

    def known_device(self) -> "DevicePeak | None":
        """Returns the named device, or that of this machine; None if it has no GPU, or an unknown one.

        Raises: ConfigError for a name that is not known.
        """
        import torch

        from evenpack.models.common.device_peaks import find_device_peak, known_device

        if self.device is not None:
            return find_device_peak(self.device)
        return known_device(torch.cuda.get_device_name()) if torch.cuda.is_available() else None

    def rehearse(self, config: "RunConfig", *, ranks: int) -> "tuple[RankRehearsal, RenderableType]":
        """Rehearses the first step of the rank, and returns it with its table; once in a process.

        Raises: ConfigError if there is no such rank, or if the ranks cannot divide a step; DataError for damaged data.
        """
        from evenpack.data.prepare.verification import explained_damage
        from evenpack.engine.memory.rehearsal import rehearse
        from evenpack.engine.resolving.resolve import open_run
        from evenpack.launcher.views import rehearsal_table

        assert self.rank is not None, "asked for"
        with explained_damage(config.prepared_dir):
            found = rehearse(open_run(config), rank=self.rank, ranks=ranks)
        return found, rehearsal_table(found, config.training.batching)
