"""Jobs of a study that the tests pretend end at once."""

import pytest

from evenpack.studies.runs import runner


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "_POLL_SECONDS", 0.0)
