"""The command `evenpack study shuffle`."""

from dataclasses import dataclass
from typing import ClassVar

from evenpack.studies.runs.command import TrainedStudyCommand


@dataclass(frozen=True, kw_only=True)
class ShuffleCommand(TrainedStudyCommand):
    """Compare ways of shuffling a corpus: how random the order is, how fast it is read, and how the loss behaves.

    Each arm of the study file sets data.shuffle; its order is compared with a rolling buffer and with no shuffle, its
    data is read, and a model is trained on it. The same command resumes an interrupted study.

    \b
    Examples:
      evenpack study shuffle studies/shuffle_mini --dry-run
      evenpack study shuffle STUDY.yaml --devices-per-run 1 --plot shuffle.png --save shuffle.json
    """

    study: ClassVar[str] = "ShuffleStudy"
