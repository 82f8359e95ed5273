"""Ranks on a CPU that their machine's memory cannot hold are refused before a model is built, and others are not."""

from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace

import pytest
from tiny_run import lone_world, tiny_gpt2_run

from evenpack.config import load_run_file
from evenpack.engine import train
from evenpack.engine.config import RunConfig
from evenpack.engine.memory import host
from evenpack.engine.memory.estimate import micro_batch_size, training_memory
from evenpack.engine.memory.host import generous_bytes, require_host_memory
from evenpack.engine.resolving.data_facts import AverageItem
from evenpack.engine.resolving.resolve import ResolvedRun
from evenpack.errors import ConfigError
from evenpack.launcher.processes.start import Devices, LaunchPlan
from evenpack.launcher.training import run_training

GIB = 1 << 30
VOCABULARY = 50_257
SHIPPED = ("demo", "gpt2_xl", "llama_8b", "modernbert_base_8192", "bert_large_phase1", "mlperf/bert_large_padded")


def resolved(name: str, *overrides: str) -> ResolvedRun:
    """Returns a shipped run of which only the parts are known that decide its memory."""
    config = load_run_file(Path(name), RunConfig, overrides)
    length = config.data.pack_length
    run = object.__new__(ResolvedRun)
    item = AverageItem(sequences=Fraction(2), tokens=Fraction(length), row_slots=length)
    vars(run).update(config=config, run_file=config, item=item, prepared=SimpleNamespace(vocabulary_size=VOCABULARY))
    return run


def test_what_would_be_killed_is_refused_and_what_fits_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, gibibytes, overrides, refused in (
        ("mlperf/bert_large_packed", 24, (), "at least 59.3 GB: 29.7 GB for each.*What fits: .*packs_per_micro_batch="),
        ("mlperf/bert_large_packed", 64, (), None),
        ("mlperf/bert_large_packed", 24, ("training.packs_per_micro_batch=4",), None),
        ("llama_8b", 64, (), "Take a smaller model, or a larger machine"),
        ("demo", 1, (), None),
        ("demo", 1 / 8, (), "It has 0.1 GB"),
    ):
        monkeypatch.setattr(host, "memory_bytes", lambda room=gibibytes: int(room * GIB))
        run = resolved(name, *overrides)
        if refused is None:
            require_host_memory(run, ranks=2, ranks_here=2)
            continue
        with pytest.raises(ConfigError, match=refused) as error:
            require_host_memory(run, ranks=2, ranks_here=2)
        for fitting in str(error.value).partition("What fits: ")[2].split("; or "):
            if fitting:  # what it says is not refused itself
                require_host_memory(resolved(name, *fitting.split()), ranks=2, ranks_here=2)


def test_no_rank_is_started_that_would_be_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "memory_bytes", lambda: 24 * GIB)
    devices = Devices(kind="cpu", ranks=2, options=(), choice="2 ranks on the CPU")
    launch = LaunchPlan(command=("false",), environment={}, devices=devices, hostfile=None, extra=())
    with pytest.raises(ConfigError, match="2 ranks on this machine's CPU would need at least"):
        run_training(launch, resolved("mlperf/bert_large_packed", f"run.output_dir={tmp_path}/out"))
    assert not (tmp_path / "out").exists()


def test_a_rank_of_another_launcher_is_refused_before_it_builds_a_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny_gpt2_run(tmp_path)
    monkeypatch.setattr(host, "memory_bytes", lambda: 1_000_000)
    monkeypatch.setattr(train, "find_start", lambda *_: pytest.fail("the memory was not compared"))
    with lone_world() as world, pytest.raises(ConfigError, match="1 rank on this machine's CPU would need at least"):
        train.train_in(world, config, stop_requested=lambda: False)


@pytest.mark.parametrize("name", SHIPPED)
def test_a_run_that_surely_fits_is_known_without_an_estimate(name: str) -> None:
    run = resolved(name)
    size = micro_batch_size(run.config, run.item)
    peak = training_memory(run.config, size, vocabulary_size=VOCABULARY, ranks=1).phases
    least = max(one.parameters + one.gradients + one.optimizer + one.activations for one in peak)
    assert least < generous_bytes(run.config, size, vocabulary_size=VOCABULARY)
