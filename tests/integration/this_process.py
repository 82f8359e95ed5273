"""A machine for studies whose commands run in the process of the test, which costs no start of DeepSpeed."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from forked_ranks import run_ranks
from small_run import evenpack, train_on

from evenpack.config import load_run_file
from evenpack.engine.config import RunConfig


@dataclass(frozen=True, kw_only=True)
class Ended:
    """A command that has ended."""

    code: int

    def poll(self) -> int:
        return self.code


@dataclass(kw_only=True)
class ThisProcess:
    """A machine whose commands run in this process, or in ranks forked for them, one after another."""

    ranks: int = 1
    is_stop_requested: bool = False
    commands: list[str] = field(default_factory=list)

    def device_groups(self, devices_per_run: int | None) -> list["ThisProcess"]:
        return [self]

    @contextmanager
    def held(self, output_dir: Path) -> Iterator[None]:
        yield

    def start(
        self, command: str, run_file: Path, overrides: Sequence[str], *, log: Path, options: Sequence[str] = ()
    ) -> Ended:
        self.commands.append(command)
        try:
            if command == "train":
                run_ranks(train_on, 1, load_run_file(run_file, RunConfig, overrides))
            else:
                evenpack(command, run_file, *overrides, options=options)
        except AssertionError as error:
            log.write_text(f"error: {error}")
            return Ended(code=2)
        return Ended(code=0)
