"""`evenpack new` writes a whole, commented run file that reads the user's text."""

import json
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet
import pytest
from small_run import evenpack

from evenpack.config import load_run_file
from evenpack.data.sources.kinds import source_inputs
from evenpack.data.sources.lines import LONGEST_LINE_BYTES
from evenpack.engine.config import RunConfig
from evenpack.errors import ConfigError, DataError
from evenpack.launcher import new_run
from evenpack.launcher.new_run import MODELS, NewRun, require_tokenizer, run_values, write_run_file
from evenpack.launcher.preparing import FEW_DOCUMENTS, MOST_COUNTED, notes_of_plain_text, source_sections

TEXTS = ["a first document", "a second one"]


def write(folder: Path, kind: str) -> Path:
    """Writes text of a kind, as a user may have it."""
    match kind:
        case "jsonl":
            (path := folder / "text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
        case "jsonl with another key":
            (path := folder / "text.jsonl").write_text("\n" + json.dumps({"id": 1, "body": TEXTS[0]}) + "\n")
        case "folder of text":
            (path := folder / "texts").mkdir()
            (path / "one.txt").write_text(TEXTS[0])
            (path / "README").write_text("of no known kind")
        case "parquet":
            pa.parquet.write_table(pa.table({"number": [1, 2], "content": TEXTS}), path := folder / "text.parquet")
    return path


@pytest.mark.parametrize(
    ("kind", "name", "expected"),
    [
        ("jsonl", "text", {"kind": "jsonl", "text_key": "text"}),
        ("jsonl with another key", "text", {"kind": "jsonl", "text_key": "body"}),
        ("folder of text", "texts", {"kind": "text"}),
        ("parquet", "text", {"kind": "parquet", "text_key": "content"}),
    ],
)
def test_the_run_file_names_the_text_as_it_is(kind: str, name: str, expected: dict[str, Any], tmp_path: Path) -> None:
    data, run_file = write(tmp_path, kind), tmp_path / "mine.yaml"
    done = evenpack("new", run_file, options=["--data", str(data), "--model", "gpt2_mini", "--devices", "0"])
    for command in (f"prepare {run_file}", f"plan {run_file}", f"train {run_file}"):
        assert f"  evenpack {command}\n" in done.stdout
    config = load_run_file(run_file, RunConfig)
    assert config.run.name == "mine"
    assert list(config.data.sources) == [name]
    assert {key: getattr(config.data.sources[name], key) for key in expected} == expected


@pytest.mark.parametrize(
    ("text", "files", "separator", "said"),
    [
        ("a paragraph\n\n" * 7, 3, "file", "21 (data.sources.{name}.document_separator: blank_line), fewer than 100"),
        ("a paragraph\n\nanother\n\n", FEW_DOCUMENTS // 2, "blank_line", f"= {FEW_DOCUMENTS} documents"),
        ("a paragraph\nof two lines\n \n" * FEW_DOCUMENTS, 1, "blank_line", f"1 file = {FEW_DOCUMENTS} documents"),
        ("a paragraph\n\n" * (MOST_COUNTED + 1), 1, "blank_line", f"{MOST_COUNTED:,} documents or more"),
        ("one\nof\nmany\nlines\n" * FEW_DOCUMENTS, 1, "file", "Blank lines would divide it into 1 ("),
        ("a paragraph\n\n", FEW_DOCUMENTS, "file", f"{FEW_DOCUMENTS} files"),
    ],
)
def test_plain_text_in_few_files_is_divided_at_blank_lines(
    text: str, files: int, separator: str, said: str, tmp_path: Path
) -> None:
    for number in range(files):
        (tmp_path / f"{number}.txt").write_text(text)
    sections = source_sections([str(tmp_path)], text_key=None)
    ((name, section),) = sections.items()
    assert section.get("document_separator", "file") == separator
    (note,) = notes_of_plain_text(sections)
    assert said.format(name=name) in note
    assert f"data.sources.{name}.document_separator: {separator}" in note


@pytest.mark.parametrize(("entries", "devices", "is_said"), [(50_257, 0, True), (8192, 0, False), (50_257, 8, False)])
def test_a_vocabulary_that_slows_a_small_model_is_said(
    entries: int, devices: int, is_said: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(new_run, "load_tokenizer", lambda section: SimpleNamespace(vocabulary_size=entries))
    sources = {"text": {"kind": "jsonl", "path": "text.jsonl"}}
    new = NewRun(name="mine", sources=sources, model="gpt2_mini", tokenizer=tmp_path, devices=devices)
    assert [f"{entries:,}" in note for note in require_tokenizer(new)] == [True] * is_said


def test_a_file_that_is_too_large_for_one_document_may_hold_many(tmp_path: Path) -> None:
    """The size is checked as the source will be read."""
    (tmp_path / "large.txt").write_text(f"{'a' * (LONGEST_LINE_BYTES // FEW_DOCUMENTS)}\n\n" * (FEW_DOCUMENTS + 1))
    assert source_sections([str(tmp_path)], text_key=None)


@pytest.mark.parametrize("devices", [0, 3, 64])
@pytest.mark.parametrize("model", MODELS)
def test_every_model_gets_a_step_that_its_devices_divide(model: str, devices: int, tmp_path: Path) -> None:
    sources = {"text": {"kind": "jsonl", "path": "text.jsonl"}}
    new = NewRun(name="mine", sources=sources, model=model, tokenizer=None, devices=devices)
    config = RunConfig.model_validate(run_values(new))
    packs, micro_batch = config.training.packs_per_step, config.training.packs_per_micro_batch
    assert packs is not None
    assert micro_batch is not None
    assert packs % ((devices or 2) * micro_batch) == 0
    assert config.training.precision == ("bf16_autocast" if devices else "fp32")
    compiles = not model.endswith("_mini") and config.deepspeed.zero_stage < 3  # there it is refused
    assert config.training.compile == (devices > 0 and compiles)
    shipped = RunConfig.model_validate(run_values(NewRun(**{**vars(new), "devices": 8})))
    assert shipped.training.packs_per_step is not None
    least = max(shipped.training.packs_per_step, devices)  # a pack for each rank
    assert packs == pytest.approx(least, rel=0.35)


@pytest.mark.parametrize("model", MODELS)
def test_every_key_is_explained(model: str, tmp_path: Path) -> None:
    sources = {
        "one": {"kind": "jsonl", "path": "text.jsonl", "text_key": "text"},
        "two": {"kind": "text", "path": ["a/**/*.txt", "a/**/*.md"]},
    }
    new = NewRun(name="mine", sources=sources, model=model, tokenizer=tmp_path / "vocabulary", devices=8)
    write_run_file(tmp_path / "mine.yaml", new)
    lines = (tmp_path / "mine.yaml").read_text().splitlines()
    assert max(map(len, lines)) <= 100
    for above, line in pairwise(lines):
        name = line.strip().partition(":")[0]
        if line.strip() and not line.strip().startswith(("#", "- ")) and name not in ("kind", "one", "two"):
            assert above.strip().startswith("#"), line
    config = load_run_file(tmp_path / "mine.yaml", RunConfig)
    assert config.data.sources["two"].model_dump(mode="json")["path"] == ["a/**/*.txt", "a/**/*.md"]
    assert "on 8 GPUs" in " ".join(line.removeprefix("# ") for line in lines[:6])


@pytest.mark.parametrize(
    ("model", "files", "kind", "key"),
    [
        ("llama_8b", ["vocab.txt"], "bert", "path"),
        ("llama_8b", ["tokenizer.json", "vocab.json", "merges.txt"], "hub", "name"),
        ("gpt2_small", ["tokenizer.json", "vocab.json", "merges.txt"], "gpt2", "path"),
        ("gpt2_mini", ["tokenizer.json", "tokenizer_config.json"], "hub", "name"),
        ("gpt2_mini", [], "gpt2", "path"),
        ("bert_mini", ["tokenizer.json", "tokenizer_config.json"], "bert", "path"),
    ],
)
def test_a_folder_gets_the_kind_that_reads_its_vocabulary(
    model: str, files: list[str], kind: str, key: str, tmp_path: Path
) -> None:
    """The kind of the shipped run file, or where a folder has not what it reads, another."""
    for name in files:
        (tmp_path / name).write_text("")
    sources = {"one": {"kind": "text", "path": "text.txt"}}
    new = NewRun(name="mine", sources=sources, model=model, tokenizer=tmp_path, devices=8)
    assert run_values(new)["data"]["tokenizer"] == {"kind": kind, key: str(tmp_path)}


def test_a_run_file_that_exists_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("mine")
    options = ["--data", str(write(tmp_path, "jsonl")), "--model", "gpt2_mini", "--devices", "0"]
    done = evenpack("new", tmp_path / "mine.yaml", options=options, expected=2)
    assert "exists already: choose another name" in done.stderr
    assert (tmp_path / "mine.yaml").read_text() == "mine"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("mine.yml", "give a name like"),
        ("file/mine.yaml", "is not a folder"),
        ("a/b.yaml", ""),
    ],
)
def test_a_place_where_no_run_file_can_be_is_refused_and_a_folder_is_made(
    name: str, message: str, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    options = ["--data", str(write(tmp_path, "jsonl")), "--model", "gpt2_mini", "--devices", "0"]
    done = evenpack("new", tmp_path / name, options=options, expected=2 if message else 0)
    assert message in done.stderr
    assert (tmp_path / name).is_file() == (not message)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--model gpt2_mini", "--data is missing, and there is no terminal to ask at"),
        ("--data DATA --model gpt2_mni", "there is no such model; did you mean 'gpt2_mini'?"),
        ("--data DATA --model bert_mini --tokenizer .", "vocab.txt"),
        ("--data DATA/../*.md --model gpt2_mini", "no file matches"),
        ("--data ~nobody_here/a --model gpt2_mini", "~nobody_here/a does not exist"),
        ("--data DATA --text-key body --model gpt2_mini", "no key 'body'; existing keys: 'text'"),
    ],
)
def test_a_wrong_answer_is_refused_and_nothing_written(options: str, message: str, tmp_path: Path) -> None:
    given = options.replace("DATA", str(write(tmp_path, "jsonl"))).split()
    done = evenpack("new", tmp_path / "mine.yaml", options=[*given, "--devices", "0"], expected=2)
    assert message in " ".join(done.stderr.split())
    assert not (tmp_path / "mine.yaml").exists()


def test_every_path_and_every_kind_becomes_a_source_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in ("mixed/deeper", "books"):
        Path(folder).mkdir(parents=True)
    for kind, folder in (("jsonl", "mixed"), ("parquet", "mixed/deeper"), ("jsonl", "books")):
        write(tmp_path / folder, kind)
    write(tmp_path / "mixed", "folder of text")
    Path("mixed/notes.md").write_text(TEXTS[0])
    Path("books/x-1.txt").write_text(TEXTS[0])
    paths = ["--data", "mixed", "--data", "books/*.jsonl", "--data", "books/x-1.txt", "--data", "books/[wx]*"]
    options = [*paths[:6], "--model", "gpt2_mini", "--devices", "8"]
    done = evenpack("new", Path("mine.yaml"), options=options)
    assert "  evenpack plan mine.yaml --ranks 8\n  evenpack train mine.yaml --num-gpus 8\n" in done.stdout
    sources = load_run_file(Path("mine.yaml"), RunConfig).data.sources
    found = {
        name: [Path(file.path).relative_to(tmp_path).as_posix() for file in source_inputs(name, source)]
        for name, source in sources.items()
    }
    assert found == {
        "mixed_jsonl": ["mixed/text.jsonl"],
        "mixed_parquet": ["mixed/deeper/text.parquet"],
        "mixed_text": ["mixed/texts/one.txt", "mixed/notes.md"],
        "books": ["books/text.jsonl"],
        "x_1": ["books/x-1.txt"],
    }
    assert Path("mine.yaml").read_text().count("weight: 1") == 5
    with pytest.raises(ConfigError, match=r"x-1\.txt is given twice"):
        source_sections([word for word in paths if word != "--data"], text_key=None)
    both = source_sections(["books/[tx]*"], text_key=None)
    assert {name: section["path"] for name, section in both.items()} == {
        "books_jsonl": ["books/text.jsonl"],
        "books_text": ["books/x-1.txt"],
    }


def test_several_keys_with_strings_must_be_chosen_from(tmp_path: Path) -> None:
    (path := tmp_path / "text.jsonl").write_text(json.dumps({"title": "A", "body": "B"}) + "\n")
    with pytest.raises(ConfigError, match="has the keys title, body with strings, and none is 'text'"):
        source_sections([str(path)], text_key=None)
    assert source_sections([str(path)], text_key="body")["text"]["text_key"] == "body"


def test_a_file_without_a_document_is_refused(tmp_path: Path) -> None:
    (path := tmp_path / "empty.txt").write_text(" \n")
    with pytest.raises(DataError, match=r"empty\.txt holds no document"):
        source_sections([str(path)], text_key=None)


def test_a_folder_of_several_splits_is_refused_and_one_of_them_is_taken(tmp_path: Path) -> None:
    for split in ("train", "test"):
        (tmp_path / f"{split}.jsonl").write_text(json.dumps({"text": split}) + "\n")
    with pytest.raises(
        DataError, match=r"leads to files of several splits, .*train.jsonl for training, and .*test.jsonl"
    ):
        source_sections([str(tmp_path)], text_key=None)
    (section,) = source_sections([str(tmp_path / "tr*")], text_key=None).values()
    assert section["path"] == str(tmp_path / "tr*")
