"""The command line takes arguments, prints results, and reports errors as messages."""

import errno
import io
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from command_line import evenpack
from drawn_figures import texts_of
from matplotlib.figure import Figure

from evenpack.launcher.cli import app as cli
from evenpack.studies.lengths.reading import published_histogram, read_histogram
from evenpack.studies.lengths.statistics import largest_cdf_gap, total_variation
from evenpack.version import VERSION

COMMANDS = (
    *(command.__name__ for command in cli.COMMANDS),
    *(f"config {command.name}" for command in cli.config_app.registered_commands),
    *(f"study {name}" for name in cli.STUDIES),
)

RUN = {
    "run": {"name": "tiny", "output_dir": "OUT"},
    "data": {
        "sources": {"text": {"kind": "text", "path": "text.txt", "document_separator": "line"}},
        "validation_fraction": 0.1,
        "tokenizer": {"kind": "train", "vocabulary_size": 300},
        "recipe": {"kind": "documents", "max_sequence_length": 32},
        "pack_length": 32,
    },
    "model": {"kind": "gpt2", "preset": "tiny"},
    "training": {"packs_per_step": 8, "packs_per_micro_batch": 2, "steps": 6, "precision": "fp32"},
    "optimizer": {"learning_rate": 1e-3},
}


@pytest.fixture
def run_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Writes a run over a small text, not prepared, in the current folder."""
    monkeypatch.chdir(tmp_path)
    lines = [" ".join(f"word{(i * j) % 23}" for j in range(1 + i % 17)) for i in range(200)]
    (tmp_path / "text.txt").write_text("\n".join(lines))
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(RUN))
    return tmp_path / "run.yaml"


@pytest.fixture
def prepared(run_file: Path) -> Path:
    assert evenpack("prepare", run_file).code == 0
    return run_file


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself_with_an_example(command: str) -> None:
    done = evenpack(*command.split(), "--help")
    assert done.code == 0
    assert f"  evenpack {command}" in done.stdout.partition("Example")[2]
    assert "--json" in done.stdout


def test_the_command_line_answers_without_importing_what_is_heavy() -> None:
    script = (
        "import sys; from evenpack.launcher.cli import app as cli\n"
        "sys.argv = ['evenpack', '--help']\n"
        "try: cli.main()\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'deepspeed', 'transformers', 'numpy', 'pydantic', 'datasets', 'yaml'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
    assert "prepare" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["study", "evenness", "run.yaml"], "No such command 'evenness': use study imbalance; docs/imbalance.md has"),
        (["study", "packing", "squad_1_1_384", "--beside", "x"], "No such option '--beside': use a call for each"),
        (["budget", "run.yaml"], "No such command 'budget': use plan"),
        (["plan", "run.yaml", "--devices=8"], "No such option '--devices': use --ranks"),
        (["train", "run.yaml", "--dry-run", "--rank", "1"], "No such option '--rank': use plan --rank"),
    ],
)
def test_what_is_gone_names_what_to_use_instead(arguments: list[str], message: str) -> None:
    done = evenpack(*arguments)
    assert done.code == 2
    assert message in done.stderr
    assert done.stdout == ""


@pytest.mark.parametrize("command", ["waits", "report", "study packing"])
def test_a_shipped_run_file_is_named_without_its_ending_unless_there_is_such_a_folder(
    command: str, run_file: Path
) -> None:
    words = (*command.split(), "demo", "run.x=1")
    assert "override 'run.x=1'" in evenpack(*words).stderr
    (run_file.parent / "demo").mkdir()
    assert "override 'run.x=1'" not in evenpack(*words).stderr


def test_waits_are_of_a_directory_or_of_a_run_file_with_overrides(run_file: Path, tmp_path: Path) -> None:
    done = evenpack("waits", tmp_path, "run.output_dir=other")
    assert done.code == 2
    assert "and none is given: give RUN.yaml" in " ".join(done.stderr.split())
    for arguments, directory in (([tmp_path], tmp_path), ([run_file, "run.output_dir=other"], Path("other"))):
        done = evenpack("waits", *arguments, "--json")
        assert done.code == 2
        assert str(done.json()["message"]).startswith(f"{directory} holds no metrics.jsonl")


def test_the_version_is_that_of_the_package() -> None:
    done = evenpack("--version")
    assert (done.code, done.stdout) == (0, f"evenpack {VERSION}\n")


def test_a_kind_that_changes_on_the_command_line_is_followed_and_noted(run_file: Path) -> None:
    done = evenpack("config", "show", run_file, "data.tokenizer.kind=gpt2", "data.tokenizer.path=gpt2")
    assert yaml.safe_load(done.stdout)["data"]["tokenizer"]["path"] == "gpt2"
    assert done.stderr.count("left out what that kind does not have: vocabulary_size: 300") == 1


def test_config_show_prints_a_run_file_that_means_the_same(run_file: Path) -> None:
    shown = evenpack("config", "show", run_file, "training.steps=9", "run.seed=7")
    assert shown.code == 0
    values = yaml.safe_load(shown.stdout)
    assert (values["training"]["steps"], values["run"]["seed"]) == (9, 7)
    (run_file.parent / "again.yaml").write_text(shown.stdout)
    again = evenpack("config", "show", run_file.parent / "again.yaml", "--json")
    assert again.json() == values


def test_prepare_says_what_came_of_every_source_and_does_nothing_the_second_time(run_file: Path) -> None:
    first = evenpack("prepare", run_file, "--json")
    assert first.code == 0
    assert first.json()["directory"] == "OUT/data"
    assert {(row["source"], row["split"]) for row in first.json()["splits"]} == {
        ("text", "train"),
        ("text", "validation"),
    }
    assert "tokenising" in first.stderr
    second = evenpack("prepare", run_file)
    assert "nothing to do" in second.stderr
    assert "efficiency" in second.stdout


def test_report_takes_the_overrides_of_a_run_file_and_of_nothing_else(run_file: Path) -> None:
    long = f"run.name={'a' * 300}"
    assert "elsewhere holds no" in evenpack("report", run_file, long, "run.output_dir=elsewhere").stderr
    refused = evenpack("report", run_file.parent, "training.steps=60").stderr
    assert "training.steps=60 replaces a value of a run file, and none is given" in refused


@pytest.mark.slow
def test_lengths_of_a_prepared_run_are_shown_and_drawn(prepared: Path, drawn: list[Figure]) -> None:
    plot = prepared.parent / "figures" / "lengths.png"
    values = evenpack("study", "packing", prepared, "--source", "text", "--plot", plot, "--json").json()
    (train,) = evenpack("plan", prepared, "--ranks", "1", "--json").json()["data"]["sources"]
    assert values["lengths"]["sequences"] == train["sequences"]
    assert values["packings"][-2]["packs"] == train["items_per_epoch"]
    assert sum(values["histogram"]) == train["sequences"]
    assert re.search(r"data text \([0-9a-f]{12}\) of tiny; evenpack .*; computed, not measured", texts_of(drawn[0]))


def test_rows_dropped_before_tokenising_are_shown_by_prepare(run_file: Path) -> None:
    override = "data.sources.text.minimum_words=6"
    words = [1 + i % 17 for i in range(200)]
    kept = [count for count in words if count >= 6]
    (row,) = evenpack("prepare", run_file, override, "--json").json()["source_rows"]
    dropped = (len(words) - len(kept), sum(words) - sum(kept))
    assert (row["rows_dropped"], row["words_dropped"]) == dropped
    assert f"{100 * dropped[0] / len(words):.2f} %" in evenpack("prepare", run_file, override).stdout


def test_rows_that_are_packs_already_are_packed_no_further(run_file: Path) -> None:
    chunks = (
        "data.recipe={kind: padding, max_sequence_length: 16, atom: 16}",
        "data.pack_length=16",
        "model.max_positions=null",
    )
    (train, _) = evenpack("prepare", run_file, *chunks, "--json").json()["splits"]
    plan = evenpack("plan", run_file, *chunks, "--ranks", "1", "--json").json()
    assert plan["data"]["lengths"] is None, "what fills rows up would be taken for tokens"
    assert 1 - plan["data"]["packing_efficiency"] == pytest.approx(train["padding_share"]) != 0
    refused = evenpack("study", "packing", run_file, *chunks)
    assert refused.code == 2
    assert "which are packs already" in refused.stderr


def test_lengths_are_taken_from_standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"5 3 8\n2\n")))
    values = evenpack("study", "packing", "-", "--pack-length", "10", "--json").json()
    assert values["origin"] == "standard input"
    assert "content" not in values
    assert values["lengths"]["tokens"] == 18
    assert values["packings"][-1]["packs"] == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run.yaml", "--name", "x"], "a run's sources have --source"),
        (["run.yaml", "--source", "txt"], "did you mean 'text'"),
        (["lengths.txt", "run.seed=1"], "is not a run file"),
        (["lengths.txt", "--pack-length", "6"], "(--pack-length, --long)"),
        (["lengths.txt", "--long", "split"], "--long split needs --pack-length"),
    ],
)
def test_inputs_of_lengths_refuse_what_does_not_go_together(arguments: list[str], message: str, prepared: Path) -> None:
    (prepared.parent / "lengths.txt").write_text("3 7\n")
    done = evenpack("study", "packing", *arguments)
    assert done.code == 2
    assert message in done.stderr


def test_what_is_done_to_long_sequences_is_reported(tmp_path: Path) -> None:
    source = tmp_path / "lengths.txt"
    source.write_text("3 7 9 12\n")
    expected = {"truncate": (1 + 3 + 6, [3, 6, 6, 6]), "drop": (7 + 9 + 12, [3]), "split": (0, [1, 3, 3, 6, 6, 6, 6])}
    for policy, (lost, after) in expected.items():
        arguments = ("study", "packing", source, "--pack-length", "6", "--long", policy)
        values = evenpack(*arguments, "--json").json()
        assert values["long_sequences"] == {"policy": policy, "sequences": 3, "tokens_lost": lost}
        assert values["packings"][0]["packs"] == len(after)
    assert f"3 sequences longer than 6 were split: {lost} tokens lost" in evenpack(*arguments).stdout


def test_a_plan_says_exactly_what_would_happen_and_starts_nothing(prepared: Path) -> None:
    done = evenpack("plan", prepared, "training.steps=10", "--cpu-ranks", "2", "--json")
    assert done.code == 0
    values: dict[str, Any] = done.json()
    assert values["start"]["command"][-3:] == ["evenpack.launcher.worker", str(prepared), "training.steps=10"]
    step, cost = values["step"], values["cost"]
    assert (step["ranks"], step["micro_batches"], cost["steps"]) == (2, 2, 10)
    assert values["start"]["deepspeed"]["gradient_accumulation_steps"] == 2
    assert cost["tokens"] == pytest.approx(10 * 8 * 32 * values["data"]["packing_efficiency"])
    assert "CPU core" in cost["hours"]["on"]
    assert not (prepared.parent / "OUT" / "ranks").exists()
    text = evenpack("train", prepared, "--dry-run")
    assert "gradient accumulation" in text.stdout
    assert "evenpack.launcher.worker" in text.stdout


def test_a_plan_may_be_of_ranks_that_are_not_here(prepared: Path) -> None:
    saved = prepared.parent / "plan.json"
    done = evenpack("plan", prepared, "--ranks", "4", "--device", "h100", "--save", saved)
    values: dict[str, Any] = json.loads(saved.read_text())
    assert (values["start"]["command"], values["step"]["ranks"]) == (None, 4)
    memory = values["memory"]
    assert (memory["device"], memory["capacity"], memory["ranks"]) == ("h100", 80 * 10**9, 4)
    assert memory["total"] < memory["capacity"]
    assert "It fits into 72.0 GB of h100's 80" in done.stdout
    assert "fits into" not in evenpack("plan", prepared).stdout, "this machine has no GPU that is known"


def test_a_plan_comes_before_the_data(run_file: Path) -> None:
    words = (run_file, "--vocabulary-size", "300", "--ranks", "2", "--json")
    values = evenpack("plan", *words).json()
    assert (values["data"]["epochs"], values["step"]["balance"]) == (None, None)
    assert "the data is not prepared" in values["data"]["assumptions"][0]
    counted = evenpack("plan", *words, "--corpus-tokens", "9000", "--corpus-documents", "90").json()
    assert counted["data"]["sources"][0]["tokens_per_epoch"] == 9090
    prepared = evenpack("plan", run_file, "--ranks", "2", "--prepare", "--json").json()
    assert prepared["data"]["assumptions"] == []


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--ranks", "8", "--cpu-ranks", "2"], "leave --num-gpus, --cpu-ranks and --hostfile out"),
        (["--ranks", "4", "--rank", "4"], "--rank 4: 4 ranks have the numbers from 0 to 3"),
        (["--rank", "0", "--corpus-tokens", "9", "--corpus-documents", "1"], "--rank rehearses a step of prepared"),
    ],
)
def test_ranks_of_a_plan_that_cannot_be_are_refused(options: list[str], reason: str, prepared: Path) -> None:
    done = evenpack("plan", prepared, *options)
    assert done.code == 2
    assert reason in done.stderr
    assert not (prepared.parent / "OUT" / "ranks").exists()


def test_train_refuses_before_it_starts_anything(prepared: Path) -> None:
    no_gpus = evenpack("train", prepared, "--num-gpus", "8")
    assert (no_gpus.code, "--num-gpus 8: PyTorch sees no CUDA device" in no_gpus.stderr) == (2, True)
    extra = evenpack("train", prepared, "deepspeed.extra.train_batch_size=3")
    assert (extra.code, "training.packs_per_step" in extra.stderr) == (2, True)


@pytest.mark.parametrize("named", ["0", "best"])
def test_a_checkpoint_is_named_by_its_step(named: str, run_file: Path) -> None:
    done = evenpack("evaluate", run_file, f"--checkpoint={named}")
    assert done.code == 2
    assert f"expected a step, from 1, found '{named}'" in " ".join(done.stderr.replace("│", "").split())


@pytest.mark.parametrize(
    ("number", "message"),
    [
        (errno.ENOSPC, "cannot be written: No room; make room"),
        (errno.EACCES, "cannot be read or written: No room; give this user access"),
    ],
)
def test_a_disk_that_does_not_take_it_is_an_error_of_the_user(
    number: int, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError(number, "No room", "out/tokens.bin")

    monkeypatch.setattr("evenpack.launcher.cli.data.load", fail)
    done = evenpack("prepare", "run.yaml")
    assert done.code == 2
    assert done.stderr.startswith(f"error: out/tokens.bin {message}")


def test_any_other_error_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise FileNotFoundError(errno.ENOENT, "gone", "x")

    monkeypatch.setattr("evenpack.launcher.cli.data.load", fail)
    with pytest.raises(FileNotFoundError):
        evenpack("prepare", "run.yaml")


def test_doctor_fails_where_a_probe_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    from evenpack.kernels.isolation import IsolationResult
    from evenpack.launcher import doctor

    for deviation, code in ((0.0, 0), (0.5, 1)):
        result = IsolationResult(max_deviation=deviation, control_deviation=9.0, tolerance=1e-6)
        monkeypatch.setattr(doctor, "probe_isolation", lambda backend, result=result, **request: result)
        assert evenpack("doctor", "--json").code == code


def test_what_is_printed_meanwhile_never_reaches_the_json(run_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from evenpack.launcher import preparing as module

    original = module.prepare

    def noisy(*arguments: object, **options: object) -> object:
        print("chatter of a library")
        return original(*arguments, **options)

    monkeypatch.setattr(module, "prepare", noisy)
    done = evenpack("prepare", run_file, "--json")
    assert "chatter" in done.stderr
    assert set(done.json()) == {"directory", "vocabulary_size", "splits", "source_rows"}


@pytest.mark.slow
def test_a_study_compares_pack_lengths_and_recommends(tmp_path: Path) -> None:
    done = evenpack("study", "packing", "squad_1_1_384", "--pack-lengths", "512", "--json").json()
    assert list(dict.fromkeys(row["pack_length"] for row in done["pack_lengths"])) == [384, 512]
    assert [row["pack_length"] for row in done["pack_lengths_auto"]] == [384, 512]
    assert done["recommendation"]["pack_length"] == 512
    both = evenpack("study", "packing", "squad_1_1_384", "--pack-lengths", "392", "--plot", tmp_path / "both.png")
    assert "Recommended: data.pack_length=384 " in " ".join(both.stdout.split()), "392 are fuller by less than a point"


@pytest.mark.slow
def test_a_study_can_pack_a_sample(tmp_path: Path, drawn: list[Figure]) -> None:
    arguments = ("study", "packing", "squad_1_1_384", "--depths", "none", "--algorithms", "first_fit_decreasing")
    plot = tmp_path / "sample.png"
    row = evenpack(*arguments, "--sample", "1000", "--plot", plot, "--json").json()["packings"][0]
    assert "A random sample of 1,000 of 88,641 sequences." in texts_of(drawn[0])
    assert round(row["packs"] * row["packing_factor"]) == 1000
    refused = evenpack(*arguments, "--sample", "100000")
    assert "must have 1 to 88641 sequences, found 100000" in " ".join(refused.stderr.split())


@pytest.mark.slow
def test_lengths_are_held_against_a_published_histogram(tmp_path: Path, drawn: list[Figure]) -> None:
    source = tmp_path / "lengths.txt"
    source.write_text("40 200 200 511\n")
    options = ("--against", "wikipedia_512", "--plot", tmp_path / "both.png", "--json")
    found = evenpack("study", "packing", source, *options).json()["against"]
    first, second = read_histogram(str(source)), published_histogram("wikipedia_512")
    assert found == {
        "origin": "wikipedia_512",
        "sequences": 16_279_552,
        "mean_length": pytest.approx(second.tokens / 16_279_552),
        "longest": 512,
        "total_variation": pytest.approx(total_variation(first, second)),
        "largest_cdf_gap": pytest.approx(largest_cdf_gap(first, second)),
    }
    assert "wikipedia_512" in texts_of(drawn[0]), "both are drawn"


@pytest.mark.slow
def test_a_runs_lengths_as_they_are_packed_are_held_against_a_file(prepared: Path) -> None:
    values = evenpack("study", "packing", prepared, "--json").json()
    file = prepared.parent / "same.json"
    file.write_text(json.dumps([2 * count for count in values["histogram"]]))  # type: ignore[attr-defined]
    same = evenpack("study", "packing", prepared, "--against", file, "--json").json()["against"]
    assert (same["total_variation"], same["largest_cdf_gap"]) == (0.0, 0.0)  # type: ignore[index]
    cut = evenpack(
        "study", "packing", prepared, "--pack-length", "16", "--long", "truncate", "--against", file, "--json"
    ).json()
    share = sum(values["histogram"][16:]) / sum(values["histogram"])  # type: ignore[index, arg-type]
    assert cut["against"]["total_variation"] == pytest.approx(share) != 0  # type: ignore[index]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["squad_1_1_384", "--depths", "3", "--against", "wikipedia_512"], "--against and --depths do not go"),
        (["squad_1_1_384", "--against", "run.yaml"], "run.yaml is a run: make it INPUT instead"),
        (["squad_1_1_384", "--against", "zero.txt"], "--against zero.txt: "),
    ],
)
def test_what_cannot_be_held_against_lengths_is_refused(arguments: list[str], message: str, prepared: Path) -> None:
    (prepared.parent / "zero.txt").write_text("5 0 7\n")
    done = evenpack("study", "packing", *arguments)
    assert done.code == 2
    assert message in " ".join(done.stderr.split())


def test_a_study_is_printed_and_saved(tmp_path: Path) -> None:
    lengths = tmp_path / "lengths.txt"
    lengths.write_text("3\n5\n8\n")
    saved = tmp_path / "new" / "study.json"
    done = evenpack("study", "packing", lengths, "--algorithms", "longest_pack_first", "--save", saved)
    assert done.code == 0
    assert "longest_pack_first" in done.stdout
    assert f"Wrote {saved}" in done.stdout.replace("\n", "")
    as_json = evenpack("study", "packing", lengths, "--algorithms", "longest_pack_first", "--json").json()
    written = json.loads(saved.read_text())
    for document in (as_json, written):
        for row in document["packings"]:
            del row["cpu_seconds"]
    assert written == as_json


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("study.txt", "--save writes a JSON file: give a name like"),
        ("file/study.json", "is not a folder"),
    ],
)
def test_a_file_that_cannot_be_saved_is_refused_before_the_work(name: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    done = evenpack("study", "packing", tmp_path / "missing.txt", "--save", tmp_path / name)
    assert done.code == 2
    assert message in done.stderr


def test_an_answer_with_an_open_quote_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("evenpack.launcher.cli.run_files._ask", lambda *_, **__: "books/it's.txt")
    done = evenpack("new", tmp_path / "mine.yaml")
    assert done.code == 2
    assert "expected words that are quoted as in a shell (No closing quotation)" in done.stderr
