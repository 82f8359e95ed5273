"""Adds campaigns up: a JSON file with each of them, and a table over all."""

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from evenpack.files import read_json_object, write_json, write_text
from evenpack.units import counted
from faults.tried import Outcome, Tried

OUTCOMES: tuple[Outcome, ...] = ("went on", "ended clearly", "lost")


def counts_of(tried: Iterable[Tried]) -> dict[str, dict[str, Any]]:
    """Returns of each kind of fault how often each outcome came, and the longest time until the end."""
    found: dict[str, dict[str, Any]] = {}
    for one in tried:
        row = found.setdefault(one.name, dict.fromkeys(OUTCOMES, 0) | {"longest_seconds": None})
        row[one.outcome] += 1
        if one.seconds is not None:
            row["longest_seconds"] = round(max(one.seconds, row["longest_seconds"] or 0.0), 1)
    return dict(sorted(found.items()))


def add_campaign(path: Path, about: dict[str, Any], tried: list[Tried]) -> list[dict[str, Any]]:
    """Adds a campaign to a JSON file, and writes the table of all beside it; returns all campaigns."""
    lost = [{"name": one.name, "where": one.where, "detail": one.detail} for one in tried if one.outcome == "lost"]
    found = read_json_object(path) or {}
    campaigns = [*found.get("campaigns", []), about | {"faults": counts_of(tried), "lost": lost}]
    write_json(path, found | {"campaigns": campaigns})
    write_text(path.with_suffix(".md"), text_of(campaigns, found.get("not_added_up", [])))
    return campaigns


def text_of(campaigns: list[dict[str, Any]], not_added_up: Sequence[dict[str, Any]] = ()) -> str:
    """Returns the report over all campaigns.

    Args:
        not_added_up: campaigns that led to a mend, which are written into the file by hand: date, commit, seed,
            number of faults, number lost, why.
    """
    rows = sum_of(campaigns)
    total = {outcome: sum(row[outcome] for row in rows.values()) for outcome in OUTCOMES}
    tried = sum(total.values())
    lines = [
        "# Faults",
        "",
        f"{counted(tried, 'fault')} in {counted(len(campaigns), 'campaign')}: "
        f"{tried - total['lost']} survived, {total['lost']} lost. "
        'What counts as survived: docs/operations.md, "Fault campaigns".',
        "",
        "| fault | tried | went on | ended clearly | lost | longest end, s |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for name, row in rows.items():
        counts = [row[outcome] for outcome in OUTCOMES]
        longest = "" if row["longest_seconds"] is None else f"{row['longest_seconds']:.1f}"
        lines.append(f"| {name} | {sum(counts)} | {' | '.join(map(str, counts))} | {longest} |")
    lines += ["", "| campaign | commit | minutes | seed | faults | hardware | command |", "|" + " --- |" * 7]
    for one in campaigns:
        number = sum(sum(row[outcome] for outcome in OUTCOMES) for row in one["faults"].values())
        fields = (one["date"], f"`{one['commit']}`", f"{one['minutes']:.0f}", one["seed"], number, one["hardware"])
        lines.append("| " + " | ".join(map(str, fields)) + f" | `{one['command']}` |")
    if not_added_up:
        lines += ["", "Not added up, because each ended with a mend:", ""]
        lines += ["| campaign | commit | seed | faults | lost | why |", "|" + " --- |" * 6]
    for one in not_added_up:
        fields = (one["date"], f"`{one['commit']}`", one["seed"], one["faults"], one["lost"], one["why"])
        lines.append("| " + " | ".join(map(str, fields)) + " |")
    return "\n".join(lines) + "\n"


def sum_of(campaigns: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Returns the counts of all campaigns; files that are damaged in one way are one row."""
    rows: dict[str, dict[str, Any]] = {}
    for campaign in campaigns:
        for name, counts in campaign["faults"].items():
            row = rows.setdefault(_row(name), dict.fromkeys(OUTCOMES, 0) | {"longest_seconds": None})
            for outcome in OUTCOMES:
                row[outcome] += counts[outcome]
            if counts["longest_seconds"] is not None:
                row["longest_seconds"] = max(counts["longest_seconds"], row["longest_seconds"] or 0.0)
    return dict(sorted(rows.items()))


def _row(name: str) -> str:
    """Returns the row of a fault: damaged files by where they are, not each by its name."""
    match = re.fullmatch(r"(?:(prepared|interrupted), )?(truncated|one bit changed|deleted): (.*)", name)
    if match is None:
        return name
    before, action, file = match.groups()
    if before == "interrupted":
        return f"before a `prepare` that resumes: a file {action}"
    if before:
        return f"before another `prepare`: a prepared file {action}"
    place = "checkpoint" if file.endswith(".pt") or file == "latest" else file
    return f"before a start: {place} {action}"
