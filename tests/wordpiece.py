"""Provides a small WordPiece vocabulary for tests, in BERT's form."""

from pathlib import Path

WORDS = ["the", "cat", "sat", "on", "mat", "##s", "it", "."]
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]


def write_vocabulary(folder: Path) -> str:
    """Writes a folder with vocab.txt alone. "the cats sat." has five tokens, and two special ones around it."""
    folder.mkdir(exist_ok=True)
    (folder / "vocab.txt").write_text("\n".join([*SPECIAL, *WORDS]) + "\n")
    return str(folder)
