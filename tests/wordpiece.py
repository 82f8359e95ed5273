"""Provides a small WordPiece vocabulary for tests, in BERT's form."""

from pathlib import Path

from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

WORDS = ["the", "cat", "sat", "on", "mat", "##s", "it", "."]
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]


def write_vocabulary(folder: Path) -> str:
    """Writes a folder with vocab.txt alone. "the cats sat." has five tokens, and two special ones around it."""
    folder.mkdir(exist_ok=True)
    (folder / "vocab.txt").write_text("\n".join([*SPECIAL, *WORDS]) + "\n")
    return str(folder)


def write_tokenizer_json(folder: Path) -> str:
    """Writes the same vocabulary with tokenizer.json alone, which truncates to three tokens and pads if it is let."""
    folder.mkdir(exist_ok=True)
    vocabulary = {token: index for index, token in enumerate([*SPECIAL, *WORDS])}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.enable_truncation(3)
    tokenizer.enable_padding()
    tokenizer.save(str(folder / "tokenizer.json"))
    return str(folder)
