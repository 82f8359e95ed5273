"""The command `evenpack study imbalance`."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from evenpack.console import Report
from evenpack.studies.imbalance.arguments import ImbalanceArguments

if TYPE_CHECKING:
    from evenpack.studies.lengths.subject import Subject


@dataclass(frozen=True, kw_only=True)
class ImbalanceCommand(ImbalanceArguments):
    """Compare packs with un-padding and padding on one device to thousands, where each step waits for the slowest.

    Clusters are simulated on the lengths. For a run, micro-batch, accumulation, ZeRO stage, ranks and model are its own
    unless an option says otherwise, and the steps that it logged are compared with those of --baseline-run. With
    --replay, this device computes what every device of a cluster would, one after another.

    \b
    Examples:
      evenpack study imbalance wikipedia_512 --devices 1..2048 --plot imbalance.png --save imbalance.json
      evenpack study imbalance wikipedia_512 --devices 8 --plot-steps steps.png
      evenpack study imbalance wikipedia_1024 --cost-model gpt2_xl_estimate --devices 8,64,512
      evenpack study imbalance RUN.yaml --baseline-run PADDED.yaml --plot imbalance.png
      evenpack study imbalance RUN.yaml --replay 1,8,64 --plot imbalance.png
      evenpack study imbalance RUN.yaml --cost-model h100.json --all-reduce-bytes 6.7e8 --bandwidth 100
      evenpack study imbalance wikipedia_512 --log result_0.txt --padded-baseline 1130
    """

    def uses_device(self) -> bool:
        """Returns whether clusters are to be replayed."""
        return self.replay is not None

    def run(self, find_subject: "Callable[[], Subject]") -> Report:
        """Checks the options and the log before reading the lengths. Raises: as `ImbalanceRequest`."""
        from evenpack.studies.imbalance.request import ImbalanceRequest
        from evenpack.studies.imbalance.study import study_imbalance

        request = ImbalanceRequest(self)
        value, shown = study_imbalance(find_subject(), request)
        return Report(value=value, shown=shown)
