"""Every measured table of README and docs/ holds the numbers of its result files, and names its origin.

A comment above a table says where its numbers come from:

    <!-- from FILE.json FILE.json: reading -->    measured or simulated; a function of this module reads the files of
                                                  benchmarks/results, and the table must hold its numbers, rounded
    <!-- from FILE.json: reading, column 2 -->    the same for one column; other columns are aims or published figures
    <!-- computed: how -->                        by formulas, counts or a run of the named command; nothing was timed
    <!-- published: where -->                     by others
    <!-- settings -->                             of run files, options and formats
    <!-- no raw file: why -->                     measured, and the raw values were not kept

A *reading* returns a list for each row of the table: the numbers of its cells after the first, from left to right, in
the unit that the table shows. Code and the targets of links are not numbers.
"""

import copy
import json
import re
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from repository import ROOT

RESULTS = ROOT / "benchmarks/results"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
GENERATED = {"run_file.md", "other_files.md", "metrics.md"}  # from the code, as tests of their own say

MANY_NUMBERS = 8
"""A table with so many numbers outside of its first column needs an origin, whatever they look like."""

_NUMBER = re.compile(r"(?<![\w.,])[+-]?\d[\d,]*(?:\.\d+)?")
_ORIGIN = re.compile(r"<!-- (?:from (?P<files>[^:]+): (?P<reading>\w+)(?:, column (?P<column>\d+))?|(?P<other>.+)) -->")
_OTHER_ORIGINS = re.compile(r"(?:computed|published|no raw file): .{10,}|settings")

Files = list[Any]
"""The parsed result files that a comment names, in its order."""
Rows = list[list[float]]


@dataclass(frozen=True, kw_only=True)
class Table:
    """A table of a page: its body rows as cells, and the comment above it, None if there is none."""

    place: str
    origin: str | None
    rows: list[list[str]]

    def numbers(self, row: list[str], column: int | None = None) -> list[str]:
        """Returns the numbers in the cells after the first, or in one of them, counted from 1."""
        cells = row[1:] if column is None else [row[column - 1]]
        text = " | ".join(re.sub(r"`[^`]*`|\]\([^)]*\)|https?://\S+", " ", cell) for cell in cells)
        return [number.rstrip(",") for number in _NUMBER.findall(text)]

    @property
    def looks_measured(self) -> bool:
        """Whether it has decimal fractions, percentages or many numbers."""
        numbers = [number for row in self.rows for number in self.numbers(row)]
        per_cent = any(re.search(r"\d ?%", " ".join(row[1:])) for row in self.rows)
        return len(numbers) >= MANY_NUMBERS or any("." in number for number in numbers) or per_cent


def tables_of(text: str, name: str) -> Iterator[Table]:
    """Yields the tables of a Markdown page."""
    lines = re.sub(r"^```.*?^```", lambda block: "\n" * block[0].count("\n"), text, flags=re.M | re.S).splitlines()
    for index, line in enumerate(lines):
        if re.fullmatch(r"\|[ :|-]+\|", line):
            body = []
            for row in lines[index + 1 :]:
                if not row.startswith("|"):
                    break
                body.append([cell.strip() for cell in re.split(r"(?<!\\)\|", row.strip().strip("|"))])
            above = next((other for other in reversed(lines[: index - 1]) if other.strip()), "")
            origin = above if above.startswith("<!--") else None
            yield Table(place=f"{name}:{index}", origin=origin, rows=body)


def all_tables() -> list[Table]:
    """Returns the tables of README and docs/ but for those of generated pages."""
    pages = [page for page in PAGES if page.name not in GENERATED]
    return [table for page in pages for table in tables_of(page.read_text("utf-8"), page.name)]


def differences(table: Table, files: Files, reading: str, column: int | None) -> list[str]:
    """Returns a line for each row that does not hold the numbers of the files."""
    expected = READINGS[reading](files)
    if len(expected) != len(table.rows):
        return [f"{table.place}: {len(table.rows)} rows, {reading} reads {len(expected)}"]
    found = []
    for row, values in zip(table.rows, expected, strict=True):
        quoted = table.numbers(row, column)
        if len(quoted) != len(values) or not all(map(_is_rounded, quoted, values)):
            found.append(f"{table.place}: {row[0]}: the page has {', '.join(quoted)}; the files {values}")
    return found


def _is_rounded(quoted: str, value: float) -> bool:
    """Whether a number as it is printed is `value`, rounded to as many decimals as it has."""
    decimals = len(quoted.partition(".")[2])
    number = float(quoted.replace(",", ""))
    return abs(number - value) <= 0.5 * 10.0**-decimals * (1 + 1e-9) + 1e-12


def significant(value: float, digits: int) -> float:
    """Returns `value` with so many significant digits, for a table that rounds large numbers."""
    return float(f"{value:.{digits}g}")


def per_cent(value: float) -> float:
    """Returns a share in per cent."""
    return 100 * value


# Readings: one for each table


def figures(files: Files) -> Rows:
    """The table of docs/figures.md."""
    plan, packing, peers, loader, balance_512, balance_2048, gpt2, bert, prepare, overhead, *others = files
    pairs, simulated, mini = others
    three = [row for row in peers["runs"][0]["rows"] if (row["histogram"], row["depth"]) == ("wikipedia_512", 3)]
    theirs = [row["efficiency_percent"] for row in three if not row["packer"].startswith("evenpack")]
    ours = next(row["efficiency_percent"] for row in three if row["packer"] == "evenpack cutting_stock")
    masked = pairs["quiet"]["tokens_per_cpu_second"]
    all_held_out = mini["evaluation_of_all_held_out_pairs"]
    return [
        [plan["lengths_to_plan_seconds"], plan["peak_megabytes"]],
        [_packed(packing, "wikipedia_512", None)["efficiency_percent"]],
        [ours, max(theirs)],
        [plan["step_seconds"]],
        [plan["first_batch_99_to_0_percent"]],
        [loader["batches_tokens_per_cpu_second"] / 1e6],
        [balance_512["balanced"], balance_2048["balanced"]],
        [balance_512["at_random"], balance_2048["at_random"]],
        [gpt2["ratio_of_promised_speed_up"]],
        [bert["ratio_of_promised_speed_up"]],
        [prepare["ratio"], prepare["ratio_cpu"]],
        [per_cent(overhead["base"]["costs"]["packed"]["raw"])],
        [statistics.median(masked[of]) / 1e6 for of in ("8 packs of 128", "32 packs of 128")],
        [
            _simulated(simulated, scheme, devices)["speed_up"]
            for scheme in ("unpadded arrival", "packed cost_balanced")
            for devices in (1, 8, 2048)
        ],
        [per_cent(all_held_out["accuracy"]), per_cent(all_held_out["next_sentence_accuracy"])],
    ]


def _packed(rows: Any, histogram: str, depth: int | None) -> Any:
    """Returns the row of `cutting_stock`."""
    key = (histogram, depth, "cutting_stock")
    return next(row for row in rows if (row["histogram"], row["depth"], row["algorithm"]) == key)


def start_and_end(files: Files) -> Rows:
    """Medians over the rounds, of evenpack and then of transformers' Trainer."""
    seconds = files[0]["seconds"]
    parts = ("to the end of the first step", "from the last step to the prompt", "whole")

    def medians(kind: str, program: str, names: tuple[str, ...]) -> list[float]:
        return [statistics.median(round_[name] for round_ in seconds[kind][program]) for name in names]

    programs = ("evenpack", "transformers")
    return [
        *([value for program in programs for value in medians(kind, program, parts)] for kind in ("fresh", "resumed")),
        [value for program in programs for kind in ("fresh", "resumed") for value in medians(kind, program, ("CPU",))],
    ]


def against_checkout(files: Files) -> Rows:
    """For each measure the medians of both checkouts, and the median, least and greatest ratio of a pair."""
    this, other = files[0]["seconds"]["this"], files[0]["seconds"]["other"]

    def row(name: str) -> list[float]:
        ours, theirs = ([seconds[name] for seconds in side] for side in (this, other))
        ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
        return [*map(statistics.median, (ours, theirs, ratios)), min(ratios), max(ratios)]

    return [row(name) for name in this[0]]


def bert_mini(files: Files) -> Rows:
    """What the small BERT predicts, beside guessing."""
    trained, guessed = files[0]["evaluation_of_all_held_out_pairs"], files[0]["unigram"]
    majority = files[0]["next_sentence_majority"]
    return [
        [per_cent(trained["accuracy"]), per_cent(guessed["accuracy"])],
        [trained["loss"], guessed["cross_entropy"]],
        [per_cent(trained["next_sentence_accuracy"]), per_cent(majority)],
    ]


def modernbert_mini(files: Files) -> Rows:
    """What the small ModernBERT predicts, beside guessing."""
    trained, guessed = files[0]["evaluation_of_256_held_out_packs"], files[0]["unigram"]
    return [
        [per_cent(trained["accuracy"]), per_cent(guessed["accuracy"])],
        [trained["loss"], guessed["cross_entropy"]],
    ]


def packs_over_padding(files: Files) -> Rows:
    """How much faster packs are than padding, the factors of their slots and operations, and the share of each."""
    names = ("factor", "operations_factor", "speed_up", "share_of_factor", "share_of_operations_factor")
    return [[one[name] for name in names] for one in files]


def packing_overhead(files: Files) -> Rows:
    """What packing costs BERT, of which collation."""
    rows = []
    for name in ("base", "base_128", "large"):
        measured = files[0][name]
        packed, costs = measured["rows"]["packed"], measured["costs"]
        shown = [costs[kind][of] for kind in ("packed", "one_segment") for of in ("raw", "by_flops")]
        collation = packed["collate_seconds"] / packed["passes_seconds"]
        rows.append([packed["sequences"] / 2, *map(per_cent, [*shown, collation])])
    return rows


def sentence_pairs(files: Files) -> Rows:
    """Lengths of pairs beside the published ones."""
    rows = []
    for length in (128, 384, 512):
        found = files[0][f"lengths_{length}"]
        distances = [
            found[f"{distance}_{of}"]
            for distance in ("total_variation", "largest_cdf_gap")
            for of in ("all_passes", "by_pass")
        ]
        rows.append([found["pairs"], found["mean_length"], found["published_mean_length"], *distances])
    return rows


def hdf5(files: Files) -> Rows:
    """Size and rates of shards in both layouts."""
    layouts = [files[0][layout] for layout in ("fixed", "variable")]
    loader = files[0]["loader_tokens_per_cpu_second"]
    return [
        [significant(layout["megabytes"] * 1e6 / files[0]["rows"], 3) for layout in layouts],
        [significant(layout["exported_rows_per_cpu_second"], 3) for layout in layouts],
        [significant(layout["prepared_rows_per_cpu_second"], 3) for layout in layouts],
        [loader[layout] / 1e6 for layout in ("fixed", "variable")],
    ]


def finetuned(files: Files) -> Rows:
    """Medians over seeds, the interval of the median seed, and guessing."""
    rows = []
    for task in ("sst2", "cola", "rte", "wnli"):
        result = files[0]["after_1500_steps"]["results"][task]
        metric = result["headline"]
        seed = next(seed for seed in result["seeds"] if seed["seed"] == result["median_seed"])
        values = [result["medians"]["dev"][metric], *seed["intervals"]["dev"][metric], result["guesses"]["dev"][metric]]
        rows.append([len(result["seeds"]), *values])
    return rows


def certified(files: Files) -> Rows:
    """Packs of `cutting_stock`, their bound and its time."""
    return [
        [
            found[key]
            for key in ("depth", "packs", "lower_bound", "over_bound_percent", "efficiency_percent", "cpu_seconds")
            if found[key] is not None
        ]
        for found in files[0]
        if found["algorithm"] == "cutting_stock"
    ]


def parallel_prepare(files: Files) -> Rows:
    """CPU seconds of one process, of workers, and the longer of two over one."""
    rows = []
    for machine in ("two_cores", "one_core"):
        medians = files[0][machine]["medians"]
        workers = [medians[of]["longest_worker_cpu_seconds"] for of in ("1 local", "2 local", "1 MPI", "2 MPI")]
        ratios = [files[0][machine][f"longest_of_two_over_one_{kind}"] for kind in ("local", "mpi")]
        rows.append([medians["alone"]["parent_cpu_seconds"], *workers, *ratios])
    return rows


def depths(files: Files) -> Rows:
    """Packing factor, overhead and speed-ups by depth."""
    return [
        [
            row["packing_factor"],
            per_cent(row["overhead"]["median"]),
            row["predicted_speed_up"],
            row["realised_speed_up"]["median"],
        ]
        for row in files[0]["depths_sdpa"]["depths"]
    ]


def dense_mask(files: Files) -> Rows:
    """Overheads with their middle half, and speed-ups, by kind of attention, at a depth of 3 and without a limit."""
    found = [
        {row["depth"]: row for row in files[0][f"depths_{backend}"]["depths"]} for backend in ("sdpa", "dense_mask")
    ]
    quantiles = ("median", "quartile_1", "quartile_3")
    return [
        *([per_cent(rows[depth]["overhead"][of]) for rows in found for of in quantiles] for depth in (3, None)),
        *([rows[depth]["realised_speed_up"]["median"] for rows in found] for depth in (3, None)),
    ]


def batch_capacity(files: Files) -> Rows:
    """Segments, sequences and targets of a micro-batch's arrays, by how they are sized."""
    sizes = ("of_rows_times_the_fullest", "of_the_fullest_together", "counted")
    rows = [("no_limit", size) for size in sizes] + [("depth_3", "counted")]
    return [
        [files[0][limit][f"{kind}_{size}"] for kind in ("segments", "sequences", "targets")] for limit, size in rows
    ]


def chunk_loader(files: Files) -> Rows:
    """Rates of one loader worker by recipe, and over that of packs of documents."""
    medians = [statistics.median(recipe["tokens_per_cpu_second"]) for recipe in files[0]["recipes"].values()]
    return [[rate / 1e6, rate / medians[0]] for rate in medians]


def recipe_costs(files: Files) -> Rows:
    """Rows of `padding` by length and atom, over those of `concat`, and its end-of-text."""
    return [
        [
            row["atom"],
            row["padding_rows"],
            row["padding_rows"] / row["concat_rows"],
            row["ends_behind_full_pieces"],
            row["ends_in_tails"],
            per_cent(row["padding_slots"] / (row["padding_rows"] * row["max_sequence_length"])),
        ]
        for row in files[0]["wiki"]["rows"]
    ]


def steps_of_recipes(files: Files) -> Rows:
    """Steps of `concat` at each length, then steps of `padding` and its share of slots, by atom."""
    runs = files[0]["runs"]
    rows = []
    for length in dict.fromkeys(run["max_sequence_length"] for run in runs):
        here = [run for run in runs if run["max_sequence_length"] == length]
        (concat,) = {run["steps"] for run in here if run["recipe"] == "concat"}
        padded = [run for run in here if run["recipe"] == "padding"]
        shares = [per_cent(run["budget"]["padding"][0]["share"]) for run in padded]
        rows.append(
            [concat, *(value for run, share in zip(padded, shares, strict=True) for value in (run["steps"], share))]
        )
    return rows


def own_documents(files: Files) -> Rows:
    """The first batch of own documents without a cache and with one: CPU seconds and resident memory."""
    return [
        [row["tokens"] / 1e6, row["first"], row["first_peak_bytes"] / 1e6, row["again"], row["again_peak_bytes"] / 1e6]
        for row in files[0]["rows"]
    ]


def loader_wait(files: Files) -> Rows:
    """What a rank waits for its batches."""
    return [
        [run["asked_tokens_per_second"], per_cent(run["wait_share"]), 1000 * run["longest_wait_seconds"]]
        for run in (files[0]["by_thread"][model] for model in ("gpt2", "bert"))
    ]


def shuffled(files: Files) -> Rows:
    """How random each order is, the jump of the loss at borders of blocks, and the loss of the last 50 steps."""
    chance = 1 / files[0]["study"]["shuffle"]["stretches"]
    rows = []
    for order in files[0]["orders"]:
        quality = order["quality"]
        mates = [quality[mates] / chance for mates in ("pack_mates", "step_mates")]
        jumps = list(files[0]["jumps"].get(order["arm"], {}).values())
        last = [statistics.mean(steps[-50:]) for steps in files[0]["losses"].get(order["arm"], {}).values()]
        trained = [of(values) for values in (jumps, last) if values for of in (statistics.mean, statistics.stdev)]
        rows.append([quality["displacement"], *mates, per_cent(quality["window_distance"]), *trained])
    return rows


def shuffled_held_out(files: Files) -> Rows:
    """Held-out loss by kind of text and order, and its difference from the permutation's."""
    return [[*row["loss"].values(), *_interval(row["difference"])] for row in files[0]["held_out"]]


def read_by_order(files: Files) -> Rows:
    """What each order reads of a corpus that is larger than memory, and how fast."""
    return [[order["bytes_per_token"], order["tokens_per_cpu_second"] / 1e6] for order in files[0]["orders"].values()]


def equivalent(files: Files) -> Rows:
    """Held-out losses and their differences from the un-packed runs."""
    return _equivalent(files, "accuracy")


def equivalent_again(files: Files) -> Rows:
    """The same with the accuracy of next sentences, and the control on fewer samples."""
    return _equivalent(files, "accuracy", "next_sentence_accuracy")


def isolated_modernbert(files: Files) -> Rows:
    """The same of ModernBERT with and without isolation."""
    return _equivalent(files, "accuracy")


def _equivalent(files: Files, *accuracies: str) -> Rows:
    return [
        [
            *row["loss"].values(),
            *(per_cent(row[accuracy]["mean"]) for accuracy in accuracies),
            *_interval(row["difference"]),
        ]
        for row in _arms_of_equivalence(files)
    ]


def _arms_of_equivalence(files: Files) -> list[Any]:
    rows = {row["arm"]: row for row in files[0]["comparison"]["rows"]}
    broken = ("packed_without_position_reset", "packed_without_mask")
    arms = ("unpacked", "packed", "packed_beta_p", *broken, "unpacked_80", "isolated", "not_isolated", "isolated_80")
    return [rows[arm] for arm in arms if arm in rows]


def finetuning_control(files: Files) -> Rows:
    """Scores of each seed, without pretraining and with it, by task."""
    rows = files[0]["rows"]
    tasks = dict.fromkeys(row["task"] for row in rows)
    return [[seed["value"] for row in rows if row["task"] == task for seed in row["seeds"]] for task in tasks]


def finetuning_encoders(files: Files) -> Rows:
    """Scores of each seed, from the weights of BERT's mini and of ModernBERT's, by task."""
    return finetuning_control(files)


def _interval(difference: Any) -> list[float]:
    return [] if difference is None else [difference[key] for key in ("mean", "low", "high")]


def _chunked(length: int) -> Callable[[Files], Rows]:
    """Returns the reading of the arms of one length in the study of atoms."""

    def read(files: Files) -> Rows:
        return [
            [
                arm["steps"],
                per_cent(arm["padding_share"]),
                *arm["final"].values(),
                *arm["last_tenth"].values(),
                *arm["documents"].values(),
                *_interval(arm["documents_difference"]),
            ]
            for arm in files[0]["arms"]
            if arm["arm"]["max_sequence_length"] == length
        ]

    return read


def _own_rows(length: int) -> Callable[[Files], Rows]:
    """Returns the reading of the arms' own rows at one length: text alone, and with the ends that close a text."""

    def read(files: Files) -> Rows:
        return [
            [*arm["own_rows"].values(), *arm["own_rows_real_tokens"].values()]
            for arm in files[0]["arms"]
            if arm["arm"]["max_sequence_length"] == length and arm["own_rows"] is not None
        ]

    return read


def isolated(files: Files) -> Rows:
    """The ablation of isolation and of positions that restart."""
    return [
        [*arm["last_tenth"].values(), *arm["documents"].values(), *_interval(arm["documents_difference"])]
        for arm in files[0]["arms"]
    ]


def published_gumbel(files: Files) -> Rows:
    """Speed-ups of un-padding by the published fit, in three ways."""
    rows = files[0]["reference"]["rows"]
    return [[row[method] for row in rows] for method in ("expected", "by_moments", "direct")]


def _simulated(result: Any, scheme: str, devices: int, *, dense: bool = False) -> Any:
    """Returns a scheme's row for a number of devices."""
    layout, policy = scheme.split()
    key = (layout, policy, dense, devices)
    rows = result["simulation"]["rows"]
    return next(row for row in rows if (row["layout"], row["policy"], row["dense"], row["devices"]) == key)


def _simulated_row(result: Any, scheme: str) -> list[float]:
    """Returns speed-ups for 1 to 2,048 devices, and the share of waiting at the end, 0.01 % if it is less."""
    dense = scheme.endswith("dense")
    found = [_simulated(result, scheme.removesuffix(" dense"), n, dense=dense) for n in (1, 2, 8, 64, 512, 2048)]
    wait = per_cent(found[-1]["wait_share"])
    return [*(row["speed_up"] for row in found), 0.01 if 0 < wait < 0.01 else wait]


def simulated_bert(files: Files) -> Rows:
    """All schemes of BERT-large."""
    schemes = (
        *("packed cost_balanced", "packed arrival", "packed arrival dense", "unpadded cost_balanced"),
        *(
            "unpadded sorted_serpentine",
            "unpadded max_tokens",
            "unpadded arrival",
            "padded max_tokens",
            "padded sorted",
        ),
    )
    return [_simulated_row(files[0], scheme) for scheme in schemes]


def simulated_gpt2(files: Files) -> Rows:
    """The main schemes of GPT-2 XL at two lengths."""
    schemes = (
        *("packed cost_balanced", "packed arrival", "packed arrival dense", "unpadded cost_balanced"),
        *("unpadded arrival", "padded max_tokens"),
    )
    return [_simulated_row(file, scheme) for file in files for scheme in schemes]


def simulated_on_cpu(files: Files) -> Rows:
    """Four schemes with cost models that were measured on a CPU."""
    schemes = ("packed cost_balanced", "packed arrival dense", "unpadded cost_balanced", "unpadded arrival")
    return [_simulated_row(file, scheme) for file in files for scheme in schemes]


_REPLAYED = ("packed cost_balanced", "packed arrival", "unpadded cost_balanced", "unpadded arrival", "padded arrival")
"""Packs by arrival are not in the oldest file."""


def _replayed(*devices: int) -> Callable[[Files], Rows]:
    """Speed-ups of replayed clusters with their intervals, and shares of waiting on all but one device."""

    def replayed(files: Files) -> Rows:
        rows = []
        for scheme in _REPLAYED:
            found = {
                row["devices"]: row
                for row in files[0]["replay"]["rows"]
                if f"{row['layout']} {row['policy']}" == scheme
            }
            if found:
                is_unit = scheme == "padded arrival"
                keys = ("speed_up",) if is_unit else ("speed_up", "speed_up_low", "speed_up_high")
                speeds = [found[count][key] for count in devices for key in keys]
                rows.append([*speeds, *(per_cent(found[count]["wait_share"]) for count in devices[1:])])
        return rows

    return replayed


def noisy(files: Files) -> Rows:
    """Three schemes with the noise that the published spread needs."""
    rows = []
    for scheme in ("packed cost_balanced", "unpadded cost_balanced", "unpadded arrival"):
        found = [_simulated(files[0], scheme, devices) for devices in (1, 2, 8, 64, 512)]
        rows.append([*(row["speed_up"] for row in found), per_cent(found[-1]["wait_share"])])
    return rows


def evidence(files: Files) -> Rows:
    """Un-padding by arrival on 1, 8 and 64 devices: replayed, simulated twice, and published."""
    replayed_rows = {
        row["devices"]: row["speed_up"]
        for row in files[0]["replay"]["rows"]
        if (row["layout"], row["policy"]) == ("unpadded", "arrival")
    }
    simulated = [
        {devices: _simulated(file, "unpadded arrival", devices)["speed_up"] for devices in (1, 8, 64)} for file in files
    ]
    published = {row["devices"]: row["expected"] for row in files[1]["reference"]["rows"]}
    kinds = (replayed_rows, *simulated, published)
    return [[*(kind[devices] for devices in (1, 8, 64)), per_cent(kind[64] / kind[1])] for kind in kinds]


def step_spread(files: Files) -> Rows:
    """The deviation of steps that lengths explain, and the noise that would explain the rest."""
    kinds = [files[0][kind] for kind in ("tokens", "attention", "fixed")]
    return [[kind["deviation_of_lengths"], per_cent(kind["share"])] for kind in kinds]


def forecast(files: Files) -> Rows:
    """Seconds of the slowest device, replayed, and two forecasts from the times of one."""
    rows = []
    for row in files[0]["replay"]["forecasts"]:
        values = [row["seconds"], row["standard_error"]]
        for method in ("order_statistics", "by_law"):
            values += [row["forecast"][method], *row["forecast"][f"{method}_interval"].values()]
        rows.append(values)
    return rows


def evenness(files: Files) -> Rows:
    """Attention's part of all operations, the most expensive pack over the mean, and waiting of each packing."""
    rows = []
    for case in files[0].values():
        found = {(row["devices"], row["packs_are"]): row for row in case["rows"]}
        packings = [(devices, name) for devices in (8, 64) for name in ("full", "even", "least", "planned")]
        full = found[8, "full"]
        rows.append(
            [100 * full["attention_share"], full["most"], *(100 * found[packing]["waiting"] for packing in packings)]
        )
    return rows


def evenness_shipped(files: Files) -> Rows:
    """Attention's part, the operations of a pack, and those that a device waits: full, least and planned."""
    cases: dict[tuple[str, str], dict[tuple[int, str], Any]] = {}
    for row in files[0]["rows"]:
        cases.setdefault((row["model"], row["lengths"]), {})[row["devices"], row["packs_are"]] = row
    rows = []
    for found in cases.values():
        values = [per_cent(found[8, "full"]["attention_share"]), found[8, "full"]["pack_flops"] / 1e12]
        for devices in (8, 64):
            full, least, planned = (found[devices, name] for name in ("full", "least", "planned"))
            values += [full["waiting_flops"] / 1e12, per_cent(full["waiting"])]
            values += [one["waiting_flops"] / 1e12 for one in (least, planned)]
        rows.append(values)
    return rows


def replayed_and_trained(files: Files) -> Rows:
    """The slowest rank over the mean one, trained with its standard error, and replayed."""
    keys = ("trained_slowest_over_mean", "standard_error", "replayed_slowest_over_mean")
    found = {(row["scheme"], row["ranks"]): row for row in files[0]["rows"]}
    schemes = ("packed cost_balanced", "unpadded cost_balanced", "unpadded arrival", "padded arrival")
    return [[found[scheme, ranks][key] for ranks in (2, 4) for key in keys] for scheme in schemes]


def roofline(files: Files) -> Rows:
    """Tokens/s of one GPU: the goal, the estimate with its MFU, after each fusion, and the floor."""
    rows = [[file["goal"] for file in files], []]
    for file in files:
        rows[1] += [significant(file["expected_tokens_per_second"], 3), per_cent(file["expected_mfu"])]
    for index in range(4):
        rows.append([significant(file["fusions"][index]["tokens_per_second"], 3) for file in files])
    return [*rows, [significant(file["floor_tokens_per_second"], 3) for file in files]]


def roofline_measured(files: Files) -> Rows:
    """Tokens/s on one H100, as estimated with compiled blocks and as measured, and by how much the estimate is off."""
    *estimates, before, after = files
    results = [
        before["results"]["throughput_bert_large_phase2_sprint_compiled"],
        before["results"]["throughput_gpt2_xl_compiled"],
        after["results"]["throughput_gpt2_small_compiled"],
    ]
    rows = []
    for estimate, result in zip(estimates, results, strict=True):
        computed = significant(estimate["fusions"][0]["tokens_per_second"], 3)
        measured = result["layouts"][0]["tokens_per_second"]["median"]
        rows.append([computed, significant(measured, 3), per_cent(computed / measured - 1)])
    return rows


def roofline_beside_others(files: Files) -> Rows:
    """The estimate with all fusions, in its column."""
    return [[significant(file["fusions"][-1]["tokens_per_second"], 3)] for file in files]


def gpu_steps(files: Files) -> Rows:
    """Milliseconds of a step on a GPU, tokens and sequences per second, MFU, and the peak of memory in GB."""
    before, after, layouts = (file["results"] for file in files)
    bert = "throughput_bert_large_phase2_sprint"
    rows = [
        before["throughput_gpt2_small_compiled"]["layouts"][0],
        after["throughput_gpt2_small_compiled"]["layouts"][0],
        before["throughput_gpt2_xl_compiled"]["layouts"][0],
        before[f"{bert}_compiled"]["layouts"][0],
        before[f"{bert}_compiled_without_attention_dropout"]["layouts"][0],
        *reversed(layouts[f"{bert}_layouts"]["layouts"]),
    ]
    return [
        [
            1e3 * row["step_seconds"]["median"],
            row["tokens_per_second"]["median"],
            row["sequences_per_second"]["median"],
            per_cent(row["mfu"]["median"]),
            row["peak_memory_bytes"] / 1e9,
        ]
        for row in rows
    ]


def gpu_head(files: Files) -> Rows:
    """TFLOP/s of the products of a chunk of the loss."""
    kinds = ("logits", "hidden_gradient", "weight_gradient", "weight_gradient_added_in_fp32")
    rows = [row for row in files[0]["head_products"] if row["rows"] == 5341]
    shapes = [(width, *of) for width in (768, 1600) for of in ((50_257, 50_257), (50_257, 50_304), (50_304, 50_304))]
    found = {(row["width"], row["vocabulary"], row["row_stride"]): row["tflops"] for row in rows}
    return [[found[shape][kind] for kind in kinds] for shape in shapes]


def gpu_loss(files: Files) -> Rows:
    """Milliseconds of the loss by the bytes of a chunk."""
    found: dict[tuple[bool, str], list[float]] = {}
    for row in files[0]["loss"]:
        if row["width"] == 768:
            found.setdefault((row["compiled"], row["commit"][:4]), []).append(row["milliseconds"])
    return [found[key] for key in ((True, "aef3"), (True, "03fb"), (True, "b74a"), (False, "aef3"), (False, "b74a"))]


def gpu_segments(files: Files) -> Rows:
    """Milliseconds, and megabytes, by the room for segments."""
    rows = files[0]["segments"]
    return [
        [row[key] for key in ("milliseconds", "megabytes") for row in rows if row["heads"] == heads]
        for heads in (12, 25)
    ]


def gpu_profiles(files: Files) -> Rows:
    """Milliseconds of a step's kernels by what they do."""
    profiles = files[0]["profiles"]
    kinds = ("matmul", "attention", "elementwise", "optimizer")
    seconds = [profiles[name]["seconds_per_step"] for name in ("bert_large_phase2_sprint", "gpt2_small")]
    return [[1e3 * row[kind] for kind in kinds] for row in seconds]


def packs_against_padding(files: Files) -> Rows:
    (report,) = files
    keys = ("padding", "packs", "speed_up", "packing_factor", "share")
    return [[row[key] for key in keys] for row in report["rows"]]


def peer_rates(files: Files) -> Rows:
    """CPU seconds of preparing, the text that an epoch gives, rates, and milliseconds to the first batch."""
    rows = []
    for loader in files[0]["loaders"].values():
        rates = [loader["tokens_per_cpu_second"]]
        if "tokenising" in loader["rounds"][0]:
            rates.append(loader["tokens_per_cpu_second_without_tokenising"])
        first = [1000 * loader[of] for of in ("first", "first_after_resume")]
        read = per_cent(loader["epoch_1"]["read"])
        rows.append([loader["prepare"], read, *(rate / 1e6 for rate in rates), *first])
    return rows


def peer_batches(files: Files) -> Rows:
    """Fill and balance of batches, the borders that they show, and how much a model leaks that gets them."""
    return [
        [
            per_cent(loader["fill"]["real_over_slots"]),
            loader["fill"]["largest_over_mean_micro_batch"],
            loader["balance"]["tokens"],
            loader["balance"]["squared_lengths"],
            per_cent(loader["borders_shown"]),
            loader["leak"],
        ]
        for loader in files[0]["loaders"].values()
    ]


def peer_orders(files: Files) -> Rows:
    """Steps of each of two ranks, text that they read again, and steps that other ranks and resumed ones share."""
    rows = []
    for loader in files[0]["loaders"].values():
        resumed = [loader[f"resume_{ranks}"] for ranks in ("1_1", "2_2", "2_1", "1_2")]
        same = [per_cent(one["steps_of_uninterrupted"]) for one in resumed if "refused" not in one]
        epoch = loader["epoch_2"]
        rows.append([*epoch["steps"], per_cent(epoch["repeated"]), per_cent(loader["steps_shared_by_ranks"]), *same])
    return rows


def injected_faults(files: Files) -> Rows:
    """The rank of each fault, and when it was named, by how much, and when it was well again, if the run went on."""
    return [
        [row["rank"], row["named_after"], per_cent(row["slow_by"]), *([row["well_after"]] if row["well_after"] else [])]
        for row in files[0]["faults"]
    ]


def wait_shares(files: Files) -> Rows:
    """The parts of the devices' time."""
    return [[per_cent(share)] for share in files[0]["shares"].values()]


def healthy_runs(files: Files) -> Rows:
    """Runs without a fault, and the ranks that were named in them."""
    return [[row["runs"], row["steps"], row["false_alarms"]] for row in files[0]["healthy"]]


def slowed_runs(files: Files) -> Rows:
    """How many constant slowdowns were named, and after how many steps."""
    keys = ("named", "median_delay", "expected_delay", "longest_delay", "median_recovery")
    return [[row[key] for key in keys] for row in files[0]["slowed"]]


READINGS: dict[str, Callable[[Files], Rows]] = {
    "figures": figures,
    "injected_faults": injected_faults,
    "wait_shares": wait_shares,
    "healthy_runs": healthy_runs,
    "slowed_runs": slowed_runs,
    "start_and_end": start_and_end,
    "against_checkout": against_checkout,
    "bert_mini": bert_mini,
    "modernbert_mini": modernbert_mini,
    "packs_over_padding": packs_over_padding,
    "packing_overhead": packing_overhead,
    "packs_against_padding": packs_against_padding,
    "sentence_pairs": sentence_pairs,
    "hdf5": hdf5,
    "finetuned": finetuned,
    "certified": certified,
    "parallel_prepare": parallel_prepare,
    "depths": depths,
    "dense_mask": dense_mask,
    "batch_capacity": batch_capacity,
    "chunk_loader": chunk_loader,
    "recipe_costs": recipe_costs,
    "steps_of_recipes": steps_of_recipes,
    "own_documents": own_documents,
    "loader_wait": loader_wait,
    "shuffled": shuffled,
    "shuffled_held_out": shuffled_held_out,
    "read_by_order": read_by_order,
    "equivalent": equivalent,
    "equivalent_again": equivalent_again,
    "equivalent_of_ten": equivalent_again,
    "isolated_modernbert": isolated_modernbert,
    "finetuning_control": finetuning_control,
    "finetuning_encoders": finetuning_encoders,
    "chunked_64": _chunked(64),
    "chunked_256": _chunked(256),
    "own_rows_64": _own_rows(64),
    "own_rows_256": _own_rows(256),
    "isolated": isolated,
    "isolated_learned": isolated,
    "published_gumbel": published_gumbel,
    "simulated_bert": simulated_bert,
    "simulated_gpt2": simulated_gpt2,
    "simulated_on_cpu": simulated_on_cpu,
    "replayed": _replayed(1, 8, 64),
    "replayed_mini": _replayed(1, 4, 16),
    "replayed_demo": _replayed(1, 4, 8),
    "noisy": noisy,
    "evidence": evidence,
    "step_spread": step_spread,
    "forecast": forecast,
    "evenness": evenness,
    "evenness_shipped": evenness_shipped,
    "replayed_and_trained": replayed_and_trained,
    "roofline": roofline,
    "roofline_beside_others": roofline_beside_others,
    "roofline_measured": roofline_measured,
    "gpu_steps": gpu_steps,
    "gpu_head": gpu_head,
    "gpu_loss": gpu_loss,
    "gpu_segments": gpu_segments,
    "gpu_profiles": gpu_profiles,
    "peer_rates": peer_rates,
    "peer_batches": peer_batches,
    "peer_orders": peer_orders,
}


def measured_tables() -> list[tuple[Table, Files, str, int | None]]:
    """Returns each table that quotes result files, with the files, its reading and its column."""
    found = []
    for table in all_tables():
        origin = _ORIGIN.fullmatch(table.origin or "")
        if origin and origin["files"]:
            files = [json.loads((RESULTS / name).read_text("utf-8")) for name in origin["files"].split()]
            found.append((table, files, origin["reading"], int(origin["column"]) if origin["column"] else None))
    return found


MEASURED = measured_tables()
by_table = pytest.mark.parametrize(
    ("table", "files", "reading", "column"),
    MEASURED,
    ids=[f"{table.place} {reading}" for table, _, reading, _ in MEASURED],
)


def test_every_table_with_numbers_names_their_origin() -> None:
    for table in all_tables():
        origin = _ORIGIN.fullmatch(table.origin or "")
        assert origin or table.origin is None, f"{table.place}: not an origin: {table.origin}"
        if origin is None:
            assert not table.looks_measured, f"{table.place}: a comment above it must name the origin of its numbers"
        elif origin["other"]:
            assert _OTHER_ORIGINS.fullmatch(origin["other"]), f"{table.place}: not an origin: {table.origin}"


def test_every_reading_is_that_of_one_table() -> None:
    assert sorted(reading for _, _, reading, _ in MEASURED) == sorted(READINGS)


@by_table
def test_a_table_holds_the_numbers_of_its_files(table: Table, files: Files, reading: str, column: int | None) -> None:
    assert differences(table, files, reading, column) == []


@by_table
def test_each_number_of_a_table_is_compared(table: Table, files: Files, reading: str, column: int | None) -> None:
    for index, row in enumerate(table.rows):
        cells = range(1, len(row)) if column is None else [column - 1]
        for cell in cells:
            for number in table.numbers(row, cell + 1):
                changed = copy.deepcopy(table.rows)
                changed[index][cell] = row[cell].replace(number, _changed(number), 1)
                assert differences(replace(table, rows=changed), files, reading, column), f"{row[0]}: {number}"


def _changed(number: str) -> str:
    """Returns the number with another first digit."""
    digit = re.search(r"\d", number)
    assert digit
    return number[: digit.start()] + str((int(digit[0]) + 4) % 9 + 1) + number[digit.end() :]


_VERDICTS = {"higher", "lower", "no effect", "cannot tell"}
_JUDGED = {
    "chunked_64": ("last_tenth_verdict", "documents_verdict"),
    "chunked_256": ("last_tenth_verdict", "documents_verdict"),
    "isolated": ("documents_verdict",),
    "isolated_learned": ("documents_verdict",),
}
"""What the verdicts of a table are on, from left to right, by its reading."""


@pytest.mark.parametrize("reading", _JUDGED)
def test_verdicts_are_those_that_the_study_formed(reading: str) -> None:
    ((table, files),) = ((table, files) for table, files, name, _ in MEASURED if name == reading)
    length = int(reading.rpartition("_")[2]) if reading.startswith("chunked") else 0
    arms = [arm for arm in files[0]["arms"] if length in {0, arm["arm"]["max_sequence_length"]}]
    found = [[cell for cell in row if cell in _VERDICTS] for row in table.rows]
    assert found == [[arm[key] for key in _JUDGED[reading] if arm[key] is not None] for arm in arms]
    assert sum(map(len, found)) >= len(arms) - 2


def test_verdicts_of_held_out_text_are_those_that_the_study_formed() -> None:
    ((table, files),) = ((table, files) for table, files, name, _ in MEASURED if name == "shuffled_held_out")
    assert [row[-1] or None for row in table.rows] == [row["verdict"] for row in files[0]["held_out"]]


@pytest.mark.parametrize("reading", ["equivalent_again", "equivalent_of_ten", "isolated_modernbert"])
def test_verdicts_of_equivalence_are_those_that_the_study_formed(reading: str) -> None:
    ((table, files),) = ((table, files) for table, files, name, _ in MEASURED if name == reading)
    assert [row[-1] or None for row in table.rows] == [arm["verdict"] for arm in _arms_of_equivalence(files)]


@by_table
def test_a_table_differs_from_files_with_other_numbers(
    table: Table, files: Files, reading: str, column: int | None
) -> None:
    changed = differences(table, _larger(files, float), reading, column)
    assert changed or differences(table, _larger(files, int), reading, column), "a file of counts has no fractions"


def _larger(value: Any, kind: type) -> Any:
    """Returns a document with all fractions larger by a twentieth, or all whole numbers by a fourth."""
    if isinstance(value, dict):
        return {key: _larger(item, kind) for key, item in value.items()}
    if isinstance(value, list):
        return [_larger(item, kind) for item in value]
    if type(value) is not kind:
        return value
    return value * 1.05 if kind is float else value + value // 4


def test_a_table_without_an_origin_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "| | s |\n| --- | --- |\n| step | 0.25 |\n\n<!-- settings -->\n\n| | n |\n| --- | --- |\n| `a` | 9 % |\n"
    )
    first, second = tables_of(page.read_text(), page.name)
    assert first.origin is None
    assert first.looks_measured
    assert second.origin == "<!-- settings -->"
    assert second.numbers(second.rows[0]) == ["9"]


def test_a_number_is_compared_as_it_is_rounded() -> None:
    assert _is_rounded("1.31", 1.3149)
    assert not _is_rounded("1.31", 1.3151)
    assert _is_rounded("16,384", 16384.4)
    assert not _is_rounded("-0.2", 0.2)
