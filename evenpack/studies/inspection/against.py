"""The option `evenpack inspect --against`: a comparison of two lists of lengths."""

from collections.abc import Sequence
from dataclasses import dataclass

from evenpack.data.packing import LengthHistogram
from evenpack.errors import ConfigError, EvenpackError
from evenpack.studies.lengths.distance import HistogramDistance, histogram_distance
from evenpack.studies.lengths.reading import read_histogram
from evenpack.studies.lengths.subject import Subject
from evenpack.studies.origins import name_of_lengths


@dataclass(frozen=True, kw_only=True)
class Against:
    """Lengths that a subject is compared with."""

    name: str
    histogram: LengthHistogram
    distance: HistogramDistance
    """Distance of the subject's lengths, as they are packed, to these."""

    @property
    def footer(self) -> str:
        """What a figure says of them."""
        distance = self.distance.total_variation
        return f"Against {self.name}: data {name_of_lengths(self.histogram)}; total variation {distance:.4f}"


def require_one_on_each_side(against: str, inputs: Sequence[str]) -> None:
    """Checks the inputs. Raises: ConfigError unless there is one on each side."""
    if len(inputs) > 1:
        raise ConfigError(f"--against compares one input with {against}, and {len(inputs)} were given: leave one")
    if against.endswith((".yaml", ".yml")):
        raise ConfigError(
            f"--against takes a published name or a file of lengths, and {against} is a run: make it INPUT instead"
        )
    if against == "-" == inputs[0]:
        raise ConfigError("--against - and INPUT - would read standard input twice: write one of them to a file")


def read_against(subject: Subject, against: str) -> Against:
    """Reads the lengths called `against`: a published name, or an input that needs no option.

    Raises: as `read_histogram`, `--against` named.
    """
    try:
        other = read_histogram(against)
    except EvenpackError as error:
        raise type(error)(f"--against {against}: {error}") from error
    name = "standard input" if against == "-" else against
    return Against(name=name, histogram=other, distance=histogram_distance(subject.histogram, other, origin=name))
