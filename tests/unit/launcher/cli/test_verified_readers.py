"""Whatever reads prepared data verifies what it reads, or says in one line that it does not."""

import itertools
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from command_line import Done, evenpack
from run_files import pair_run_values, text_sources, write_run_file
from slow_cases import slow_but
from tiny_run import lone_world

import evenpack as ev
from evenpack.config import load_run_file
from evenpack.console import log_to_stderr
from evenpack.data.manifest import Manifest
from evenpack.data.prepared import PreparedData, _say_unverified
from evenpack.data.verification import Content, Verified, Verifier
from evenpack.engine.checkpoints.weight_sources import find_weights
from evenpack.engine.config import RunConfig
from evenpack.engine.evaluate import Evaluations, evaluate_model
from evenpack.engine.train import train_in
from evenpack.errors import DataError
from evenpack.launcher import trained

NOT_VERIFIED = "is not verified here, only its sizes"
WORDS = ("a small cat sat.", "the dog ran far.", "it was late.", "we all went home.", "nobody saw the moon.")


class TrainedRun(NamedTuple):
    """A run with stored masks, held-out documents and a checkpoint."""

    file: Path
    config: RunConfig

    def evenpack(self, command: str, *arguments: object) -> Done:
        return evenpack(*command.split(), self.file, *arguments)

    @property
    def api(self) -> ev.Run:
        return ev.open(self.file)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> TrainedRun:
    folder = tmp_path_factory.mktemp("run")
    pairs = itertools.permutations(WORDS, 2)
    documents = {"one": [" ".join((first, second, first)) for first, second in pairs]}
    recipe = {"kind": "sentence_pairs", "max_sequence_length": 48, "duplication_factor": 1}
    data = {
        "sources": text_sources(folder, documents),
        "recipe": recipe | {"static_masks": {"max_predictions": 7}},
        "validation_fraction": 0.3,
    }
    training = {"steps": 1, "packs_per_step": 2, "packs_per_micro_batch": 1}
    file = write_run_file(folder / "run.yaml", pair_run_values("bert", folder, data=data, training=training))
    config = load_run_file(file, RunConfig)
    assert evenpack("prepare", file).code == 0
    with lone_world() as world:
        train_in(world, config, stop_requested=lambda: False)
    return TrainedRun(file=file, config=config)


Reader = Callable[[TrainedRun, Path], object]

READERS: dict[str, tuple[Content | None, Reader]] = {
    "evaluate": ("all", lambda run, _: run.evenpack("evaluate")),
    "evaluate other text": (
        "tokenizer",
        lambda run, new: run.evenpack("evaluate", "--data", run.file.with_name("one.txt")),
    ),
    "export": ("tokenizer", lambda run, new: run.evenpack("export", new)),
    "study throughput": ("all", lambda run, _: run.evenpack("study throughput", "--rounds", 1)),
    "study packing": ("lengths", lambda run, _: run.evenpack("study packing")),
    "weights of a run": ("tokenizer", lambda run, _: find_weights(run.config.run.output_dir).tokenizer_dir),
    "where": (None, lambda run, _: run.evenpack("where", "--step", 1, "--text")),
    "plan": (None, lambda run, _: run.evenpack("plan", "--cpu-ranks", 1)),
    "Run.prepared": (None, lambda run, _: run.api.prepared),
    "Run.plan": (None, lambda run, _: run.api.plan()),
    "Run.evaluate": ("all", lambda run, _: run.api.evaluate()),
    "Run.steps": ("all", lambda run, _: next(run.api.steps())),
    "Run.batches": ("all", lambda run, _: next(run.api.batches(rank=1, ranks=2))),
    "Run.evaluation_batches": ("all", lambda run, _: next(run.api.evaluation_batches("one"))),
    "PreparedData.open": ("all", lambda run, _: PreparedData.open(run.config.prepared_dir, run.config.data)),
}
"""What each reader verifies; None: nothing, which it says."""

OTHERS = {"evaluate other text", "study throughput", "Run.evaluate", "Run.batches", "Run.evaluation_batches"}
"""Those that open the data by the same functions as others."""


def outcome(reader: Reader, run: TrainedRun, new: Path, capsys: pytest.CaptureFixture[str]) -> tuple[bool, str]:
    """Returns whether a reader went well, and what it said."""
    log_to_stderr()
    _say_unverified.cache_clear()
    capsys.readouterr()
    shutil.rmtree(new, ignore_errors=True)
    try:
        done = reader(run, new)
    except DataError as error:
        return False, str(error)
    said = capsys.readouterr().err
    if isinstance(done, Done):
        assert done.code in (0, 2), done.stderr
        return done.code == 0, said + done.stderr
    return True, said


@contextmanager
def one_bit_of(*paths: Path) -> Iterator[None]:
    """Changes the last bit of some files within the block."""
    before = {path: path.read_bytes() for path in paths}
    for path, content in before.items():
        path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    try:
        yield
    finally:
        for path, content in before.items():
            path.write_bytes(content)


@pytest.mark.parametrize("name", slow_but(READERS.keys() - OTHERS, READERS))
def test_a_reader_names_each_damaged_file_that_it_reads_or_says_that_it_does_not_verify(
    name: str, run: TrainedRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    content, reader = READERS[name]
    directory, new = run.config.prepared_dir, tmp_path / "new"
    files = [record.locate(directory) for record in Manifest.read(directory).files.values()]
    read = [path for path in files if content is not None and is_read(path, content)]
    assert len(files) > 25
    for path in read[list(READERS).index(name) % 4 :: 4]:  # each reader others, so that every file is damaged for some
        with one_bit_of(path):
            went_well, said = outcome(reader, run, new, capsys)
        assert not went_well
        assert re.search(rf"is damaged:\n  {path} is not as it was written", said), said
    others = [path for path in files if path not in read and content is not None]
    with one_bit_of(*others):
        went_well, said = outcome(reader, run, new, capsys)
    assert went_well, said
    assert said.count(NOT_VERIFIED) == (content is None), said


def is_read(path: Path, content: Content) -> bool:
    return {"all": True, "lengths": path.suffix != ".bin", "tokenizer": path.parent.name == "tokenizer"}[content]


def test_a_run_file_that_turns_verification_off_is_said_by_each_reader(
    run: TrainedRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    off = load_run_file(run.file, RunConfig, ["data.verify_in_training=false"])
    path = run.config.prepared_dir / "sources" / "one" / "tokens.bin"
    with one_bit_of(path):
        done = run.evenpack("evaluate", "data.verify_in_training=false")
        log_to_stderr()
        _say_unverified.cache_clear()
        PreparedData.open(off.prepared_dir, off.data)
    assert done.code == 0
    for said in (done.stderr, capsys.readouterr().err):
        assert f"{NOT_VERIFIED} (data.verify_in_training is false); `evenpack verify` compares all of it" in said


def test_an_evaluation_over_data_that_changes_meanwhile_is_refused(
    run: TrainedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = run.config.prepared_dir / "sources" / "one" / "tokens.bin"
    before = path.read_bytes()

    def evaluate_and_overwrite(*given: Any, **options: Any) -> Evaluations:
        found = evaluate_model(*given, **options)
        path.write_bytes(before[::-1])
        return found

    monkeypatch.setattr(trained, "evaluate_model", evaluate_and_overwrite)
    try:
        with pytest.raises(DataError, match=rf"is damaged:\n  {path} is not as it was written"):
            run.api.evaluate()
    finally:
        path.write_bytes(before)


def test_a_process_reads_for_verification_once_and_again_after_a_change(
    run: TrainedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[Verifier] = []
    verify = Verifier.verify_all

    def noting(self: Verifier, *given: Any, **options: Any) -> Verified:
        read.append(self)
        return verify(self, *given, **options)

    monkeypatch.setattr(Verifier, "verify_all", noting)
    path = run.config.prepared_dir / "sources" / "one" / "tokens.bin"
    for expected in (1, 2):
        path.write_bytes(path.read_bytes())
        for _ in range(3):
            PreparedData.open(run.config.prepared_dir, run.config.data)
        assert len(read) == expected
