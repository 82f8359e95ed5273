"""The studies, by their names in `evenpack study`.

A study is a frozen dataclass: each field is an option of the command line, its docstring is the help, `run` does the
work. It is in `command.py` of the study's folder, and imports heavy modules inside `run`.
"""

from evenpack.studies.chunking.command import ChunkingCommand
from evenpack.studies.equivalence.command import EquivalenceCommand
from evenpack.studies.imbalance.command import ImbalanceCommand
from evenpack.studies.packing.command import PackingCommand
from evenpack.studies.runs.command import TrainedStudyCommand
from evenpack.studies.throughput.command import ThroughputCommand

LengthsStudy = PackingCommand | ImbalanceCommand
"""A study of lengths: of a prepared run, or any list of lengths."""
RunStudy = ThroughputCommand
"""A study of one run, which times its steps on this machine's devices."""

LENGTHS_STUDIES: dict[str, type[LengthsStudy]] = {
    "packing": PackingCommand,
    "imbalance": ImbalanceCommand,
}

RUN_STUDIES: dict[str, type[RunStudy]] = {
    "throughput": ThroughputCommand,
}

STUDIES_OF_RUNS: dict[str, type[TrainedStudyCommand]] = {
    "equivalence": EquivalenceCommand,
    "chunking": ChunkingCommand,
}
