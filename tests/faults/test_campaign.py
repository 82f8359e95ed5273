"""A few minutes of the campaign: some faults of each way to start a run, and of `prepare`; each must be survived."""

import time
from collections.abc import Iterator

import pytest

from faults.campaign import Campaign
from faults.converting import DURING
from faults.subject import CASES, Case
from faults.tried import Tried

pytestmark = pytest.mark.slow

SEED = 3
STARTS = 3
"""Of each run with faults."""


@pytest.fixture(scope="module")
def campaign(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Campaign]:
    campaign = Campaign(tmp_path_factory.mktemp("faults"), seed=SEED, say=print)
    yield campaign
    campaign.close()


def assert_survived(tried: list[Tried], *, at_least: int) -> None:
    assert [one for one in tried if one.outcome == "lost"] == []
    assert len(tried) >= at_least


@pytest.mark.parametrize("case", [CASES[1], CASES[4], CASES[5]], ids=lambda case: case.stack)
def test_a_run_with_faults_ends_as_an_undisturbed_one(campaign: Campaign, case: Case) -> None:
    before = len(campaign.tried)
    campaign.run_with_faults(case, deadline=time.monotonic() + 240.0, most_lives=STARTS)
    assert_survived(campaign.tried[before:], at_least=1)


def test_preparing_with_faults_leaves_the_files_of_an_undisturbed_one(campaign: Campaign) -> None:
    before = len(campaign.tried)
    campaign.prepare_with_faults(6)
    assert_survived(campaign.tried[before:], at_least=3)


def test_a_conversion_that_is_killed_is_made_again(campaign: Campaign) -> None:
    before = len(campaign.tried)
    for _ in range(5):
        campaign.convert_with_a_fault()
        tried = campaign.tried[before:]
        assert_survived(tried, at_least=0)
        if any(one.name == DURING for one in tried):
            return
    pytest.fail(f"each of five conversions was over before its kill: {tried}")
