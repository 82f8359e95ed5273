"""The day's values in one file, and a page of them for people."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from evenpack.engine.provenance import commit_of_source
from evenpack.files import write_json, write_text
from gpu_day.runner import Step, StepResult, table


def write_report(
    prefix: Path, directory: Path, steps: Sequence[Step], results: Mapping[str, StepResult], *, command: str
) -> str:
    """Writes PREFIX.json, PREFIX.md and a copy of each figure as PREFIX_NAME.png. Returns the page."""
    values = {path.stem: json.loads(path.read_text("utf-8")) for path in sorted((directory / "results").glob("*.json"))}
    value = {
        "command": command,
        "commit": commit_of_source(),
        "steps": {name: vars(result) for name, result in results.items()},
        "results": values,
    }
    prefix.parent.mkdir(parents=True, exist_ok=True)
    write_json(Path(f"{prefix}.json"), value)
    figures = sorted((directory / "figures").glob("*.png"))
    for figure in figures:
        Path(f"{prefix}_{figure.name}").write_bytes(figure.read_bytes())
    page = "\n\n".join(
        [
            f"# {prefix.name}",
            f"`{command}`, commit {value['commit']}. Raw values: [{prefix.name}.json]({prefix.name}.json).",
            "## Throughput",
            _markdown(_throughput_rows(values)),
            "## Un-padding, step by step",
            _markdown(_law_rows(values)),
            "## Seconds of a step by category",
            _markdown(_profile_rows(values)),
            "## Waits, recompilations, copies",
            _markdown(_check_rows(values)),
            "## Steps of the day",
            table(steps, results),
        ]
    )
    write_text(Path(f"{prefix}.md"), page + "\n")
    return page


def _throughput_rows(values: Mapping[str, Any]) -> list[dict[str, str]]:
    rows = []
    for name, study in values.items():
        if not name.startswith("throughput_"):
            continue
        for layout in study["layouts"]:
            mfu = layout["mfu"]
            rows.append(
                {
                    "study": name.removeprefix("throughput_"),
                    "device": study["measured_on"]["device"],
                    "layout": layout["layout"],
                    "tokens/s": f"{layout['tokens_per_second']['median']:,.0f}",
                    "sequences/s": f"{layout['sequences_per_second']['median']:,.1f}",
                    "MFU": "-" if mfu is None else f"{100 * mfu['median']:.1f} %",
                    "peak memory": f"{layout['peak_memory_bytes'] / 1e9:.2f} GB",
                    "packed / padded / factor": _ratio(study["ratio_of_promised_speed_up"], layout["layout"]),
                }
            )
    return rows


def _ratio(ratio: float | None, layout: str) -> str:
    return "" if ratio is None or layout != "packed" else f"{ratio:.3f}"


def _law_rows(values: Mapping[str, Any]) -> list[dict[str, str]]:
    law = values.get("law_of_one_device")
    if law is None:
        return []
    return [
        {
            "law": which,
            "location": f"{law[which]['location']:.3f}",
            "scale": f"{law[which]['scale']:.3f}",
            "largest gap to the steps": f"{100 * law[f'{which}_distance']:.1f} %",
        }
        for which in ("fitted", "published")
    ]


def _profile_rows(values: Mapping[str, Any]) -> list[dict[str, str]]:
    return [
        {"run": name.removeprefix("profile_")}
        | {category: f"{seconds:.5f}" for category, seconds in value["seconds_per_step"].items()}
        for name, value in values.items()
        if name.startswith("profile_")
    ]


def _check_rows(values: Mapping[str, Any]) -> list[dict[str, str]]:
    return [
        {
            "run": name.removeprefix("checks_"),
            "waits": "-" if value["waits"] is None else str(value["waits"]),
            "recompilations": str(value["recompilations"]),
            "copies, ms": ", ".join(f"{kind} {one:.3f}" for kind, one in value["copy_milliseconds"].items()),
        }
        for name, value in values.items()
        if name.startswith("checks_")
    ]


def _markdown(rows: Sequence[Mapping[str, str]]) -> str:
    if not rows:
        return "Not measured."
    lines = ["| " + " | ".join(rows[0]) + " |", "|" + " --- |" * len(rows[0])]
    return "\n".join([*lines, *("| " + " | ".join(row.values()) + " |" for row in rows)])
