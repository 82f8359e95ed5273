"""A page for people of the values of an hour on a node. It needs nothing but Python."""

from collections.abc import Callable, Mapping
from typing import Any

Rows = list[dict[str, str]]


def page(name: str, value: Mapping[str, Any]) -> str:
    """Returns the tables of all values that are there, and how the steps ended, as Markdown."""
    results: Mapping[str, Any] = value["results"]
    sections = {title: rows(results) for title, rows in _SECTIONS.items()}
    sections["Steps"] = [
        {
            "step": step,
            "ended": one["status"],
            "s": f"{one['seconds']:.0f}",
            "last line": "" if step.replace(" ", "_") in results else _shown(one["last_line"]),
        }
        for step, one in value["steps"].items()
    ]
    lines = [
        f"# {name}",
        f"`{value['command']}` on {value['device']}, torch {value['torch']}, commit {value['commit']}, "
        f"{value['date']}. All values: [{name}.json]({name}.json).",
        *(f"## {title}\n\n{_markdown(rows)}" for title, rows in sections.items() if rows),
    ]
    return "\n\n".join(lines) + "\n"


def _throughput_rows(results: Mapping[str, Any]) -> Rows:
    rows = []
    for name, study in _named(results, "throughput"):
        for layout in study["layouts"]:
            mfu = layout["mfu"]
            ratio = study["ratio_of_promised_speed_up"] if layout["layout"] == "packed" else None
            rows.append(
                {
                    "study": name,
                    "layout": layout["layout"],
                    "ranks": str(study["ranks"]),
                    "tokens/s": f"{layout['tokens_per_second']['median']:,.0f}",
                    "sequences/s": f"{layout['sequences_per_second']['median']:,.1f}",
                    "MFU": "-" if mfu is None else f"{100 * mfu['median']:.1f} %",
                    "waiting": "-" if study["ranks"] == 1 else f"{100 * layout['wait_share']:.2f} %",
                    "peak memory": f"{layout['peak_memory_bytes'] / 1e9:.2f} GB",
                    "packed / padded / factor": "" if ratio is None else f"{ratio:.3f}",
                }
            )
    return rows


def _collective_rows(results: Mapping[str, Any]) -> Rows:
    return [
        {
            "collective": row["collective"],
            "MB": f"{row['bytes'] / 1e6:,.1f}",
            "ms": f"{1e3 * row['seconds']:.3f}",
            "algorithm GB/s": f"{row['algorithm_bytes_per_second'] / 1e9:.2f}",
            "bus GB/s": f"{row['bus_bytes_per_second'] / 1e9:.2f}",
            "result": "right" if row["is_right"] else "WRONG",
        }
        for row in results.get("collectives", {}).get("rows", [])
    ]


def _isolation_rows(results: Mapping[str, Any]) -> Rows:
    return [
        {
            "backend": row["backend"],
            "request": row["request"],
            "largest change": _shown(row["max_deviation"]),
            "tolerance": _shown(row["tolerance"]),
            "control": _shown(row["control_deviation"]),
            "passed on": f"{row['passed_on']} of {results['isolation']['ranks']} ranks",
        }
        for row in results.get("isolation", {}).get("rows", [])
    ]


def _resuming_rows(results: Mapping[str, Any]) -> Rows:
    return [
        {
            "ranks": " -> ".join(str(ranks) for ranks in run["starts"]),
            "steps": str(len(run["losses"])),
            "last loss": f"{run['losses'][-1]:.6f}",
            "largest relative difference": f"{run['largest_difference']:.1e}",
            "order": "as planned" if run["is_planned_order"] else "NOT AS PLANNED",
        }
        for run in results.get("resuming", {}).get("runs", [])
    ]


def _wait_rows(results: Mapping[str, Any]) -> Rows:
    return [
        {
            "scheme": row["scheme"],
            "ranks": str(row["ranks"]),
            "slowest / mean": f"{row['trained_slowest_over_mean']:.4f} (± {row['standard_error']:.4f})",
            "replayed": f"{row['replayed_slowest_over_mean']:.4f}",
            "waiting": f"{100 * row['trained_wait_share']:.2f} %",
            "waiting, replayed": f"{100 * row['replayed_wait_share']:.2f} %",
        }
        for row in results.get("waits", {}).get("rows", [])
    ]


def _shown(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value).replace("|", "\\|")


_SECTIONS: dict[str, Callable[[Mapping[str, Any]], Rows]] = {
    "Collectives": _collective_rows,
    "Isolation on each rank": _isolation_rows,
    "Other ranks, and resuming": _resuming_rows,
    "Throughput": _throughput_rows,
    "Waits beside the replay": _wait_rows,
}


def _named(results: Mapping[str, Any], kind: str) -> list[tuple[str, Any]]:
    """Returns the results whose names begin with `kind`, without it."""
    return [(name.removeprefix(f"{kind}_"), one) for name, one in results.items() if name.startswith(f"{kind}_")]


def _markdown(rows: Rows) -> str:
    lines = ["| " + " | ".join(rows[0]) + " |", "|" + " --- |" * len(rows[0])]
    return "\n".join([*lines, *("| " + " | ".join(row.values()) + " |" for row in rows)])
