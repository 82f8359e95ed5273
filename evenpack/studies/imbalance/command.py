"""The command `evenpack study imbalance`."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from evenpack.console import Report
from evenpack.studies.imbalance.options import ImbalanceOptions

if TYPE_CHECKING:
    from evenpack.studies.lengths.subject import Subject


@dataclass(frozen=True, kw_only=True)
class ImbalanceCommand(ImbalanceOptions):
    """Compare packs with un-padding and padding on one device to thousands, where each step waits for the slowest.

    Clusters are simulated on the lengths. For a run, micro-batch, accumulation, ZeRO stage, ranks and model are its own
    unless an option says otherwise, and the steps that it logged are compared with the steps of --baseline-run. With
    --replay, this device computes what every device of a cluster would, one after another.

    \b
    Examples:
      evenpack study imbalance wikipedia_512 --devices 1..2048 --plot imbalance.png --save imbalance.json
      evenpack study imbalance wikipedia_1024 --cost-model gpt2_xl_estimate --devices 8,64,512
      evenpack study imbalance RUN.yaml --baseline-run PADDED.yaml --plot imbalance.png
      evenpack study imbalance RUN.yaml --replay 1,8,64 --plot imbalance.png
      evenpack study imbalance wikipedia_512 --log result_0.txt --log result_1.txt --save forecast.json
    """

    def uses_device(self) -> bool:
        """Returns whether clusters are to be replayed."""
        return self.replay is not None

    def run(self, find_subject: "Callable[[], Subject]") -> Report:
        """Checks the options and the log before reading the lengths. Raises: as `run_study`."""
        from evenpack import console
        from evenpack.studies.imbalance.presentation import imbalance_tables, plot_imbalance
        from evenpack.studies.imbalance.study import run_study

        study = run_study(self, find_subject)
        shown = [*map(console.text, study.subject.long_sentences()), *imbalance_tables(study)]
        if self.plot is not None:
            plot_imbalance(study, self.plot)
            shown.append(console.text(f"Drew {self.plot}"))
        value = {
            "origin": study.subject.origin,
            "long_sequences": study.subject.long_sequences(),
            "devices": sorted({row.devices for row in study.simulation.rows}),
            "run": study.step,
            "reference": study.reference,
            "measured": study.measured,
            "regimes": study.regimes,
            "replay": study.replay,
            "simulation": study.simulation,
            "notes": study.notes,
            "warnings": study.warnings,
        }
        return Report(value=value, shown=shown)
