"""The study `evenpack study shuffle`: the order of each arm, the loss of its runs, and its jumps at borders."""

from collections.abc import Sequence
from pathlib import Path

from evenpack.studies.runs.arms import of_each_run
from evenpack.studies.runs.runner import EndedRun
from evenpack.studies.runs.study import Findings, RunsByArm, TrainedStudy
from evenpack.studies.shuffle.config import ShuffleStudyConfig
from evenpack.studies.shuffle.measure import (
    ArmOrder,
    check_run,
    jumps_at,
    measure_order,
    measure_simulated,
    read_losses,
)
from evenpack.studies.shuffle.plots import plot_shuffle
from evenpack.studies.shuffle.tables import jump_table, order_tables


class ShuffleStudy(TrainedStudy[ShuffleStudyConfig]):
    """The arms differ in `data.shuffle`."""

    def __init__(self, study_file: Path, overrides: Sequence[str]) -> None:
        """Loads the study. Raises: ConfigError for settings that make a run invalid, or its order unmeasurable."""
        super().__init__(ShuffleStudyConfig, study_file, overrides)
        for run in self.runs:
            check_run(run.config)

    def reference_of(self, arm: str) -> str:
        return self.study.shuffle.reference

    def compare(self, runs: RunsByArm, ended: Sequence[EndedRun]) -> Findings:
        section = self.study.shuffle
        orders = self._orders(runs)
        borders = _borders_of_corpus(orders, runs)
        losses = of_each_run(runs, lambda run: read_losses(run.output_dir))
        jumps = {arm: jumps_at(of_seed, borders, around=section.steps_around_border) for arm, of_seed in losses.items()}

        def draw(path: Path, origin: str) -> list[Path]:
            plot_shuffle(losses, jumps, borders, self.study, path, origin=origin)
            return [path]

        return Findings(
            value={
                "orders": orders,
                "borders": borders,
                "jumps": jumps,
                "losses": of_each_run(losses, lambda values: values.round(6).tolist()),
            },
            shown=[*order_tables(orders, section), *jump_table(jumps, section, borders=borders)],
            draw=draw,
        )

    def _orders(self, runs: RunsByArm) -> list[ArmOrder]:
        """Returns the order of each arm with a finished run, by its first seed, and the simulated orders."""
        section = self.study.shuffle
        first = {arm: next(iter(of_seed.values())).config for arm, of_seed in runs.items() if of_seed}
        orders = [measure_order(arm, config, section) for arm, config in first.items()]
        if section.reference in first:
            orders += measure_simulated(first[section.reference], section)
        return orders


def _borders_of_corpus(orders: Sequence[ArmOrder], runs: RunsByArm) -> tuple[int, ...]:
    """Returns the starts of blocks of the corpus in its own order, from the first arm of the kind `blocks`.

    Else none.
    """
    for one in orders:
        if one.borders and next(iter(runs[one.arm].values())).config.data.shuffle.kind == "blocks":
            return one.borders
    return ()
