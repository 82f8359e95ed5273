"""The runs of a chunking study before they are started, with the budget of each: `--dry-run`."""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace

from rich.console import RenderableType

from evenpack import console
from evenpack.data.prepare.known_tokens import find_tokens
from evenpack.data.prepare.manifest import MANIFEST
from evenpack.studies.budget.budget import Budget, budget_of
from evenpack.studies.budget.options import BudgetOptions
from evenpack.studies.chunking.arms import atom_of
from evenpack.studies.runs.expansion import StudyRun
from evenpack.studies.runs.tables import run_rows


@dataclass(frozen=True, kw_only=True)
class PlannedRun:
    """A run as far as its run file and the known part of its data determine it."""

    run: str
    state: str
    recipe: str
    """`data.recipe.kind`."""
    max_sequence_length: int
    atom: int | None
    rows_per_step: int | None
    micro_batches_per_rank: int | None
    steps: int | None
    """Steps; None before the data is tokenised, unless they follow from counts."""
    budget: Budget | None
    """Budget; None in the same cases."""
    output_dir: str


def planned_runs(runs: Sequence[StudyRun], options: BudgetOptions) -> tuple[PlannedRun, ...]:
    """Returns the planned runs; those of one arm with different seeds have the same budget.

    Raises: ConfigError if the ranks cannot divide the steps of a run, one has finished with other settings, or a budget
    cannot be computed.
    """
    budgets: dict[tuple[str, str], Budget | None] = {}
    planned = []
    for row, run in zip(run_rows(runs, ranks=options.devices), runs, strict=True):
        arm = (run.phase, run.arm)
        if arm not in budgets:
            budgets[arm] = _budget(run, options)
        budget, data = budgets[arm], run.config.data
        planned.append(
            PlannedRun(
                run=row.run,
                state=row.state,
                recipe=data.recipe.kind,
                max_sequence_length=data.recipe.max_sequence_length,
                atom=atom_of(data.recipe),
                rows_per_step=row.items_per_step,
                micro_batches_per_rank=row.micro_batches_per_rank,
                steps=row.steps if budget is None else budget.steps,
                budget=budget,
                output_dir=row.output_dir,
            )
        )
    return tuple(planned)


def planned_table(planned: Sequence[PlannedRun], *, title: str) -> RenderableType:
    """Returns one line per run."""
    rows = [_shown(one) for one in planned]
    if any(one.budget is not None and one.budget.time is not None for one in planned):
        rows = [row | {"hours": _hours(one.budget)} for row, one in zip(rows, planned, strict=True)]
    return console.table(rows, title=title)


def prepare_command(planned: Sequence[PlannedRun], runs: Sequence[StudyRun]) -> str | None:
    """Returns the command that makes the tokens on which all budgets depend; None where no budget is missing."""
    missing = {one.run for one in planned if one.budget is None}
    first = next((run for run in runs if run.key in missing), None)
    return None if first is None else shlex.join(["evenpack", "prepare", str(first.run_file), *first.overrides])


def unknown_text(planned: Sequence[PlannedRun], command: str | None) -> list[RenderableType]:
    """Returns the reason why figures are missing, if any, and the command that makes them available."""
    if command is None:
        return []
    kinds = sorted({one.recipe for one in planned if one.budget is None})
    return [
        console.text(
            f"A dash stands for what is not known yet: the steps of {', '.join(kinds)} follow from the length of each "
            "document, and the corpus is not tokenised. (Those of concat and documents follow from --corpus-tokens and "
            f"--corpus-documents, too.) This tokenises it for all runs, then list them again:\n{command}"
        )
    ]


def _budget(run: StudyRun, options: BudgetOptions) -> Budget | None:
    """Returns the exact budget of prepared or tokenised data, or one by counts where they suffice; else None."""
    config = run.config
    if (config.prepared_dir / MANIFEST).is_file() or find_tokens(config.data) is not None:
        return budget_of(config, replace(options, corpus_tokens=None, corpus_documents=None))
    if options.corpus_tokens is None or config.data.recipe.kind not in ("concat", "documents"):
        return None
    return budget_of(config, options)


def _shown(one: PlannedRun) -> dict[str, object]:
    budget = one.budget
    return {
        "run": one.run,
        "state": one.state,
        "recipe": one.recipe,
        "MSL": one.max_sequence_length,
        "atom": one.atom,
        "rows/step": one.rows_per_step,
        "accumulation": one.micro_batches_per_rank,
        "steps": one.steps,
        "tokens": None if budget is None else round(budget.tokens),
        "padding": None if budget is None else console.percent(_padding_share(budget)),
        "tokens/parameter": None if budget is None else round(budget.tokens_per_parameter, 2),
        "FLOPs": None if budget is None else f"{budget.flops:.3g}",
    }


def _padding_share(budget: Budget) -> float:
    """Returns the fraction of padding among the slots of all steps."""
    return 1.0 - budget.tokens / (budget.steps * budget.batch.slots)


def _hours(budget: Budget | None) -> float | None:
    return None if budget is None or budget.time is None else round(budget.time.hours, 2)
