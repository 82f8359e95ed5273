"""Provides a tiny prepared run and the one rank that measures it."""

from collections.abc import Iterator

import pytest
from tiny_run import lone_world, tiny_gpt2_run

from evenpack.data.prepared import PreparedData
from evenpack.engine.config import RunConfig
from evenpack.engine.world.distributed import World


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with lone_world() as alone:
        yield alone


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    return tiny_gpt2_run(tmp_path_factory.mktemp("gpt2"))


@pytest.fixture(scope="module")
def prepared(config: RunConfig) -> PreparedData:
    return PreparedData.open(config.prepared_dir, config.data)
