"""Probes families of the installed transformers for leaks between the sequences of a pack, in tiny random weights.

    python benchmarks/isolation_of_transformers.py [TYPE ...] [--json FILE.json]

Prints the table of docs/probe.md in Markdown: for each family and attention backend, whether a token reaches another
sequence without a mask (without and with a cache), with a 2-D mask of ones, and with a 4-D mask of the sequences'
blocks. A verdict holds in evaluation and in training, unless both are named. The JSON has every row of every probe.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import measuring

from evenpack import console
from evenpack.errors import ConfigError
from evenpack.studies.probe import ProbedCombination, ProbeReport, probe

FAMILIES = (
    *("llama", "modernbert", "bert", "roberta", "gpt2", "qwen3", "mistral", "gpt_oss", "olmo", "olmo2", "olmo3"),
    *("gemma", "gemma2", "gemma3_text", "phi", "phi3", "gpt_neox", "gptj", "opt", "bloom", "falcon", "mixtral"),
    *("deepseek_v3", "mamba2", "qwen3_next", "electra", "distilbert", "albert", "deberta-v2", "eurobert"),
)
WAYS: dict[str, dict[str, Any]] = {
    "no mask": {"mask": "none", "cache": (False, None)},
    "no mask, cache": {"mask": "none", "cache": (True,)},
    "mask of ones": {"mask": "ones", "cache": (False, None)},
    "block mask": {"mask": "block", "cache": (False, None)},
}
"""The columns of verdicts; a cache changes nothing but where there is no mask, or the table says so."""


def main() -> None:
    parser = measuring.parser_of(__doc__, json_file=True)
    parser.add_argument("types", nargs="*", default=FAMILIES)
    arguments = parser.parse_args()
    reports, failures = [], {}
    for name in arguments.types:
        try:
            report: ProbeReport = probe(name).value
        except ConfigError as error:
            failures[name] = str(error)
            continue
        reports.append(report)
    measuring.write_report(
        {"reports": [dataclasses.asdict(report) for report in reports], "failures": failures}, arguments.json
    )
    lines = [line for report in reports for line in family_lines(report)]
    heads = list(lines[0])
    print(f"| {' | '.join(heads)} |\n|{' --- |' * len(heads)}")
    for line in lines:
        print(f"| {' | '.join(line.values())} |")
    for name, failure in failures.items():
        console.messages().print(f"{name}: {failure}")


def family_lines(report: ProbeReport) -> list[dict[str, str]]:
    """Returns a line for each group of backends with the same verdicts."""
    found: dict[tuple[str, ...], list[str]] = {}
    for backend in dict.fromkeys(row.combination.backend or "" for row in report.combinations):
        rows = [row for row in report.combinations if row.combination.backend == backend]
        cells = tuple(verdict(rows, **way) for way in WAYS.values())
        found.setdefault((*cells, positions(rows), targets(rows)), []).append(backend)
    heads = ("type", "backend", *WAYS, "positions restart", "targets cross")
    return [
        dict(zip(heads, (report.model, ", ".join(backends), *cells), strict=True)) for cells, backends in found.items()
    ]


def verdict(rows: Sequence[ProbedCombination], *, mask: str, cache: Sequence[bool | None]) -> str:
    """Returns the verdict of these combinations, by mode where they differ."""
    asked = [row for row in rows if row.combination.mask == mask and row.combination.cache in cache]
    by_mode = {row.combination.mode: row.verdict for row in asked}
    if len(set(by_mode.values())) > 1:
        return ", ".join(f"{mode}: {shown(one)}" for mode, one in by_mode.items())
    return shown(asked[0].verdict) if asked else "-"


def shown(found: str) -> str:
    return f"**{found}**" if found in ("leaks", "cannot tell") else found


def positions(rows: Sequence[ProbedCombination]) -> str:
    return said({row.positions_restart for row in rows})


def targets(rows: Sequence[ProbedCombination]) -> str:
    return said({row.targets_cross for row in rows})


def said(values: set[Any]) -> str:
    known = values - {None}
    return " and ".join("yes" if value else "no" for value in sorted(known, reverse=True)) or "-"


if __name__ == "__main__":
    main()
