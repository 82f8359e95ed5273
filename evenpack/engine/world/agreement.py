"""All ranks agree on what they are about to run, before the first of them waits in a collective.

A rank with another version, other data or another run file would train on, and be wrong; one that joins by gloo what
the others join by NCCL would wait until a time-out. So each rank says what it has, and rank 0 compares.

    facts of each rank -> meeting.py -> rank 0: differences -> every rank: the same error, or none
"""

import importlib.metadata
import platform
import socket
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch.cuda import nccl

from evenpack.engine.world.meeting import Meeting
from evenpack.errors import RunError
from evenpack.version import VERSION

_SHOWN_DIFFERENCES = 10
_SHOWN_PLACES = 4
_PACKAGES = ("torch", "deepspeed", "numpy")
"""The packages that compute order, batches and updates; tokenizers are not used after `evenpack prepare`."""


@dataclass(frozen=True, kw_only=True)
class RankFacts:
    """What a rank reports about its software, run file and data."""

    rank: int
    host: str
    facts: Mapping[str, str]
    """Facts by name, as text that is compared."""
    problem: str | None = None
    """Why it cannot start; it has no facts then."""


def machine_facts(device: str) -> dict[str, str]:
    """Returns what must be the same on every machine; `device` is the kind that the rank computes on."""
    facts = {"device": device, "Python": platform.python_version()}
    facts |= {name: importlib.metadata.version(name) for name in _PACKAGES}
    facts["evenpack"] = f"{VERSION}, code {_source_checksum()}"
    if device == "cuda":
        facts["CUDA of torch"] = str(torch.version.cuda)
        facts["NCCL"] = ".".join(map(str, nccl.version()))  # type: ignore[no-untyped-call]
        facts["flash-attn"] = _version_or_none("flash-attn")  # decides what attention.backend=auto takes
        facts["flash-attn-4"] = _version_or_none("flash-attn-4")
    return facts


def require_agreement(meeting: Meeting, facts: Mapping[str, str]) -> None:
    """Compares the facts of all ranks.

    Raises: RunError on every rank, with each difference by machine, or with the reasons of ranks that cannot start.
    """
    own = RankFacts(rank=meeting.rank, host=socket.gethostname(), facts=facts)
    answer = _compared(meeting, own)
    if answer["problems"]:
        raise RunError("\n  ".join(["other ranks cannot start:", *answer["problems"]]))
    if answer["differences"]:
        shown = answer["differences"][:_SHOWN_DIFFERENCES]
        more = len(answer["differences"]) - len(shown)
        raise RunError(
            "the ranks would not compute the same thing, so none has begun. They differ in\n"
            + "\n".join(f"  {line}" for line in [*shown, *([f"and {more} more"] if more else [])])
            + "\nGive every machine the same software, run file and prepared data, and start again"
        )


def all_problems(meeting: Meeting, own: str | None) -> list[str]:
    """Tells the ranks that come here, or to `require_agreement`, why this one cannot start; None: it can.

    Returns what the others have, after the name of their machine, but for what this rank has too.
    """
    host = socket.gethostname()
    found = _compared(meeting, RankFacts(rank=meeting.rank, host=host, facts={}, problem=own))["problems"]
    return [problem for problem in found if problem.partition(": ")[2] != own]


def _compared(meeting: Meeting, own: RankFacts) -> dict[str, Any]:
    """Returns the problems and the differences of all ranks."""
    cards = [RankFacts(**card) for card in meeting.gather("facts", asdict(own)) or []]
    problems = [f"{card.host}: {card.problem}" for card in cards if card.problem is not None]
    found = {
        "problems": list(dict.fromkeys(problems))[:_SHOWN_DIFFERENCES],
        "differences": [] if problems else list(find_differences(cards)),
    }
    answer: dict[str, Any] = meeting.broadcast("differences", found)
    if answer["problems"] or answer["differences"]:
        meeting.wait_for_readers("differences")
    return answer


def find_differences(ranks: Sequence[RankFacts]) -> Iterator[str]:
    """Yields a line for each fact that is not the same everywhere: its values, and the machines that have each."""
    for name in dict.fromkeys(name for rank in ranks for name in rank.facts):
        having: dict[str, list[RankFacts]] = {}
        for rank in ranks:
            having.setdefault(rank.facts.get(name, "nothing"), []).append(rank)
        if len(having) > 1:
            hosts = [{rank.host for rank in group} for group in having.values()]
            by_host = sum(map(len, hosts)) == len(set.union(*hosts))
            yield f"{name}: " + "; ".join(f"{value} on {_places(group, by_host)}" for value, group in having.items())


def _version_or_none(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "none"


def _places(ranks: Sequence[RankFacts], by_host: bool) -> str:
    names = list(dict.fromkeys(rank.host if by_host else f"rank {rank.rank} ({rank.host})" for rank in ranks))
    more = len(names) - _SHOWN_PLACES
    return ", ".join(names[:_SHOWN_PLACES]) + (f" and {more} more" if more > 0 else "")


def _source_checksum(package_dir: Path = Path(__file__).parents[2]) -> str:
    """Returns a checksum of the package's code: checkouts of one version differ."""
    digest = xxhash.xxh3_64()
    for path in sorted(package_dir.rglob("*.py")):
        digest.update(str(path.relative_to(package_dir)).encode())
        digest.update(path.read_bytes())
    return str(digest.hexdigest())
