"""Writes OUTPUT_DIR/tensorboard: event files for TensorBoard."""

from collections.abc import Mapping

from evenpack.engine.reporting.definitions import scalars
from evenpack.engine.reporting.trackers.tracker import RunLog

TENSORBOARD = "tensorboard"

_FLUSH_SECONDS = 30


class TensorBoardEvents:
    """Writes with torch's `SummaryWriter`. A resumed run makes TensorBoard discard the steps that are repeated."""

    def __init__(self, log: RunLog) -> None:
        from torch.utils.tensorboard import SummaryWriter

        directory = log.output_dir / TENSORBOARD
        is_new = not any(directory.glob("events.out.tfevents.*"))
        purge_step = None if is_new else log.first_step + 1
        self._writer = SummaryWriter(str(directory), purge_step=purge_step, flush_secs=_FLUSH_SECONDS)
        if is_new:
            for record in log.records():
                self.write(record["step"], scalars(record))

    def write(self, step: int, values: Mapping[str, int | float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def flush(self) -> None:
        self._writer.flush()

    def close(self, *, failed: bool) -> None:
        self._writer.close()
