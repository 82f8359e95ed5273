"""Draws the pictures of docs/packing.md.

python scripts/draw_packing.py algorithms [FOLDER]        one SVG for each algorithm, drawn with its real result
python scripts/draw_packing.py certified FILE.json OUT --measured WORDS
                                                          the certified table as PNG, from benchmarks/packing.py --json
"""

import argparse
from collections.abc import Callable
from pathlib import Path

from certified_plot import plot_certified
from greedy_pictures import draw_greedy, draw_next_fit, draw_none, draw_sorted_batches
from packing_example import PACK_LENGTH
from solver_pictures import draw_cutting_stock, draw_least_squares

PICTURES: dict[str, Callable[[], str]] = {
    "longest_pack_first": lambda: draw_greedy("longest_pack_first", "into the fullest pack with room"),
    "shortest_pack_first": lambda: draw_greedy("shortest_pack_first", "into the emptiest pack"),
    "first_fit_decreasing": lambda: draw_greedy("first_fit_decreasing", "into the topmost pack with room"),
    "cutting_stock": draw_cutting_stock,
    "least_squares": lambda: draw_least_squares("least_squares", "slots match sequences at each length"),
    "least_squares_padding": lambda: draw_least_squares("least_squares_padding", "hardly a sequence lacks a slot"),
    "next_fit": draw_next_fit,
    "sorted_batches": draw_sorted_batches,
    "none": draw_none,
}


def main() -> None:
    arguments = _parse_arguments()
    if arguments.what == "certified":
        plot_certified(arguments.file, arguments.out, measured=arguments.measured)
        return
    arguments.folder.mkdir(parents=True, exist_ok=True)
    for name, draw in PICTURES.items():
        (arguments.folder / f"{name}.svg").write_text(draw(), encoding="utf-8")


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_subparsers(dest="what", required=True)
    algorithms = what.add_parser("algorithms", help=f"packs of {PACK_LENGTH} slots")
    algorithms.add_argument("folder", type=Path, nargs="?", default=Path("docs/packing"))
    certified = what.add_parser("certified", help="packs above the proven bound")
    certified.add_argument("file", type=Path)
    certified.add_argument("out", type=Path)
    certified.add_argument("--measured", required=True, metavar="WORDS", help="commit and device, for the footer")
    return parser.parse_args()


if __name__ == "__main__":
    main()
