"""Verification during training on several ranks: each reads a share, and all stop with the same message."""

from pathlib import Path

import numpy as np
import pytest
from forked_ranks import run_ranks
from tiny_training import changed, never, numbered_lines, prepare_run

from evenpack.data.manifest import Manifest
from evenpack.data.verification import Verifier
from evenpack.engine.config import RunConfig
from evenpack.engine.train import train_in
from evenpack.engine.world.distributed import World
from evenpack.errors import DataError


def train_sound_then_damaged(world: World, config: RunConfig) -> tuple[str, int]:
    """Returns a rank's message about the damage, and the number of bytes that it has read."""
    train_in(world, changed(config, run={"output_dir": config.run.output_dir / "sound"}), stop_requested=never)
    world.on_main(lambda: _reverse(config.prepared_dir / "sources" / "lines" / "tokens.bin"))
    read = []
    verify = Verifier.verify_share

    def verify_noting(self: Verifier, share: int, shares: int, **options: object) -> object:
        found = verify(self, share, shares, **options)  # type: ignore[arg-type]
        read.append(found.bytes)
        return found

    Verifier.verify_share = verify_noting  # type: ignore[method-assign,assignment]
    with pytest.raises(DataError) as caught:
        train_in(world, config, stop_requested=never)
    return str(caught.value), sum(read)


def _reverse(path: Path) -> None:
    np.fromfile(path, np.uint16)[::-1].tofile(path)


def test_all_ranks_stop_with_the_name_of_the_file_that_one_has_read(tmp_path: Path) -> None:
    config = prepare_run(tmp_path, {"lines": numbered_lines()})
    total = Verifier(config.prepared_dir, Manifest.read(config.prepared_dir)).total_bytes
    (first, read_by_first), (second, read_by_second) = run_ranks(train_sound_then_damaged, 2, config)
    assert first == second
    assert f"{config.prepared_dir / 'sources' / 'lines' / 'tokens.bin'} is not as it was written" in first
    assert "seen by rank" in first
    assert 0 < read_by_first < total
    assert read_by_first + read_by_second == total
    assert not list((config.run.output_dir / "checkpoints").glob("step_*"))
