"""The computation of `evenpack budget`."""

from evenpack.console import Report
from evenpack.engine.config import RunConfig
from evenpack.errors import ConfigError
from evenpack.studies.budget.options import BudgetOptions
from evenpack.studies.budget.presentation import budget_tables, optimum_table, serving_table
from evenpack.studies.budget.scaling import Allocation, compute_optimal, find_law, optimally_trained, serve
from evenpack.studies.budget.study import Budget, budget_of


def compute_budget(config: RunConfig | None, options: BudgetOptions) -> Report:
    """Returns the budget of a run, if one is given, and the other figures that the options request.

    Raises: ConfigError as `BudgetOptions.require_valid`; and see `budget_of`.
    """
    options.require_valid(has_run=config is not None)
    law = find_law(options.scaling_law)
    budget = None if config is None else budget_of(config, options)
    report = Report(value={} if budget is None else dict(vars(budget)))
    if budget is not None:
        report.shown += budget_tables(budget)
    optimum = None
    if options.compute is not None:
        optimum = compute_optimal(options.compute)
        report.value["compute_optimal"] = {
            "flops": options.compute,
            "parameters": optimum.parameters,
            "tokens": optimum.tokens,
        }
        report.shown.append(optimum_table(options.compute, optimum))
    if options.served_tokens is not None:
        serving = serve(optimum or _start(budget), options.served_tokens, law)
        report.value["serving"] = serving
        report.shown.append(serving_table(serving))
    return report


def _start(budget: Budget | None) -> Allocation:
    """Returns the run's model at the tokens that are optimal for it, whose loss smaller ones are to reach."""
    assert budget is not None, "there is a run or a number of operations"
    if not budget.is_causal:
        raise ConfigError(
            f"--served-tokens uses losses of causal models, and {budget.model} is none: give --compute FLOPS for "
            "models of that kind, or leave it out"
        )
    return optimally_trained(float(budget.parameters))
