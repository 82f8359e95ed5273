"""Makes tokenizer folders of many kinds for tests, each with a vocabulary of a few hundred entries."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

TEXT = (
    "In 2023 and 12345678 it's naïve: Ångström, cafe\u0301, \u212bngström, ﬁve İstanbul ŁÓDŹ.\n"
    "漢字かな 中文 한국어 Привет שלום 🙂👩‍👩‍👧  two   three        eight\tand\n\n\r\n  lines  \u200b end!  "
)
"""Digits, accents, combining marks, CJK, emoji, runs of spaces."""
_CORPUS = [TEXT, TEXT.lower(), "the cat sat on the mat 2023 2024 1999 and the cat slept <|x|> </s> [SEP]"] * 4 + [
    "2023 2024 2025 20 23 20 23 20 23 20 23"
] * 9
_DIGITS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s+(?!\S)|\s+"


@dataclass(frozen=True, kw_only=True)
class Folder:
    """One case: how its files are made, and what is to be expected of it."""

    backend: Callable[[], Tokenizer]
    config: Mapping[str, Any]
    """tokenizer_config.json."""
    section: Mapping[str, Any] = field(default_factory=lambda: {"kind": "hub"})
    """`data.tokenizer` without the place."""
    class_differs: bool = False
    """Whether the class that it names makes other tokens of some text."""
    begins: str | None = None
    """The token before each document."""
    ends_prompt: bool = False
    """Whether a prompt ends in the end of documents, as BERT's."""
    template_differs: bool = False
    """Whether it puts other tokens around a text than documents have here."""
    files: Mapping[str, str] = field(default_factory=dict)
    """Further files."""

    def write(self, folder: Path) -> Path:
        folder.mkdir()
        self.backend().save(str(folder / "tokenizer.json"))
        for name, content in {"tokenizer_config.json": json.dumps(self.config), **self.files}.items():
            (folder / name).write_text(content)
        return folder


def byte_pairs(
    *,
    pattern: str | None = _DIGITS,
    normalizer: Any = None,
    special: tuple[str, ...] = ("<|endoftext|>",),
) -> Tokenizer:
    """A byte-level BPE whose words are split by a pattern; None: by GPT-2's."""
    backend = Tokenizer(models.BPE())
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pattern is None)
    if pattern is None:
        backend.pre_tokenizer = level
    else:
        split = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
        backend.pre_tokenizer = pre_tokenizers.Sequence([split, level])
    backend.decoder = decoders.ByteLevel()
    if normalizer is not None:
        backend.normalizer = normalizer
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=list(special), initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(_CORPUS, trainer)
    return backend


def characters() -> Tokenizer:
    """A BPE of characters as Llama 2 has it: spaces are a character, bytes stand for unknown ones."""
    backend = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=500, special_tokens=special, limit_alphabet=60, show_progress=False)
    backend.train_from_iterator(_CORPUS, trainer)
    values = json.loads(backend.to_str())
    values["added_tokens"] = values["added_tokens"][:3]
    backend = Tokenizer.from_str(json.dumps(values))
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return backend


def unigram(*, scheme: str = "always", byte_fallback: bool = False, special: bool = True) -> Tokenizer:
    """A Unigram model, whose own vocabulary holds its special tokens, as SentencePiece's does."""
    names = ["<unk>", "<pad>", "<s>", "</s>", "<mask>"]
    letters = sorted(set("".join(_CORPUS)) - {" ", "中", "🙂"} | {"▁"} | set("<>/[]|"))
    words = ["▁the", "▁cat", "▁2023", "▁20", "23", "▁s", "▁e", "pad", "mask", "unk", "an", "in", "▁i", "▁t", "th"]
    pieces = [(name, 0.0) for name in names]
    pieces += [(f"<0x{byte:02X}>", -9.0) for byte in range(256)] if byte_fallback else []
    pieces += [(word, -3.0 - index / 100) for index, word in enumerate(words)]
    pieces += [(letter, -6.0 - index / 100) for index, letter in enumerate(letters)]
    backend = Tokenizer(models.Unigram(pieces, unk_id=0, byte_fallback=byte_fallback))
    backend.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Replace(Regex(" {2,}"), " ")])
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    backend.decoder = decoders.Metaspace(prepend_scheme=scheme)
    if special:
        backend.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in names])
    return backend


def word_pieces(*, lowercase: bool = True, splitter: Any = None, template: bool = True) -> Tokenizer:
    """A WordPiece vocabulary in BERT's form."""
    names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    letters = sorted({letter for text in _CORPUS for letter in text if not letter.isspace()} - set("🙂中"))
    words = [*names, *letters, *(f"##{letter}" for letter in letters), "the", "The", "cat", "20", "##23", "cls", "CLS"]
    backend = Tokenizer(models.WordPiece({word: index for index, word in enumerate(words)}, unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer(lowercase=lowercase)
    backend.pre_tokenizer = splitter or pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    if template:
        backend.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    backend.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in names])
    return backend


def whole_words(*vocabulary: str) -> Tokenizer:
    """A vocabulary of whole words, in this order; an unknown one is [UNK]."""
    backend = Tokenizer(models.WordLevel({word: index for index, word in enumerate(vocabulary)}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return backend


def words() -> Tokenizer:
    """A vocabulary of whole words, which text may spell its special tokens by."""
    return whole_words(*dict.fromkeys(["[UNK]", "</s>", "<pad>", *TEXT.split(), "the", "cat"]))


def marked_words(**settings: Any) -> Tokenizer:
    """A BPE of characters that marks the ends or the insides of words, as the first GPT has it."""
    backend = Tokenizer(models.BPE(unk_token="<unk>", **settings))
    backend.normalizer = normalizers.BertNormalizer()
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = ["<unk>", "</s>", "<pad>"]
    backend.train_from_iterator(
        [*_CORPUS, *["<pad> <pad>a </s> <unk> a<pad></s><unk>"] * 9],
        trainers.BpeTrainer(vocab_size=400, special_tokens=special, show_progress=False, **settings),
    )
    return backend


def with_template(backend: Tokenizer, single: str, *names: str) -> Tokenizer:
    """Puts tokens around a text."""
    special = [(name, backend.token_to_id(name)) for name in names]
    backend.post_processor = processors.TemplateProcessing(single=single, pair=f"{single} $B:1", special_tokens=special)
    return backend


def with_tokens(backend: Tokenizer, *tokens: AddedToken) -> Tokenizer:
    """Adds tokens to a vocabulary, special ones as such."""
    backend.add_special_tokens([token for token in tokens if token.special])
    backend.add_tokens([token for token in tokens if not token.special])
    return backend


def shortened(backend: Tokenizer) -> Tokenizer:
    """Lets it truncate and pad."""
    backend.enable_truncation(4)
    backend.enable_padding(length=8, pad_token="<|endoftext|>")  # transformers adds a token that is not there
    return backend


def changed(backend: Tokenizer, change: Callable[[dict[str, Any]], None]) -> Tokenizer:
    """Changes the content of its file."""
    values = json.loads(backend.to_str())
    change(values)
    return Tokenizer.from_str(json.dumps(values))


def unmark(values: dict[str, Any]) -> None:
    """Makes special tokens of a file plain ones."""
    for token in values["added_tokens"]:
        token["special"] = False


FAST = "PreTrainedTokenizerFast"
END = {"eos_token": "<|endoftext|>"}
PLAIN = END | {"tokenizer_class": FAST}
GPT2 = END | {"tokenizer_class": "GPT2Tokenizer"}
BOUNDS = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
T5 = BOUNDS | {"pad_token": "<pad>"}
PIECES = T5 | {"tokenizer_class": FAST}
WORDS = {"tokenizer_class": FAST, "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
LLAMA = {"tokenizer_class": FAST, "bos_token": "<|begin|>", "eos_token": "<|end|>"}
BERT = {"section": {"kind": "bert"}, "begins": "[CLS]", "ends_prompt": True}
_LLAMA = ("<|begin|>", "<|end|>", "<|user|>")
_ROBERTA = ("<s>", "<pad>", "</s>", "<unk>", "<mask>")


def _roberta() -> Tokenizer:
    backend = byte_pairs(special=_ROBERTA)
    backend.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0))
    return backend


def _ignoring_merges() -> Tokenizer:
    backend = byte_pairs(special=_LLAMA, pattern=r"\s+|\S+")
    return changed(backend, lambda values: values["model"].update(ignore_merges=True))


def _unmarked() -> Tokenizer:
    """Its end of text is no special token by its file, but one that is found in text."""
    return changed(byte_pairs(special=("<|endoftext|>", "<|x|>")), unmark)


_ADDED = {"__type": "AddedToken", "content": "</s>", "normalized": False, "special": True} | dict.fromkeys(
    ("lstrip", "rstrip", "single_word"), False
)


def _forming() -> Tokenizer:
    """Its merges make special tokens of their letters, and go on from one."""
    backend = characters()

    def change(values: dict[str, Any]) -> None:
        model = values["model"]
        pairs = [["<", "p"], ["<p", "a"], ["<pa", "d"], ["<pad", ">"], ["<pad>", "s"], ["<", "s"], ["<s", ">"]]
        for token in [letter for pair in pairs for letter in (*pair, "".join(pair))]:
            model["vocab"].setdefault(token, len(model["vocab"]))
        model["merges"] = pairs + model["merges"]

    return changed(backend, change)


def _lower_cased() -> Tokenizer:
    backend = unigram()
    backend.normalizer = normalizers.Lowercase()
    return backend


def _unended() -> Tokenizer:
    backend = word_pieces()
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] [SEP] $B:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    return backend


FOLDERS: dict[str, Folder] = {
    "GPT-2's pattern": Folder(backend=lambda: byte_pairs(pattern=None), config=GPT2),
    "years as GPT2Tokenizer": Folder(backend=byte_pairs, config=GPT2, class_differs=True),
    "years as RobertaTokenizer": Folder(
        backend=_roberta,
        config={"tokenizer_class": "RobertaTokenizer"},
        class_differs=True,
        begins="<s>",
        ends_prompt=True,
    ),
    "RoBERTa's mask takes the space before it": Folder(
        backend=lambda: with_tokens(
            byte_pairs(special=("<s>", "<pad>", "</s>", "<unk>")), AddedToken("<mask>", special=True, lstrip=True)
        ),
        config={"tokenizer_class": FAST, "eos_token": "</s>", "mask_token": "<mask>"},
    ),
    "a single character is a special token": Folder(
        backend=byte_pairs, config=END | {"tokenizer_class": FAST, "pad_token": "!"}
    ),
    "years as no class": Folder(backend=byte_pairs, config=PLAIN),
    "years as LlamaTokenizer": Folder(backend=byte_pairs, config=END | {"tokenizer_class": "LlamaTokenizer"}),
    "years as an unknown class": Folder(backend=byte_pairs, config=END | {"tokenizer_class": "NobodysTokenizer"}),
    "years by kind gpt2": Folder(backend=byte_pairs, config=GPT2, section={"kind": "gpt2"}, class_differs=True),
    "GPT-2 that adds its beginning": Folder(
        backend=lambda: byte_pairs(pattern=None),
        config=END | {"tokenizer_class": "GPT2Tokenizer", "bos_token": "<|endoftext|>", "add_bos_token": True},
    ),
    "GPT-2 with a beginning": Folder(
        backend=lambda: byte_pairs(pattern=None),
        config=END | {"tokenizer_class": "GPT2Tokenizer", "bos_token": "<|endoftext|>", "add_bos_token": True},
        section={"kind": "gpt2", "beginning": "bos"},
        begins="<|endoftext|>",
        template_differs=True,
    ),
    "Llama 3's template": Folder(
        backend=lambda: with_template(byte_pairs(special=_LLAMA), "<|begin|> $A", "<|begin|>"),
        config=LLAMA,
        template_differs=True,
    ),
    "Llama 3's beginning": Folder(
        backend=lambda: with_template(byte_pairs(special=_LLAMA), "<|begin|> $A", "<|begin|>"),
        config=LLAMA,
        section={"kind": "hub", "beginning": "bos"},
        begins="<|begin|>",
    ),
    "both ends": Folder(
        backend=lambda: with_template(byte_pairs(special=_LLAMA), "<|begin|> $A <|end|>", "<|begin|>", "<|end|>"),
        config=LLAMA,
        section={"kind": "hub", "beginning": "bos"},
        begins="<|begin|>",
        template_differs=True,
    ),
    "words that are no merges": Folder(backend=_ignoring_merges, config=LLAMA),
    "dropout": Folder(
        backend=lambda: changed(byte_pairs(), lambda values: values["model"].update(dropout=0.5)), config=PLAIN
    ),
    "truncation and padding": Folder(backend=lambda: shortened(byte_pairs()), config=PLAIN),
    "no special token by its file": Folder(backend=_unmarked, config=PLAIN),
    "special tokens named in the config alone": Folder(
        backend=_unmarked, config=END | {"tokenizer_class": FAST, "additional_special_tokens": ["<|x|>"]}
    ),
    "NFKC and lower case": Folder(
        backend=lambda: byte_pairs(
            normalizer=normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase(), normalizers.StripAccents()])
        ),
        config=GPT2,
        class_differs=True,
    ),
    "added tokens": Folder(
        backend=lambda: with_tokens(
            byte_pairs(),
            AddedToken("naïve", normalized=True),
            AddedToken("        ", normalized=False),
            AddedToken("cat", single_word=True),
            AddedToken("and", lstrip=True, rstrip=True),
            AddedToken("<|x|>", special=True, lstrip=True),
        ),
        config=PLAIN,
    ),
    "names that are no ASCII": Folder(
        backend=lambda: byte_pairs(special=("<\uff5cbegin▁of▁sentence\uff5c>", "<\uff5cend▁of▁sentence\uff5c>")),
        config={
            "tokenizer_class": "LlamaTokenizer",
            "bos_token": "<\uff5cbegin▁of▁sentence\uff5c>",
            "eos_token": "<\uff5cend▁of▁sentence\uff5c>",
        },
        section={"kind": "hub", "beginning": "bos"},
        begins="<\uff5cbegin▁of▁sentence\uff5c>",
        template_differs=True,
    ),
    "Llama 2": Folder(
        backend=lambda: with_template(characters(), "<s> $A", "<s>"),
        config=BOUNDS | {"tokenizer_class": FAST},
        template_differs=True,
    ),
    "Llama 2 as its class": Folder(
        backend=lambda: with_template(characters(), "<s> $A", "<s>"),
        config=BOUNDS | {"tokenizer_class": "LlamaTokenizer", "legacy": False, "add_bos_token": True},
        section={"kind": "hub", "beginning": "bos"},
        begins="<s>",
        class_differs=True,
    ),
    "Unigram": Folder(backend=unigram, config=PIECES),
    "Unigram whose config names no unknown token": Folder(
        backend=unigram, config={"tokenizer_class": FAST, "eos_token": "</s>"}
    ),
    "Unigram whose config names another unknown token": Folder(
        backend=unigram, config=T5 | {"tokenizer_class": FAST, "unk_token": "<mask>"}
    ),
    "Unigram as T5": Folder(
        backend=lambda: with_template(unigram(), "$A </s>", "</s>"),
        config=T5 | {"tokenizer_class": "T5Tokenizer", "extra_ids": 0},
        class_differs=True,
        template_differs=True,
    ),
    "Unigram as XLM-R": Folder(
        backend=lambda: with_template(unigram(), "<s> $A </s>", "<s>", "</s>"),
        config=T5 | {"tokenizer_class": "XLMRobertaTokenizer", "mask_token": "<mask>"},
        class_differs=True,
        begins="<s>",
        ends_prompt=True,
    ),
    "Unigram with bytes": Folder(backend=lambda: unigram(byte_fallback=True, scheme="first"), config=PIECES),
    "Unigram without special tokens by its file": Folder(
        backend=lambda: unigram(special=False, scheme="never"),
        config=T5 | {"tokenizer_class": FAST, "mask_token": "<mask>"},
    ),
    "Unigram whose file marks no unknown token and whose config names none": Folder(
        backend=lambda: unigram(special=False), config={"tokenizer_class": FAST, "eos_token": "</s>"}
    ),
    "uncased BERT": Folder(backend=word_pieces, config={"tokenizer_class": "BertTokenizer"}, **BERT),
    "cased BERT": Folder(
        backend=lambda: word_pieces(lowercase=False),
        config={"tokenizer_class": "BertTokenizer", "do_lower_case": False},
        **BERT,
    ),
    "cased BERT that does not say so": Folder(
        backend=lambda: word_pieces(lowercase=False),
        config={"tokenizer_class": "BertTokenizer"},
        class_differs=True,
        **BERT,
    ),
    "BERT without a template": Folder(
        backend=lambda: word_pieces(template=False),
        config={
            "tokenizer_class": FAST,
            **{f"{name}_token": f"[{name.upper()}]" for name in ("cls", "sep", "pad", "mask", "unk")},
        },
        template_differs=True,
        **BERT,
    ),
    "BERT whose pairs end in nothing": Folder(
        backend=_unended, config={"tokenizer_class": FAST, "cls_token": "[CLS]", "sep_token": "[SEP]"}, **BERT
    ),
    "BERT whose words may be special tokens": Folder(
        backend=lambda: word_pieces(splitter=pre_tokenizers.WhitespaceSplit()),
        config={"tokenizer_class": "BertTokenizer"},
        class_differs=True,
        **BERT,
    ),
    "ends of words": Folder(backend=lambda: marked_words(end_of_word_suffix="</w>"), config=WORDS),
    "insides of words": Folder(backend=lambda: marked_words(continuing_subword_prefix="##"), config=WORDS),
    "merges that form special tokens": Folder(backend=_forming, config=PIECES),
    "Unigram in lower case": Folder(backend=_lower_cased, config=T5 | {"tokenizer_class": FAST, "eos_token": _ADDED}),
    "whole words": Folder(
        backend=words,
        config={"tokenizer_class": FAST, "eos_token": "</s>", "unk_token": "[UNK]", "pad_token": "<pad>"},
    ),
}
