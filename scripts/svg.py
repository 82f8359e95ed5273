"""Provides the shapes of the drawings as SVG text."""

from collections.abc import Iterable
from html import escape

INK, FAINT, PADDING = "#212529", "#868e96", "#e9ecef"
COLOURS = ("#0b7285", "#e8590c", "#5f3dc4", "#2b8a3e", "#c2255c", "#1864ab", "#e67700", "#495057")


def rectangle(x: float, y: float, width: float, height: float, colour: str, *, opacity: float = 1.0) -> str:
    """Returns a rectangle; a pixel on the right is left free to separate adjacent ones."""
    faded = f' fill-opacity="{opacity:g}"' if opacity < 1 else ""
    size = f'width="{max(width - 1, 0.5):.1f}" height="{height:g}"'
    return f'<rect x="{x:.1f}" y="{y:.1f}" {size} rx="2" fill="{colour}"{faded}/>'


def text(
    x: float,
    y: float,
    content: str,
    *,
    size: int = 13,
    weight: int = 400,
    anchor: str = "start",
    colour: str = INK,
) -> str:
    font = f'font-family="Helvetica, Arial, sans-serif" font-size="{size}" font-weight="{weight}"'
    place = f'text-anchor="{anchor}"'
    return f'<text x="{x:g}" y="{y:g}" {font} fill="{colour}" {place}>{escape(content, quote=False)}</text>'


def document(width: float, height: float, parts: Iterable[str]) -> str:
    """Returns a picture on a white background."""
    size = f'width="{width:g}" height="{height:g}"'
    background = f'<rect {size} fill="#ffffff"/>'
    return "\n".join([f'<svg xmlns="http://www.w3.org/2000/svg" {size}>', background, *parts, "</svg>", ""])
