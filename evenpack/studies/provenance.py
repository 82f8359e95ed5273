"""The line below a figure: what it shows, the data, the commit, and where it was measured."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from evenpack.engine.provenance import commit_of_source
from evenpack.version import VERSION

if TYPE_CHECKING:
    from evenpack.data.packing import LengthHistogram
    from evenpack.data.prepared import PreparedData
    from evenpack.engine.reporting.run_record import RunRecord

COMPUTED = "computed, not measured"
"""Text in place of a device if nothing was timed or trained."""
NOT_RECORDED = "data, commit and device are not recorded"

_SHORT_NAME = 12
"""Characters of a fingerprint that tell data apart for people."""
_MOST_FINGERPRINTS = 3
"""Fingerprints that a line names; of more, as of a study of recipes, it gives the number."""


def provenance_line(
    name: str, *, data: str, device: str, evenpack: str = VERSION, commits: Sequence[str | None] = ()
) -> str:
    """Returns the line of the run, study or lengths called `name`.

    Args:
        data: as `name_of_prepared` and `name_of_lengths` return it.
        device: number of ranks and name, or `COMPUTED`.
        commits: those that trained or measured, None for code that is not a checkout; without one, the commit of the
            code that runs.
    """
    return f"{name}: data {data}; {made_by(evenpack, commits)}; {device}"


def made_by(evenpack: str = VERSION, commits: Sequence[str | None] = ()) -> str:
    """Returns version and commits; without a commit, the commit of the code that runs."""
    return f"evenpack {evenpack}, {_commits(commits or [commit_of_source()])}"


def provenance_of_runs(name: str, records: Iterable["RunRecord | None"]) -> str:
    """Returns the line of one or more trained runs, from what each start of them recorded (None: a run has no record).

    Everything that differs between runs or starts is listed.
    """
    records = list(records)
    known = [record for record in records if record is not None]
    if not known:
        return f"{name}: {NOT_RECORDED}"
    starts = [start for record in known for start in record.starts]
    line = provenance_line(
        name,
        data=_data([(record.data.sources, record.data.fingerprint) for record in known]),
        device=_listed(f"{start.ranks} x {start.device}" for start in starts),
        evenpack=_listed(start.evenpack for start in starts),
        commits=[start.commit for start in starts],
    )
    missing = len(records) - len(known)
    return f"{line}; {missing} of {len(records)} runs have no record" if missing else line


def name_of_prepared(prepared: "PreparedData", source: str | None = None) -> str:
    """Returns the sources of prepared data, or one of them, and the start of its fingerprint, as in run.json."""
    sources = tuple(prepared.source_names) if source is None else (source,)
    return _data([(sources, prepared.fingerprint(seed=0))])


def name_of_lengths(histogram: "LengthHistogram") -> str:
    """Returns the numbers of sequences and tokens, by which a list of lengths is recognised."""
    return f"{histogram.sequences:,} sequences, {histogram.tokens:,} tokens"


def _data(identities: Sequence[tuple[tuple[str, ...], str]]) -> str:
    """Returns the sources, and how they were prepared: `wiki, code (0123456789ab)`."""
    sources = _listed(", ".join(names) for names, _ in identities)
    fingerprints = list(dict.fromkeys(fingerprint[:_SHORT_NAME] for _, fingerprint in identities))
    if len(fingerprints) > _MOST_FINGERPRINTS:
        return f"{sources} ({len(fingerprints)} preparations)"
    return f"{sources} ({', '.join(fingerprints)})"


def _commits(commits: Sequence[str | None]) -> str:
    known = list(dict.fromkeys(commit for commit in commits if commit is not None))
    words = [f"commit{'s' * (len(known) > 1)} {', '.join(known)}"] if known else []
    return " and ".join([*words, *["no checkout"] * (None in commits)])


def _listed(words: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(words))
