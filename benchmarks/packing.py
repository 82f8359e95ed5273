"""Measures how close packing comes to the certified bound, and its time, on histograms of lengths.

    python benchmarks/packing.py [--case NAME[:DEPTH] ...] [--json]

NAME is a published histogram. Each case is packed by cutting_stock and by longest_pack_first with packs as long as the
histogram; CPU seconds are medians over the repeats.
"""

import argparse
import json
import statistics

import measuring

from evenpack.data.packing import LengthHistogram, pack
from evenpack.studies.lengths.reading import published_histogram

ALGORITHMS = ("longest_pack_first", "cutting_stock")
CASES = (
    *("squad_1_1_384", "wikipedia_512", "wikipedia_512:3", "wikipedia_512:4", "wikipedia_512:8"),
    *("wikipedia_1024", "wikipedia_1024:3", "wikipedia_1024:4", "wikipedia_1024:8", "wikipedia_1024:16"),
    *("wikipedia_2048", "wikipedia_2048:3", "wikipedia_2048:4", "wikipedia_2048:8", "wikipedia_2048:16"),
)


def main() -> None:
    arguments = _parse_arguments()
    rows = []
    for case in arguments.case:
        name, _, depth = case.partition(":")
        rows += [
            _row(name, published_histogram(name), algorithm, int(depth) if depth else None, arguments.repeats)
            for algorithm in ALGORITHMS
        ]
        if not arguments.json:
            for row in rows[-2:]:
                print("  ".join(f"{key} {value}" for key, value in row.items()), flush=True)
    if arguments.json:
        print(json.dumps(rows, indent=2))


def _row(name: str, histogram: LengthHistogram, algorithm: str, depth: int | None, repeats: int) -> dict[str, object]:
    runs = [
        pack(histogram, algorithm, pack_length=histogram.longest, max_sequences_per_pack=depth) for _ in range(repeats)
    ]
    packing = runs[0]
    return {
        "histogram": name,
        "depth": depth,
        "algorithm": algorithm,
        "packs": packing.packs,
        "lower_bound": packing.lower_bound,
        "over_bound_percent": round(packing.gap * 100, 6),
        "efficiency_percent": round(packing.efficiency * 100, 4),
        "cpu_seconds": round(statistics.median(run.cpu_seconds for run in runs), 3),
        "repeats": repeats,
    }


def _parse_arguments() -> argparse.Namespace:
    parser = measuring.parser_of(__doc__)
    parser.add_argument("--case", nargs="+", default=CASES, help="NAME or NAME:DEPTH")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


if __name__ == "__main__":
    main()
