"""A report as one HTML page that needs nothing beside it."""

import base64
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path

from evenpack.files import write_text
from evenpack.studies.report.comparison import Comparison

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1f2933; max-width: 76rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2.2rem; }
.wide { overflow-x: auto; } img { max-width: 100%; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: 0.3rem 1.1rem 0.3rem 0; border-bottom: 1px solid #e4e7eb; vertical-align: top; }
th { font-weight: 600; }
.note { background: #fff8e6; border-left: 3px solid #e8a800; padding: 0.4rem 0.8rem; margin: 0.4rem 0; }
"""

_SHOWN_SIZE = 0.6
"""Scale at which figures are shown: their letters are as large as the page's, and sharp on dense screens."""
_WIDTH_IN_PNG = slice(16, 20)
"""Bytes of a PNG file that hold its width in pixels."""

FIGURE_TEXTS = {
    "loss": "Training loss. Thin: single steps; bold: mean over about a fiftieth of the run.",
    "validation": "Loss on the held-out documents of each source.",
    "throughput": "Real tokens per second over all ranks, evaluation and saving left out.",
    "padding": "Share of the computed slots that hold no real token.",
    "waits": "What the ranks wait for: batches, and the slowest rank of each step.",
}
"""The text above each figure."""


def write_page(
    path: Path,
    rows: Sequence[Mapping[str, str]],
    comparison: Comparison,
    figures: Mapping[str, Path],
    *,
    origin: str,
) -> None:
    """Writes the page with its figures inside.

    Args:
        rows: one for each run, all with the same keys; the first is its name.
        origin: by what, and when, the page was made.
    """
    labels = [next(iter(row.values())) for row in rows]
    title = f"Report of {' and '.join(labels) if len(labels) < 4 else f'{len(labels)} runs'}"
    body = [f"<h1>{escape(title)}</h1>"]
    body += [f'<p class="note">{escape(note)}</p>' for note in comparison.notes]
    heads = list(rows[0])[1:]
    body += ["<h2>Runs</h2>", _table(["", *labels], [[head, *(row[head] for row in rows)] for head in heads])]
    if len(rows) > 1:
        body.append("<h2>Settings that differ</h2>")
        lines = [[key, *values] for key, values in comparison.settings.items()]
        body.append(_table(["key", *labels], lines) if lines else "<p>None that are recorded.</p>")
    for name, figure in figures.items():
        png = figure.read_bytes()
        width = round(_SHOWN_SIZE * int.from_bytes(png[_WIDTH_IN_PNG]))
        picture = base64.b64encode(png).decode()
        body += [
            f"<h2>{escape(name.capitalize())}</h2>",
            f"<p>{escape(FIGURE_TEXTS[name])}</p>",
            f'<img alt="{escape(FIGURE_TEXTS[name])}" width="{width}" src="data:image/png;base64,{picture}">',
        ]
    body.append(f"<p>{escape(origin)}</p>")
    head = f'<meta charset="utf-8"><title>{escape(title)}</title><style>{_STYLE}</style>'
    write_text(
        path, f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body>\n' + "\n".join(body) + "\n</body></html>\n"
    )


def _table(heads: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(cell)}</th>" for cell in heads)
    rows = "\n".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in line) + "</tr>" for line in lines)
    return f'<div class="wide"><table>\n<tr>{head}</tr>\n{rows}\n</table></div>'
