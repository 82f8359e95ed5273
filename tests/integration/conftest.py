"""Defines the fixture that several files of integration tests share."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_runs import FakeRun


@pytest.fixture
def fake_run(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[FakeRun]:
    """Returns a run of fake ranks, as `fake_runs.training` chooses them; none of its processes may be left over."""
    run = FakeRun.create(tmp_path, request.param)
    yield run
    assert run.close() == []
