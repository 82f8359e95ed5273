"""The studies, by their names in `evenpack study`.

A study is a frozen dataclass: each field is an option of the command line, its docstring is the help, `run` does the
work. It is in `command.py` of the study's folder, and imports heavy modules inside `run`.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from evenpack.console import Report
from evenpack.studies.chunking.command import ChunkingCommand
from evenpack.studies.equivalence.command import EquivalenceCommand
from evenpack.studies.imbalance.command import ImbalanceCommand
from evenpack.studies.packing.command import PackingCommand
from evenpack.studies.runs.command import TrainedStudyCommand
from evenpack.studies.shuffle.command import ShuffleCommand
from evenpack.studies.throughput.command import ThroughputCommand

if TYPE_CHECKING:
    from evenpack.engine.config import RunConfig
    from evenpack.studies.lengths.subject import Subject


@runtime_checkable
class LengthsStudy(Protocol):
    """A study of lengths: of a prepared run, or any list of lengths."""

    def uses_device(self) -> bool:
        """Returns whether it computes steps on this machine's device, as its options ask for."""
        ...

    def run(self, find_subject: "Callable[..., Subject]") -> Report:
        """Checks its options, then reads the lengths: of INPUT, or of another one by name. Raises: EvenpackError."""
        ...


@runtime_checkable
class RunStudy(Protocol):
    """A study of one run: it times steps of a prepared run on this machine's devices, or computes them."""

    def run(self, config: "RunConfig") -> Report:
        """Runs on every rank. Raises: EvenpackError."""
        ...


LENGTHS_STUDIES: dict[str, type[LengthsStudy]] = {
    "packing": PackingCommand,
    "imbalance": ImbalanceCommand,
}

RUN_STUDIES: dict[str, type[RunStudy]] = {
    "throughput": ThroughputCommand,
}

STUDIES_OF_RUNS: dict[str, type[TrainedStudyCommand[Any]]] = {
    "equivalence": EquivalenceCommand,
    "chunking": ChunkingCommand,
    "shuffle": ShuffleCommand,
}
