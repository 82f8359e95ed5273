"""A chunking study as tables, and as figures, one per length."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float64
from rich.console import RenderableType

from evenpack import console
from evenpack.errors import ConfigError
from evenpack.files import require_folder
from evenpack.studies.chunking.compare import Arm, ArmRow, FinishedRuns
from evenpack.studies.chunking.config import ChunkingConfig, ChunkingSection
from evenpack.studies.chunking.curves import smoothed
from evenpack.studies.columns import Column, table_of, wide_table_of
from evenpack.studies.plotting import COLOURS, figure_as_png, line_style, require_matplotlib, write_footer, write_title
from evenpack.studies.runs.arms import arm_label, confidence_text, draw_runs, seeds_text

_ARM = Column("arm", "arm.name")
_FINAL = Column("final", form=".2f")
_FINAL_STEP = Column("final step", "final_step", ".2f")
_DOCUMENTS = Column("documents alone", "documents", ".2f")
_TRAINED = (
    _ARM,
    Column("atom", lambda row: row.arm.atom_label if row.arm.atom else None),
    Column("seeds", lambda row: len(row.seeds)),
    Column("steps/epoch", lambda row: round(row.steps_per_epoch, 1)),
    _FINAL,
    Column("last 10 %", "last_tenth", ".2f"),
    Column("rank in recipe", "rank_in_recipe", ".2f"),
    Column("rank of all", "rank_at_length", ".2f"),
    _FINAL_STEP,
)
_RECIPES = (
    Column("recipe", "arm.recipe"),
    Column("MSL", "arm.max_sequence_length"),
    Column("batch", "arm.rows_per_step"),
    Column("steps"),
    Column("padding", "padding_share", ".2%"),
    Column("tokens/step", "tokens_per_step", ",.0f"),
    _FINAL_STEP,
    _FINAL,
    _DOCUMENTS,
)


def comparison_tables(rows: Sequence[ArmRow], section: ChunkingSection) -> list[RenderableType]:
    """Returns each length's arms in training and on held-out documents, and recipes side by side.

    A note before a run ends.
    """
    if not rows:
        return [console.text("No run of the compared phase has finished.")]
    shown: list[RenderableType] = []
    for length, arms in by_length(rows):
        names = dict.fromkeys(section.reference_of(row.arm.name, length) for row in arms)
        reference = " or ".join(names) + ("" if len(names) == 1 else " (as the study file says)")
        confidence = confidence_text(section.significance)
        shown += [_trained(length, arms, reference, confidence), _at_steps(length, arms)]
        if any(row.own_rows or row.documents for row in arms):
            shown.append(_held_out(length, arms, reference, confidence))
    natural = [row for row in rows if row.arm.is_natural]
    if len(natural) > 1:
        shown.append(wide_table_of(natural, _RECIPES, title="Recipes side by side, with atoms of one row (as table 3)"))
    return shown


def by_length(rows: Sequence[ArmRow]) -> Iterator[tuple[int, list[ArmRow]]]:
    """Yields the rows of each MSL, shortest first."""
    for length in sorted({row.arm.max_sequence_length for row in rows}):
        yield length, [row for row in rows if row.arm.max_sequence_length == length]


def _trained(length: int, arms: Sequence[ArmRow], reference: str, confidence: str) -> RenderableType:
    return wide_table_of(
        arms,
        [*_TRAINED, *_difference("last_tenth_difference", confidence), *_verdict("last_tenth", arms)],
        title=(
            f"MSL {length}: training perplexity (as table 2). final, rank: over the last 1 %, and each 1 %, of the "
            f"last epoch; difference: of the last 10 % from {reference}, seed by seed"
        ),
    )


def _at_steps(length: int, arms: Sequence[ArmRow]) -> RenderableType:
    steps = [
        Column(f"step {step:,}", lambda row, step=step: row.at_steps[step], ".2f")  # type: ignore[misc]
        for step in arms[0].at_steps
    ]
    title = f"MSL {length}: training perplexity, mean over the 1 % of an epoch that ends at a step"
    return table_of(arms, [_ARM, *steps], title=title)


def _held_out(length: int, arms: Sequence[ArmRow], reference: str, confidence: str) -> RenderableType:
    return wide_table_of(
        arms,
        [
            _ARM,
            _DOCUMENTS,
            *_difference("documents_difference", confidence),
            *_verdict("documents", arms),
            Column("own rows, as trained", "own_rows", ".2f"),
        ],
        title=(
            f"MSL {length}: perplexity on held-out documents. documents alone: the same targets for all arms; own "
            f"rows: in rows of the arm's own recipe; difference: of documents alone from {reference}"
        ),
    )


def _difference(path: str, confidence: str) -> list[Column]:
    return [Column("difference", f"{path}.mean", "+.2f"), Column(confidence, f"{path}.interval", "+.2f")]


def _verdict(name: str, arms: Sequence[ArmRow]) -> list[Column]:
    """Returns the column of verdicts, which says for how many comparisons they are corrected; none without any."""
    compared = sum(getattr(row, f"{name}_verdict") is not None for row in arms)
    return [Column(f"of {compared} (Holm)", f"{name}_verdict", missing="")] if compared else []


_POINTS = 400
"""Points of a curve as it is drawn."""
_RECIPE_COLOURS = COLOURS[6:]
"""None of them is the colour of an atom of 0.25 to 4 MSL, because a recipe is not the arm of one atom."""
_RATIO_COLOURS = dict(
    zip((4.0, 2.0, 1.0, 0.25, 0.5, 0.125, 8.0, 0.0625, 16.0), (*COLOURS[:5], *COLOURS[6:10]), strict=True)
)
"""Colours as in the paper, for comparison with its figures: purple, red, green, orange, blue; others beyond them."""
_HEAD = 0.1
"""Fraction of a run that is not drawn, in which perplexity falls from the size of the vocabulary."""
_HEAD_OF_RECIPES = 0.25
"""Fraction that is not drawn in the comparison of recipes, which differ by less than atoms do."""
_ROW_INCHES = 4.0


def require_plots(folder: Path) -> None:
    """Checks the folder. Raises: ConfigError if no figure can be written into it, before any work is done."""
    require_matplotlib()
    if folder.suffix:
        raise ConfigError(
            f"--plot takes a folder, because there is a figure for each length: give a name without '{folder.suffix}', "
            f"not {folder}"
        )
    require_folder(folder, option="--plot")


def plot_lengths(
    finished: FinishedRuns, rows: Sequence[ArmRow], study: ChunkingConfig, folder: Path, *, origin: str
) -> list[Path]:
    """Draws the finished runs of each length and returns the figures' paths. Raises: ConfigError without matplotlib.

    `origin`: data, commits and devices of the runs.
    """
    drawn = []
    for length, arms in by_length(rows):
        drawn.append(folder / f"msl_{length}.png")
        _plot_length(finished, arms, study, drawn[-1], origin)
    return drawn


def _plot_length(
    finished: FinishedRuns, rows: Sequence[ArmRow], study: ChunkingConfig, path: Path, origin: str
) -> None:
    """Draws all of training and the last epoch, by atom for each recipe; below, all recipes."""
    recipes: dict[str, list[ArmRow]] = {}
    for row in rows:
        recipes.setdefault(row.arm.recipe, []).append(row)
    by_atom = {name: arms for name, arms in recipes.items() if len(arms) > 1}
    natural = [row for row in rows if row.arm.is_natural]
    lines = len(by_atom) + 1
    section = study.chunking
    with figure_as_png(path, width=12.0, height=_ROW_INCHES * lines) as figure:
        grid = figure.add_gridspec(lines, 2)
        for line, (name, arms) in enumerate(by_atom.items()):
            axes = [figure.add_subplot(grid[line, column]) for column in range(2)]
            _draw_curves(axes[0], finished, arms, section, last_epoch=False)
            _draw_curves(axes[1], finished, arms, section, last_epoch=True)
            write_title(axes[0], f"{name}: all of training")
            write_title(axes[1], f"{name}: last epoch")
        _draw_recipes(figure.add_subplot(grid[lines - 1, :]), finished, natural, section, beside_atoms=bool(by_atom))
        write_footer(figure, [origin, *_captions(rows, study)])


def _captions(rows: Sequence[ArmRow], study: ChunkingConfig) -> list[str]:
    section, seeds = study.chunking, seeds_text(row.seeds for row in rows)
    lines = [
        f"MSL {rows[0].arm.max_sequence_length} (maximum sequence length), {seeds}. Curves: "
        f"exponential moving average, alpha {section.smoothing:g} on the {section.smoothing_weighs} value; mean over "
        "seeds, bands from least to greatest. Last 10 %: of the last epoch.",
    ]
    if any(row.arm.atom for row in rows) and not study.phases[study.last_phase].draws_rows_by_seed:
        lines.append("All seeds have one order of rows: the deviation over seeds leaves out what another one would do.")
    if any(row.arm.counts_padding for row in rows):
        lines.append(
            "Training perplexity of a recipe with padding counts its padding, which is easy to predict: compare "
            "recipes by held-out documents."
        )
    return lines


def _draw_curves(
    axes: Any, finished: FinishedRuns, rows: Sequence[ArmRow], section: ChunkingSection, *, last_epoch: bool
) -> None:
    """Draws curves against epochs, because arms of one recipe may differ in their steps."""
    for row in rows:
        epochs = row.arm.epochs
        begin = epochs - 1.0 if last_epoch else _HEAD * epochs
        grid = np.linspace(begin, epochs, _POINTS)
        style = {"label": row.arm.atom_label, "color": _colour(row.arm), "linewidth": 1.5}
        draw_runs(axes, grid, _lines(finished, row, section, grid), **style)
    axes.set_xlabel("epoch")
    axes.set_ylabel("training perplexity")
    axes.legend(frameon=False, fontsize=8.5, title="atom", title_fontsize=8.5)


def _draw_recipes(
    axes: Any, finished: FinishedRuns, rows: Sequence[ArmRow], section: ChunkingSection, *, beside_atoms: bool
) -> None:
    """Draws curves against steps, as figure 3: a recipe with padding takes more of them."""
    colours = _RECIPE_COLOURS if beside_atoms else COLOURS
    for index, row in enumerate(rows):
        grid = np.linspace(_HEAD_OF_RECIPES * row.arm.epochs, row.arm.epochs, _POINTS)
        style = {**line_style(index, colours), "linewidth": 1.5}
        label = f"{arm_label(row.arm.recipe)} ({row.steps:,} steps)"
        draw_runs(axes, grid * row.steps_per_epoch, _lines(finished, row, section, grid), label=label, **style)
        axes.plot([row.steps], [row.last_tenth.mean], "o", color=style["color"], markersize=5)
    axes.set_xlabel("step (optimizer updates)")
    axes.set_ylabel("training perplexity")
    axes.legend(frameon=False, fontsize=8.5)
    what = "Recipes side by side, atoms of one row" if beside_atoms else "Arms side by side"
    write_title(axes, f"{what}; dots: mean of the last 10 %")


def _lines(
    finished: FinishedRuns, row: ArmRow, section: ChunkingSection, epochs: Float64[np.ndarray, " points"]
) -> list[Float64[np.ndarray, " points"]]:
    """Returns the smoothed perplexity of each seed at the given positions."""
    lines = []
    for one in finished[row.arm.name].values():
        curve = one.curve
        values = smoothed(curve.perplexity, smoothing=section.smoothing, weighs=section.smoothing_weighs)
        ends_of_steps = np.arange(1, curve.steps + 1) / curve.steps * row.arm.epochs
        lines.append(np.interp(epochs, ends_of_steps, values))
    return lines


def _colour(arm: Arm) -> str:
    """Returns the colour of the atom in units of the MSL; arms without one and other ratios share the last colour."""
    ratio = None if arm.atom is None else arm.atom / arm.max_sequence_length
    return COLOURS[5] if ratio is None else _RATIO_COLOURS.get(ratio, COLOURS[5])
