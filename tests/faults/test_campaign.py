"""A few minutes of the campaign: some faults of each way to start a run, and of `prepare`; each must be survived.

Their kinds and seeds are fixed, so that no other fault than these can refuse a change: `scripts/fault_campaign` draws
them at random, for as long as one likes.
"""

import math
from collections.abc import Iterator

import pytest

from faults import subject
from faults.campaign import Campaign
from faults.converting import DURING
from faults.subject import CASES, Case, Stack
from faults.tried import Tried

pytestmark = pytest.mark.slow

SEED = 3
PLANS: dict[Stack, tuple[str, ...]] = {
    "evenpack train": ("SIGKILL to a rank", "a slow disk", "SIGSTOP to a rank, for a while", "SIGKILL to a launcher"),
    "torchrun": ("SIGKILL to the resource tracker", "SIGKILL to all ranks", "a rank reads another run file"),
    "python": ("SIGKILL to a loader's worker", "a loss is NaN", "SIGTERM, SIGINT or SIGHUP"),
}
"""Faults of each run, in their order."""


@pytest.fixture(scope="module")
def campaign(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Campaign]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(subject, "HANG_TIMEOUT_SECONDS", 200)  # no planned fault hangs, and a busy machine is slow
        patch.setattr(subject, "START_TIMEOUT_SECONDS", 400)
        patch.setattr(subject, "STEPS", 120)  # the last planned fault comes before step 60
        campaign = Campaign(tmp_path_factory.mktemp("faults"), seed=SEED, say=print)
        yield campaign
        campaign.close()


def assert_survived(tried: list[Tried], *, at_least: int) -> None:
    assert [one for one in tried if one.outcome == "lost"] == []
    assert len(tried) >= at_least


@pytest.mark.parametrize("case", [CASES[1], CASES[4], CASES[5]], ids=lambda case: case.stack)
def test_a_run_with_faults_ends_as_an_undisturbed_one(campaign: Campaign, case: Case) -> None:
    before = len(campaign.tried)
    campaign.begin_again(SEED)
    campaign.run_with_faults(case, deadline=math.inf, plan=PLANS[case.stack])
    tried = campaign.tried[before:]
    assert_survived(tried, at_least=1)
    assert [one.name for one in tried] == list(PLANS[case.stack])


def test_preparing_with_faults_leaves_the_files_of_an_undisturbed_one(campaign: Campaign) -> None:
    before = len(campaign.tried)
    campaign.begin_again(SEED)
    campaign.prepare_with_faults(6)
    assert_survived(campaign.tried[before:], at_least=3)


def test_a_conversion_that_is_killed_is_made_again(campaign: Campaign) -> None:
    before = len(campaign.tried)
    campaign.begin_again(SEED)
    for _ in range(5):
        campaign.convert_with_a_fault()
        tried = campaign.tried[before:]
        assert_survived(tried, at_least=0)
        if any(one.name == DURING for one in tried):
            return
    pytest.fail(f"each of five conversions was over before its kill: {tried}")
