"""Provides a tiny prepared run."""

import pytest
from tiny_run import tiny_gpt2_run

from evenpack.data.prepared import PreparedData
from evenpack.engine.config import RunConfig


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    return tiny_gpt2_run(tmp_path_factory.mktemp("gpt2"))


@pytest.fixture(scope="module")
def prepared(config: RunConfig) -> PreparedData:
    return PreparedData.open(config.prepared_dir, config.data)
