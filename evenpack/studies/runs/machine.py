"""What a study asks of whoever starts processes: studies know nothing of the launcher, which hands itself in."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol, runtime_checkable


@runtime_checkable
class Process(Protocol):
    """A command that was started."""

    def poll(self) -> int | None:
        """Its exit code; None while it runs."""


@runtime_checkable
class Place(Protocol):
    """Devices that one run at a time is given."""

    @property
    def ranks(self) -> int: ...

    def start(
        self, command: str, run_file: Path, overrides: Sequence[str], *, log: Path, options: Sequence[str] = ()
    ) -> Process:
        """Starts `evenpack COMMAND RUN.yaml OVERRIDES OPTIONS`, with the place's devices; what it prints is added to
        `log`.
        """


@runtime_checkable
class Machine(Protocol):
    """This machine, as far as a study needs it."""

    @property
    def is_asked_to_stop(self) -> bool:
        """Whether the user has asked for it; what runs has been told so, too."""

    def places(self, devices_per_run: int | None) -> Sequence[Place]:
        """All devices, in groups of so many; None: one group of all. Raises: ConfigError if there are fewer."""

    def held(self, output_dir: Path) -> AbstractContextManager[None]:
        """Holds the folder for one study, and listens to requests to stop.

        Raises: RunError if another one holds it, or it cannot be written.
        """
