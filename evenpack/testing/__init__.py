"""Helpers for tests of evenpack and of packages that use it: small runs from one builder, and functions on gloo ranks.

    from evenpack.testing import changed, prepared, run_config, run_ranks, run_values

    config = prepared(run_config(run_values("gpt2", tmp_path, training={"steps": 4})))
    outcomes = run_ranks(train_in, 2, config)

`run_values` and `pair_run_values` give the sections of a run file that trains in a second; `text_sources` writes the
documents of its sources; `run_config` checks it, `prepared` prepares its data and `write_run_file` writes it for the
command line. `run_ranks` calls a function on several ranks of this machine's CPU. Nothing here needs a test runner.
"""

from evenpack.testing.ranks import RanksFailed, preload, run_ranks
from evenpack.testing.runs import (
    RunValues,
    changed,
    pair_run_values,
    prepared,
    run_config,
    run_values,
    text_sources,
    write_run_file,
)

__all__ = [
    "run_values",
    "pair_run_values",
    "RunValues",
    "text_sources",
    "run_config",
    "changed",
    "prepared",
    "write_run_file",
    "run_ranks",
    "preload",
    "RanksFailed",
]
