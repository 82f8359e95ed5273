"""A folder's tokenizer.json is what tokenises, in preparation, counts and after export, whatever class it names."""

import json
import logging
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import TypeAdapter
from slow_cases import slow_but
from tokenizer_folders import (
    BERT,
    BOUNDS,
    END,
    FAST,
    FOLDERS,
    T5,
    TEXT,
    Folder,
    byte_pairs,
    changed,
    unigram,
    unmark,
    whole_words,
    with_tokens,
    word_pieces,
    words,
)
from tokenizers import AddedToken, normalizers
from tokenizers import Tokenizer as Backend
from transformers import AutoTokenizer, PreTrainedTokenizerFast
from xxhash import xxh3_128_hexdigest

from evenpack.data.tokenizers.backend import warn_once
from evenpack.data.tokenizers.config import BertTokenizer, TokenizerConfig
from evenpack.data.tokenizers.loading import load_token_counter, load_tokenizer
from evenpack.data.tokenizers.tokenizer import Tokenizer
from evenpack.errors import DataError

MODEL_TYPES = ("gpt2", "llama", "bert", "modernbert")


@pytest.fixture(autouse=True)
def _each_warning_again() -> None:
    warn_once.cache_clear()


QUICK = (
    *("GPT-2's pattern", "years as GPT2Tokenizer", "years as no class", "years as an unknown class"),
    *("years by kind gpt2", "a single character is a special token", "RoBERTa's mask takes the space before it"),
    *("GPT-2 with a beginning", "Llama 3's template", "both ends", "words that are no merges", "dropout"),
    *("truncation and padding", "no special token by its file", "special tokens named in the config alone"),
    *("NFKC and lower case", "added tokens", "Llama 2", "Unigram", "Unigram as T5", "uncased BERT", "cased BERT"),
    "merges that form special tokens",
)
"""One of each form; the others differ in what a class or file says of it."""


@pytest.fixture(params=slow_but(QUICK, FOLDERS))
def case(request: pytest.FixtureRequest) -> Folder:
    return FOLDERS[request.param]


def load(folder: Path, section: Any) -> Tokenizer:
    key = "path" if section["kind"] == "gpt2" else "name"
    config: Any = TypeAdapter(TokenizerConfig).validate_python({**section, key: str(folder)})
    return load_tokenizer(config)


def read(folder: Path) -> Backend:
    """Returns what `tokenizers` reads, whole texts and the same each time."""
    backend = Backend.from_file(str(folder / "tokenizer.json"))
    backend.no_truncation()
    backend.no_padding()
    if hasattr(backend.model, "dropout"):
        backend.model.dropout = None
    return backend


def ids(backend: Backend, text: str, *, around: bool = False) -> list[int]:
    """Returns the ids of a text in which no special token is looked for."""
    backend.encode_special_tokens = True
    return list(backend.encode(text, add_special_tokens=around).ids)


def special_of(tokenizer: Tokenizer, folder: Path) -> dict[str, int]:
    """Returns the special tokens that the files name, the one for unknown text apart."""
    named = json.loads((folder / "tokenizer_config.json").read_text())
    roles = [value for key, value in named.items() if key.endswith("_token") and not isinstance(value, bool)]
    by_config = {value["content"] if isinstance(value, dict) else value for value in roles}
    by_config |= {*named.get("additional_special_tokens", ()), *named.get("extra_special_tokens", ())}
    by_file = {str(token) for token in read(folder).get_added_tokens_decoder().values() if token.special}
    return {token: tokenizer.vocabulary[token] for token in sorted(by_config | by_file)}


def test_documents_are_what_the_file_makes_of_them_between_a_stated_beginning_and_end(
    case: Folder, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = case.write(tmp_path / "folder")
    tokenizer = load(folder, case.section)
    beginning = [] if case.begins is None else [tokenizer.vocabulary[case.begins]]
    expected = [*beginning, *ids(read(folder), TEXT), tokenizer.end_of_text_id]
    assert len(expected) > 20
    for _ in range(3):
        encoded = tokenizer.encode_batch([TEXT, "", TEXT])
        assert encoded.tokens.tolist() == [*expected, tokenizer.end_of_text_id, *expected]
    assert encoded.beginning_tokens == 2 * len(beginning)
    texts = [TEXT, "the cat 2023", ""]
    around = [len(ids(read(folder), text, around=True)) for text in texts]
    assert load_token_counter(str(folder)).lengths(texts).tolist() == around, "counted as the file says"
    (alone,) = tokenizer.encode_texts([TEXT])
    assert alone.tokens.tolist() == expected[len(beginning) : -1]
    assert ("data.tokenizer.encoder=class takes the class" in caplog.text) == case.class_differs
    assert ("data.tokenizer.beginning decides" in caplog.text) == case.template_differs
    caplog.clear()
    load(folder, case.section)
    assert not caplog.text, "it is said once"


def test_a_difference_is_shown_on_a_text_with_both_results(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    load(FOLDERS["years as GPT2Tokenizer"].write(tmp_path / "folder"), {"kind": "hub"})
    expected = "of the text '2023' its files make ['202', '3'], and the class GPT2Tokenizer that it names ['20', '23']"
    assert expected in caplog.text


_TOOL = {"content": "<tool>", "special": False} | dict.fromkeys(
    ("lstrip", "rstrip", "single_word", "normalized"), False
)


@pytest.mark.parametrize(
    ("config", "files"),
    [
        ({"added_tokens_decoder": {"400": _TOOL}}, {}),
        ({"pad_token": "<tool>"}, {}),
        ({}, {"added_tokens.json": '{"<tool>": 400}'}),
    ],
)
@pytest.mark.parametrize("kind", ["hub", "gpt2"])
def test_a_token_that_the_class_alone_has_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: str, config: dict[str, Any], files: dict[str, str]
) -> None:
    class_name = {"hub": FAST, "gpt2": "GPT2Tokenizer"}[kind]
    case = Folder(
        backend=lambda: byte_pairs(pattern=None),
        config=END | {"tokenizer_class": class_name} | config,
        files=files,
    )
    folder = case.write(tmp_path / "folder")
    if kind == "gpt2":
        read(folder).model.save(str(folder))
        (folder / "tokenizer.json").unlink()
    theirs = AutoTokenizer.from_pretrained(folder)
    assert "<tool>" in theirs.get_vocab()
    found = load(folder, {"kind": kind})
    expected = f"vocabularies, id {theirs.convert_tokens_to_ids('<tool>')} is None in one and '<tool>' in the other"
    assert expected in caplog.text
    assert "<tool>" not in found.vocabulary
    assert load(folder, {"kind": kind, "encoder": "class"}).vocabulary["<tool>"] == len(found.vocabulary)


def test_a_token_that_only_a_class_would_add_is_named_without_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    byte_pairs(pattern=None).model.save(str(tmp_path))
    (tmp_path / "added_tokens.json").write_text('{"<|endoftext|>": 0, "<tool>": 400}')
    assert "<tool>" not in load(tmp_path, {"kind": "gpt2"}).vocabulary
    assert "added_tokens.json adds '<tool>', 1 in all, to entries which the other files hold" in caplog.text


def test_a_token_that_the_class_alone_finds_in_text_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def with_entry() -> Backend:
        backend = words()
        values = json.loads(backend.to_str())
        first = len(values["model"]["vocab"])
        names = [f"<{number}>" for number in range(9_000)]  # too many to try each
        values["model"]["vocab"] |= {name: first + index for index, name in enumerate(names)}
        return Backend.from_str(json.dumps(values))

    folder = Folder(backend=with_entry, config={"tokenizer_class": FAST, "eos_token": "</s>", "unk_token": "[UNK]"})
    path = folder.write(tmp_path / "folder")
    config, index = json.loads((path / "tokenizer_config.json").read_text()), 4_001
    token = Backend.from_file(str(path / "tokenizer.json")).id_to_token(index)
    config["added_tokens_decoder"] = {str(index): _TOOL | {"content": token}}
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    load(path, {"kind": "hub"})
    assert f"of the text 'a{token} {token}b' its files make" in caplog.text


def test_no_text_becomes_a_special_token(case: Folder, tmp_path: Path) -> None:
    folder = case.write(tmp_path / "folder")
    tokenizer = load(folder, case.section)
    special, counter = special_of(tokenizer, folder), load_token_counter(str(folder))
    # Words that whole-word vocabularies cannot express are unknown, and so are capital letters in some of the others.
    unknown = [{special.get("[UNK]")}, {special.get("[UNK]"), special.get("<unk>")}]
    once = 1 + (case.begins is not None and tokenizer.vocabulary[case.begins] == tokenizer.end_of_text_id)
    for token in special:
        for spelled, expected in zip((token, token.upper()), unknown, strict=True):
            text = f"the {spelled} cat{spelled}s {spelled}{spelled}\n{spelled}"
            (found,) = tokenizer.encode_texts([text])
            never = {index for name, index in special.items() if len(name) > 1} - expected
            assert never
            assert not never & set(found.tokens.tolist()), spelled
            assert tokenizer.encode_batch([text]).tokens.tolist().count(tokenizer.end_of_text_id) == once
            around = len(ids(read(folder), "the", around=True)) - len(ids(read(folder), "the"))
            assert counter.lengths([text])[0] == len(found.tokens) + around


@pytest.mark.parametrize(
    ("backend", "section"),
    [
        (lambda: byte_pairs(special=("<|endoftext|>", "[MASK]")), {"kind": "gpt2"}),
        (word_pieces, {"kind": "bert"}),
        (words, {"kind": "hub"}),
    ],
)
def test_lengths_are_those_of_runs_where_a_file_marks_no_special_token(
    tmp_path: Path, backend: Any, section: dict[str, Any]
) -> None:
    config = {"tokenizer_class": FAST, "eos_token": "</s>"}
    folder = Folder(backend=lambda: changed(backend(), unmark), config=config).write(tmp_path / "folder")
    if section["kind"] != "hub":
        (folder / "tokenizer_config.json").unlink()
    names = "<|endoftext|> [MASK] [SEP] [UNK] </s> <pad>"
    texts = [names, *names.split(), "the cat"]
    (around,) = load_token_counter(str(folder)).lengths([""])
    found = [around + len(text.tokens) for text in load(folder, section).encode_texts(texts)]
    assert load_token_counter(str(folder)).lengths(texts).tolist() == found


@pytest.mark.parametrize("named", [{"additional_special_tokens": ["<|x|>"]}, {"extra_special_tokens": ["<|x|>"]}])
def test_a_token_of_the_file_that_the_config_alone_makes_special_is_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, named: dict[str, Any]
) -> None:
    backend = with_tokens(byte_pairs(), AddedToken("<|x|>"), AddedToken("<|y|>"))
    config = END | {"tokenizer_class": FAST}
    folder = Folder(backend=lambda: backend, config=config | named).write(tmp_path / "folder")
    found = [load(folder, {"kind": "hub", "encoder": encoder}) for encoder in ("files", "class")]
    load_token_counter(str(folder))
    assert [record.message.partition(", which")[0] for record in caplog.records] == [
        "the tokenizer's files find '<|x|>' in text, 1 in all"
    ]
    for tokenizer in found:
        x, y = (tokenizer.vocabulary[name] for name in ("<|x|>", "<|y|>"))
        (tokens,) = (text.tokens.tolist() for text in tokenizer.encode_texts(["a<|x|><|y|>"]))
        assert (x in tokens, y in tokens) == (False, True)
        tokenizer.save(tmp_path / "saved")
        assert {x, y} <= {*AutoTokenizer.from_pretrained(tmp_path / "saved")("a<|x|><|y|>")["input_ids"]}


def test_the_exported_tokenizer_makes_of_a_prompt_what_training_saw(case: Folder, tmp_path: Path) -> None:
    folder, saved = case.write(tmp_path / "folder"), tmp_path / "saved"
    tokenizer = load(folder, case.section)
    tokenizer.save(saved)
    again = Tokenizer.load(saved)
    assert again.checksum == tokenizer.checksum
    special = special_of(tokenizer, folder)
    spelled = " ".join(special)
    documents = [tokenizer.encode_batch([text]).tokens.tolist() for text in (TEXT, spelled)]
    assert [again.encode_batch([text]).tokens.tolist() for text in (TEXT, spelled)] == documents
    trained = documents[0] if case.ends_prompt else documents[0][:-1]
    for model_type in (None, *MODEL_TYPES):
        if model_type is not None:
            (saved / "config.json").write_text(json.dumps({"model_type": model_type}))
        automatic = AutoTokenizer.from_pretrained(saved)
        assert automatic(TEXT)["input_ids"] == trained, model_type
        assert automatic.eos_token_id == tokenizer.end_of_text_id or case.ends_prompt
    backend = read(saved)
    for token in special:  # the special tokens of a prompt are found, as those of a chat have to be
        prompt = f"the {token} cat{token}s"
        assert automatic(prompt)["input_ids"] == backend.encode(prompt).ids
        assert special[token] in automatic(prompt)["input_ids"]


def test_the_exported_tokenizer_pads_prompts_where_the_folder_says(tmp_path: Path) -> None:
    backend = FOLDERS["years as no class"].backend
    for side in ("left", "right"):
        folder = Folder(
            backend=backend, config=END | {"tokenizer_class": "PreTrainedTokenizerFast", "padding_side": side}
        ).write(tmp_path / side)
        load(folder, {"kind": "hub"}).save(tmp_path / f"prepared_{side}")
        Tokenizer.load(tmp_path / f"prepared_{side}").save(tmp_path / f"exported_{side}")
        assert AutoTokenizer.from_pretrained(tmp_path / f"exported_{side}").padding_side == side


def test_a_set_of_an_earlier_version_is_exported_with_the_template_of_its_documents(tmp_path: Path) -> None:
    case = FOLDERS["both ends"]
    folder = case.write(
        tmp_path / "as_it_was_saved"
    )  # with the folder's template, and documents that begin with nothing
    earlier = Tokenizer.load(folder)
    (expected,) = earlier.encode_texts([TEXT])
    assert earlier.encode_batch([TEXT]).tokens.tolist() == [*expected.tokens.tolist(), earlier.end_of_text_id]
    earlier.save(tmp_path / "saved")
    assert AutoTokenizer.from_pretrained(tmp_path / "saved")(TEXT)["input_ids"] == expected.tokens.tolist()
    assert AutoTokenizer.from_pretrained(folder)(TEXT)["input_ids"] != expected.tokens.tolist()


def test_tokens_of_earlier_versions_that_were_others_are_told_apart(tmp_path: Path) -> None:
    def as_before(tokenizer: Tokenizer, end: str) -> bool:
        """Whether the checksum is the one that a tokenizer with this file had, whatever it made of text."""
        return xxh3_128_hexdigest(f"{end}\n{tokenizer._backend.to_str()}".encode()) == tokenizer.checksum

    llama, uni, bert = FOLDERS["Llama 3's template"], FOLDERS["Unigram"], FOLDERS["uncased BERT"]
    folder = llama.write(tmp_path / "llama")
    assert as_before(load(folder, {"kind": "hub"}), "<|end|>")
    assert not as_before(load(folder, {"kind": "hub", "beginning": "bos"}), "<|end|>"), "which began with nothing"
    assert not as_before(load(uni.write(tmp_path / "uni"), uni.section), "</s>"), "where text became special tokens"
    assert as_before(load(bert.write(tmp_path / "bert"), bert.section), "[SEP]")


def test_a_model_without_an_unknown_token_is_compared_too(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = {"tokenizer_class": FAST, "eos_token": "</s>"}
    case = Folder(backend=lambda: whole_words("a", "cat", "</s>"), config=config)
    tokenizer = load(case.write(tmp_path / "folder"), case.section)
    assert tokenizer.encode_batch(["a cat"]).tokens.tolist() == [0, 1, 2]
    assert not caplog.text


def test_the_class_that_a_folder_names_is_taken_where_the_run_file_says_so(tmp_path: Path) -> None:
    for name, case in FOLDERS.items():
        if not case.class_differs:
            continue
        folder = case.write(tmp_path / name.replace(" ", "_"))
        tokenizer = load(folder, {**case.section, "encoder": "class"})
        theirs = AutoTokenizer.from_pretrained(folder).backend_tokenizer
        texts = [TEXT, "1234567 e\u0301 \u212b", "The  CAT--", "\x07", " "]
        (*found,) = tokenizer.encode_texts(texts)
        expected = [ids(theirs, text) for text in texts]
        assert [one.tokens.tolist() for one in found] == expected, name
        assert expected != [ids(read(folder), text) for text in texts], name
        assert tokenizer.checksum != load(folder, case.section).checksum


@pytest.mark.parametrize(
    "name",
    ["uncased BERT", "BERT without a template", "BERT whose pairs end in nothing", "years as RobertaTokenizer"],
)
def test_pairs_are_those_of_sentence_pairs(tmp_path: Path, name: str) -> None:
    case = FOLDERS[name]
    tokenizer = load(case.write(tmp_path / "folder"), case.section)
    tokenizer.save(tmp_path / "saved")
    pair = AutoTokenizer.from_pretrained(tmp_path / "saved")("cat", "the", return_token_type_ids=True)
    first, second = (text.tokens.tolist() for text in tokenizer.encode_texts(["cat", "the"]))
    begin, end = tokenizer.beginning_id, tokenizer.end_of_text_id
    assert pair["input_ids"] == [begin, *first, end, *second, end]
    assert pair["token_type_ids"] == [0] * (len(first) + 2) + [1] * (len(second) + 1)


CODE = "from pathlib import Path\nPath(__file__).with_suffix('.ran').touch()\nclass Own: pass\n"
_OWN = {"AutoTokenizer": [None, "own.Own"]}


@pytest.mark.parametrize("auto_map", [_OWN, ["own.Own", None], "own.Own"])
@pytest.mark.parametrize("class_name", ["Own", "GPT2Tokenizer"])
def test_no_code_of_a_folder_is_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, auto_map: Any, class_name: str
) -> None:
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    config = END | {"tokenizer_class": class_name, "auto_map": auto_map}
    folder = Folder(backend=byte_pairs, config=config, files={"own.py": CODE}).write(tmp_path / "folder")
    for section in ({"kind": "hub"}, {"kind": "gpt2"}, {"kind": "bert"}, {"kind": "hub", "encoder": "class"}):
        with pytest.raises(DataError, match=r"tokenizer_config\.json: auto_map names code of this folder .*own\.Own"):
            load(folder, section)
    with pytest.raises(DataError, match="auto_map names code"):
        load_token_counter(str(folder))
    assert not list(tmp_path.rglob("*.ran"))


@pytest.mark.parametrize(
    ("config", "model"),
    [({"auto_map": {}}, {}), ({"auto_map": {"AutoProcessor": "own.Own"}}, {}), ({}, {"AutoConfig": "own.Own"})],
)
def test_code_that_is_no_tokenizer_is_not_run_either_and_no_matter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, config: dict[str, Any], model: dict[str, str]
) -> None:
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    files = {"own.py": CODE, "config.json": json.dumps({"model_type": "own", "auto_map": model})}
    case = Folder(backend=byte_pairs, config=END | {"tokenizer_class": FAST} | config, files=files)
    folder = case.write(tmp_path / "folder")
    assert load(folder, {"kind": "hub"}).encode_texts([TEXT])[0].tokens.tolist() == ids(read(folder), TEXT)
    assert not list(tmp_path.rglob("*.ran"))


def test_a_name_of_the_hub_is_read_as_a_folder_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = FOLDERS["cased BERT that does not say so"]
    folder = case.write(tmp_path / "snapshot")
    asked = []

    def download(name: str, *, allow_patterns: list[str]) -> str:
        asked.append(name)
        assert "*.json" in allow_patterns
        assert not any(
            pattern.endswith((".py", "safetensors", "*")) for pattern in allow_patterns if ".model" not in pattern
        )
        return str(folder)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    by_name, by_path = (
        load_tokenizer(BertTokenizer.model_validate({"kind": "bert", **place}))
        for place in ({"name": "somebody/cased"}, {"path": folder})
    )
    assert by_name.checksum == by_path.checksum
    assert by_name.encode_texts(["The"])[0].tokens.tolist() == [by_name.vocabulary["The"]]
    assert set(asked) == {"somebody/cased"}


def test_vocabulary_files_without_a_tokenizer_json_are_compared_with_their_class(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "bert"
    folder.mkdir()
    word_pieces(lowercase=False).model.save(str(folder))
    path = folder / "tokenizer_config.json"

    def said(**config: Any) -> bool:
        path.write_text(json.dumps({"tokenizer_class": "BertTokenizer", **config}))
        warn_once.cache_clear()
        caplog.clear()
        (found,) = load(folder, {"kind": "bert", "lower_case": False}).encode_texts([TEXT])
        assert load_token_counter(str(folder)).lengths([TEXT]).tolist() == [len(found.tokens) + 2]
        return "takes the class" in caplog.text

    assert not said(do_lower_case=False)
    assert said()
    assert said(do_lower_case=False, tokenize_chinese_chars=False)
    pairs = tmp_path / "gpt2"
    pairs.mkdir()
    byte_pairs(pattern=None).model.save(str(pairs))
    for class_name, differs in (("GPT2Tokenizer", False), ("Qwen2Tokenizer", True)):
        (pairs / "tokenizer_config.json").write_text(json.dumps(END | {"tokenizer_class": class_name}))
        warn_once.cache_clear()
        caplog.clear()
        (found,) = load(pairs, {"kind": "gpt2"}).encode_texts([TEXT])
        assert load_token_counter(str(pairs)).lengths([TEXT]).tolist() == [len(found.tokens)]
        assert ("takes the class" in caplog.text) == ("but not by data.tokenizer.kind=hub" in caplog.text) == differs
    theirs = AutoTokenizer.from_pretrained(pairs)
    (found,) = load(pairs, {"kind": "hub"}).encode_texts([TEXT])
    assert found.tokens.tolist() == theirs(TEXT)["input_ids"], "where nothing else says what the files mean"


@pytest.mark.parametrize(
    ("scheme", "message"),
    [
        ("always", None),
        ("never", r"makes \['!'\] of the text '!' .* makes \['▁', '!'\]"),
        ("first", r"makes \['▁', '<', 'in', '>'\] of the text '<in>' .* makes \['<in>'\]"),
        (None, None),
    ],
)
def test_a_sentencepiece_model_is_compared_with_what_its_library_makes(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    scheme: str | None,
    message: str | None,
) -> None:
    def of_class() -> Backend:
        return with_tokens(unigram(), *[AddedToken("<in>")] * (scheme == "first"))

    class Library:
        """Stands for `sentencepiece`, which is installed where transformers has converted a model with it."""

        def __init__(self, *, model_file: str) -> None:
            assert Path(model_file).read_bytes() == b"pieces"
            assert scheme is not None
            self.backend = unigram(scheme=scheme)

        def encode(self, text: str) -> list[int]:
            return [1000 + index for index in ids(self.backend, text)]

        def id_to_piece(self, index: int) -> str:
            return str(self.backend.id_to_token(index - 1000))

        def unk_id(self) -> int:
            return 1000

        def __len__(self) -> int:
            return 1005

        def is_control(self, index: int) -> bool:
            return 1000 < index < 1005

        def is_unknown(self, index: int) -> bool:
            return index == 1000

        is_byte = is_unknown

    monkeypatch.setitem(sys.modules, "sentencepiece", scheme and SimpleNamespace(SentencePieceProcessor=Library))
    monkeypatch.setattr(
        AutoTokenizer,
        "from_pretrained",
        lambda *_, trust_remote_code: PreTrainedTokenizerFast(tokenizer_object=of_class(), **T5),
    )
    (tmp_path / "tokenizer.model").write_bytes(b"pieces")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": FAST}))
    sections: list[dict[str, Any]] = [{"kind": "hub", "encoder": "class"}]
    if message is not None:
        with pytest.raises(DataError, match=rf"tokenizer\.model {message}"):
            load(tmp_path, {"kind": "hub"})
    else:
        sections.append({"kind": "hub"})
    for section in sections:
        assert load(tmp_path, section).encode_texts([TEXT])[0].tokens.tolist() == ids(of_class(), TEXT)
    assert ("compared with nothing" in caplog.text) == (scheme is None)


def test_a_case_that_the_file_contradicts_is_refused(tmp_path: Path) -> None:
    cased, uncased = (FOLDERS[f"{name} BERT"].write(tmp_path / name) for name in ("cased", "uncased"))
    for lower_case in (True, False):  # true is the default, and for a vocab.txt alone
        assert load(cased, {"kind": "bert", "lower_case": lower_case}).lower_cases is False
    with pytest.raises(DataError, match=r"data\.tokenizer\.lower_case is false, and the files of tokenizer .*uncased"):
        load(uncased, {"kind": "bert", "lower_case": False})


@pytest.mark.parametrize(
    ("normalizer", "expected"),
    [
        (normalizers.Prepend("▁"), False),
        (normalizers.Replace("A", "4"), False),
        (normalizers.NFKC(), False),
        (normalizers.Lowercase(), True),
        (normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Lowercase()]), True),
    ],
)
def test_lower_casing_is_told_from_other_changes(normalizer: Any, expected: bool) -> None:
    backend = byte_pairs(normalizer=normalizer)
    assert Tokenizer(backend, end_of_text="<|endoftext|>", unknown=None).lower_cases is expected


def test_a_beginning_that_is_not_there_is_refused(tmp_path: Path) -> None:
    folder = FOLDERS["years as no class"].write(tmp_path / "none")
    with pytest.raises(DataError, match=r"data\.tokenizer\.beginning is bos, and tokenizer .* has no bos_token"):
        load(folder, {"kind": "hub", "beginning": "bos"})
    config = BOUNDS | {"tokenizer_class": FAST, "sep_token": "</s>", "cls_token": "<pad>"}
    folder = Folder(backend=unigram, config=config).write(tmp_path / "other")
    with pytest.raises(DataError, match=r"documents of tokenizer .* are '<pad> TEXT </s>'"):
        load(folder, {"kind": "hub", "beginning": "bos"})


@pytest.mark.parametrize("class_name", ["BertTokenizer", "GPT2Tokenizer", "Qwen2Tokenizer", "T5Tokenizer"])
def test_a_class_without_a_vocabulary_is_refused(tmp_path: Path, class_name: str) -> None:
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(END | {"tokenizer_class": class_name}))
    for find in (
        lambda: load(tmp_path, {"kind": "hub"}),
        lambda: load(tmp_path, {"kind": "hub", "encoder": "class"}),
        lambda: load_token_counter(str(tmp_path)),
    ):
        with pytest.raises(DataError, match=r"holds no .*tokenizer\.json"):
            find()


def test_a_class_that_cannot_be_loaded_leaves_the_file(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    case = Folder(backend=word_pieces, config={}, files={"config.json": "[]"}, **BERT)
    folder = case.write(tmp_path / "folder")
    with caplog.at_level(logging.WARNING):
        (found,) = load(folder, case.section).encode_texts([TEXT])
    assert found.tokens.tolist() == ids(read(folder), TEXT)
    assert "AutoTokenizer.from_pretrained" in caplog.text
    assert "not compared" in caplog.text
