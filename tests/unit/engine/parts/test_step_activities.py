"""What a rank says that it does, from the phases of its engine."""

from loop_steps import run_of, step_of
from noted_moves import begin_again, noted_moves

from evenpack.batch import PackedBatch
from evenpack.data.batches.pipeline import StepBatches
from evenpack.engine.activity import ACTIVITIES, doing
from evenpack.engine.engine import TrainingEngine
from evenpack.engine.parts.progress import StepActivities


def test_a_step_reports_its_activities_in_order_and_each_micro_batch() -> None:
    begin_again()
    engine = object.__new__(TrainingEngine)
    run = run_of(engine=engine)
    activities = StepActivities(run)
    with noted_moves() as said, activities.opened():
        for number in (4, 5):
            batches = StepBatches(step=number - 1, micro_batches=(object.__new__(PackedBatch),) * 2)
            activities.before_step(step_of(number, batches=batches))
            for phase in ("begin", "forward", "backward", "forward", "backward", "all_reduce", "update"):
                engine.observer(phase)
    activities.after_step(step_of(5))
    assert doing.black_box is None, "the start ends with the first step"
    names = ["computing gradients"] * 2 + ["reducing gradients", "updating weights", "summing over the ranks"]
    assert said == [(name, step) for step in (4, 5) for name in names]
    places = [ACTIVITIES.index(activity) for activity, _ in said[:5]]
    assert places == sorted(places)
