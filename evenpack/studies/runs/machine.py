"""The interface through which a study starts processes; the launcher passes an instance."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol, runtime_checkable


@runtime_checkable
class Process(Protocol):
    """A command that was started."""

    def poll(self) -> int | None:
        """Returns the exit code; None while the process runs."""


@runtime_checkable
class Place(Protocol):
    """Devices that one run at a time gets."""

    @property
    def ranks(self) -> int: ...

    def start(
        self, command: str, run_file: Path, overrides: Sequence[str], *, log: Path, options: Sequence[str] = ()
    ) -> Process:
        """Starts `evenpack COMMAND RUN.yaml OVERRIDES OPTIONS` with the place's devices; its output goes to `log`."""


@runtime_checkable
class Machine(Protocol):
    """The part of this machine that a study needs."""

    @property
    def is_stop_requested(self) -> bool:
        """Whether the user has requested a stop, which running jobs have received too."""

    def places(self, devices_per_run: int | None) -> Sequence[Place]:
        """Returns all devices, in groups of so many; None: one group of all. Raises: ConfigError if there are fewer."""

    def held(self, output_dir: Path) -> AbstractContextManager[None]:
        """Locks the folder for one study, and handles stop requests.

        Raises: RunError if another study has locked it, or it cannot be written.
        """
