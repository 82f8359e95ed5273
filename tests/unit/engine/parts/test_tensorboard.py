"""Event files are read with TensorBoard's own reader."""

from pathlib import Path

from run_logs import record, run_with_log
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from evenpack.engine.parts.trackers import TensorBoardEvents
from evenpack.engine.reporting.definitions import scalars


def losses(folder: Path) -> list[tuple[int, float]]:
    events = EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0}).Reload()
    return [(event.step, event.value) for event in events.Scalars("training/loss")]


def test_a_run_that_resumes_shows_no_step_twice(tmp_path: Path) -> None:
    killed = TensorBoardEvents(run_with_log(tmp_path))
    for step in range(1, 9):
        killed.write(step, scalars(record(step)))
    killed.flush()
    assert [step for step, _ in losses(tmp_path)] == [1, 2, 3, 4, 5, 6, 7, 8]
    again = TensorBoardEvents(run_with_log(tmp_path, steps=range(1, 5)))
    again.write(5, {"training/loss": 0.5})
    again.write(6, {"training/loss": 0.25})
    again.close(failed=False)
    assert losses(tmp_path)[3:] == [(4, 2.5), (5, 0.5), (6, 0.25)]
    killed.close(failed=True)


def test_what_is_switched_on_later_gets_the_earlier_steps(tmp_path: Path) -> None:
    events = TensorBoardEvents(run_with_log(tmp_path, steps=[1, 2]))
    events.write(3, {"training/loss": 0.5})
    events.close(failed=False)
    assert losses(tmp_path) == [(1, 10.0), (2, 5.0), (3, 0.5)]
