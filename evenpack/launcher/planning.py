"""The plan of a run with what would be started, and one of its ranks rehearsed: `evenpack plan`."""

from dataclasses import replace

from rich.console import RenderableType

from evenpack.console import Report, pairs
from evenpack.data.order.step_shape import Batching
from evenpack.data.verification import explained_damage
from evenpack.engine.config import RunConfig
from evenpack.engine.memory.rehearsal import RankRehearsal, rehearse
from evenpack.engine.resolving.resolve import ResolvedRun
from evenpack.errors import ConfigError, NotPreparedError
from evenpack.launcher.processes.start import LaunchPlan
from evenpack.launcher.training import check_training
from evenpack.studies.plan.options import PlanOptions
from evenpack.studies.plan.plan import RunPlan, plan_run
from evenpack.studies.plan.presentation import plan_shown


def plan_training(config: RunConfig, *, ranks: int) -> RunPlan:
    """Plans a prepared run, and checks everything that can be known before a process is started.

    Raises: as `check_training`; DataError for a vocabulary that the objective cannot use, or for damaged data.
    """
    return _plan_checked(check_training(config, ranks=ranks), PlanOptions(), ranks=ranks, is_timed=False)


def _plan_checked(run: ResolvedRun, options: PlanOptions, *, ranks: int, is_timed: bool) -> RunPlan:
    run.prepared.verify("nothing")
    with explained_damage(run.config.prepared_dir):
        return plan_run(run.config, options, ranks=ranks, resolved=run, is_timed=is_timed)


def describe_plan(
    config: RunConfig, options: PlanOptions, *, launch: LaunchPlan | None, ranks: int, rank: int | None
) -> Report:
    """Returns the report of `evenpack plan`; of a run that is not prepared, what follows from its file and the options.

    Args:
        launch: what `evenpack train` would start; None for ranks whose machines are not known.
        rank: whose first step is rehearsed; None: no rank's.

    Raises: as `plan_training`; ConfigError if there is no such rank, or no data for a rehearsal.
    """
    run = None
    if options.corpus_tokens is None:
        try:
            run = check_training(config, ranks=ranks)
        except NotPreparedError:
            if rank is not None:
                raise
    elif rank is not None:
        raise ConfigError("--rank rehearses a step of prepared data: leave --corpus-tokens out")
    is_timed = launch is not None and launch.devices.kind == "cpu" and options.device is None
    plans = (
        [plan_run(part, options, ranks=ranks) for _, part in config.parts]
        if run is None
        else [_plan_checked(part, options, ranks=ranks, is_timed=is_timed) for part in run.parts]
    )
    if len(plans) > 1:
        spans = [part.span for _, part in config.parts]
        plans = [
            replace(plan, run=f"{plan.run}, steps {span.start + 1:,} to {span.stop:,}")
            for plan, span in zip(plans, spans, strict=True)
        ]
    if launch is not None:
        start = replace(
            plans[0].start,
            devices=launch.devices.choice,
            command=launch.command,
            environment=launch.environment,
        )
        plans[0] = replace(plans[0], start=start)
    report = Report(
        value=dict(vars(plans[0])) | ({"later_parts": plans[1:]} if plans[1:] else {}),
        shown=[
            shown
            for plan in plans
            for shown in plan_shown(plan, shell_line=None if launch is None else launch.shell_line())
        ],
    )
    if rank is not None and run is not None:
        with explained_damage(config.prepared_dir):
            report.value["rehearsal"] = found = rehearse(run.parts[0], rank=rank, ranks=ranks)
        report.shown.append(rehearsal_table(found, run.config.training.batching))
    return report


def rehearsal_table(found: RankRehearsal, batching: Batching) -> RenderableType:
    """Returns the first step of one rank as a table."""
    peak = found.memory.peak
    size = f"{_range(found.items)} {batching} and {_range(found.slots)} slots"
    return pairs(
        {
            "micro-batches": f"{len(found.items)}, of {size} each",
            "sequences": found.sequences,
            "tokens": f"{found.tokens:,}, {found.tokens / found.tokens_of_the_mean_rank:.4f} x the mean rank's",
            "targets": found.targets,
            "cost": f"{found.cost_over_mean:.4f} x the mean rank's; the most expensive rank's is "
            f"{found.largest_cost_over_mean:.4f} x",
            "memory": f"{peak.total / 1e9:,.2f} GB on a GPU at the peak ({peak.phase}), estimated",
            "faked step": f"forward, backward, reduction, update; a gradient of {found.faked_gradients:,} numbers",
        },
        title=f"First step of rank {found.rank:,} of {found.ranks:,}",
    )


def _range(numbers: tuple[int, ...]) -> str:
    return f"{min(numbers):,}" if min(numbers) == max(numbers) else f"{min(numbers):,} to {max(numbers):,}"
