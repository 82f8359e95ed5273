"""What a rank says that it does, from the phases of its engine."""

from evenpack.engine.activity import ACTIVITIES, Activity, StepActivities


def test_a_step_goes_through_its_activities_in_order_and_each_micro_batch_is_progress() -> None:
    said: list[tuple[Activity, int]] = []
    activities = StepActivities(lambda activity, step: said.append((activity, step)), micro_batches=2)
    for step in (4, 5):
        activities.begin(step)
        for phase in ("begin", "forward", "backward", "forward", "backward", "all_reduce", "update"):
            activities.end_of(phase)
    names = ["computing gradients"] * 2 + ["reducing gradients", "updating weights", "summing over the ranks"]
    assert said == [(name, step) for step in (4, 5) for name in names]
    places = [ACTIVITIES.index(activity) for activity, _ in said[:5]]
    assert places == sorted(places)
