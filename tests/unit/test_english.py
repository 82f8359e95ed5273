"""Words of an earlier private dialect are not used in docstrings, messages, help texts and pages."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
UNITS = "bytes|documents|micro-batches|nats|operations|packs|pairs|rows|samples|sequences|slots|tokens"
PER = "device|document|epoch|micro-batch|pack|pair|parameter|rank|row|second|sequence|slot|step|target|token"
INSTEAD = {
    r"foretell|foretold": "predict",
    r"for want of": "without a",
    r"\banew\b": "again",
    r"\ba trifle\b": "slightly",
    r"no sane one": "invalid",
    r"died without a word": "exited without an error message",
    r"without a word|in silence": "silently",
    r"\bdealt\b|(?<!\.)\bdealing\b": "assigned, load balancing",
    r"\bdearest\b|\bcheapest\b": "most expensive, least expensive",
    r"\blest\b": "so that ... not",
    r"to and fro": "back and forth",
    r"behind one another|one behind another": "concatenated",
    r"\bledger\b": "token accounting",
    r"told right|guessed right": "predicted correctly",
    r"says nothing|said nothing": "does not apply, is not known",
    r"gone on with|goes on from (?:there|here)": "resumed, continue",
    r"lets? go of": "release",
    r"(?:come|came) ready made": "existing",
    r"asked for by|not asked for": "requested",
    r"hears of": "is called with",
    r"which see\b": "see there",
    r"\b(?:can|could|must)(?:not)? be had\b": "is possible",
    r"taken for granted": "assumed",
    r"looks both ways": "bidirectional",
    r"\bspoilt\b": "damaged",
    r"(?<!here )\b(?:is|was|are|were) no (?!longer|more|faster|slower|better|such|less)": "is not a",
    r"\b(?:tells?|told|knows?) of\b": "has, reports, lists",
    r"what of it\b|by name of|\bsuch as are\b": "(rephrase)",
    r"thrown away|throws? away": "discard",
    r"\bof (?:no )?use\b(?! by)": "useless, useful",
    r"in the midst": "during",
    r"\bspares\b": "is not applied to",
    r"\bwhich one hears\b|\blistened to\b": "record",
    rf"\b(?:{UNITS})(?: |\n *)an?(?: |\n *)(?:{PER})\b(?! (?:may|of|in)\b)": "tokens/s, sequences per pack",
}
OLD = re.compile("|".join(INSTEAD))


def pages() -> Iterator[Path]:
    yield from (ROOT / name for name in ("README.md", "CONTRIBUTING.md"))
    yield from sorted((ROOT / "docs").rglob("*.md"))
    for suffix in ("*.py", "*.md"):
        yield from sorted((ROOT / "evenpack").rglob(suffix))


def old_words(text: str) -> Iterator[str]:
    """Yields each line with an old word, and the words to use instead."""
    small = text.lower()
    for found in OLD.finditer(small):
        instead = next(words for pattern, words in INSTEAD.items() if re.match(pattern, small[found.start() :]))
        line = small.count("\n", 0, found.start()) + 1
        yield f"line {line}: '{found[0]}': write {instead}"


def test_no_page_and_no_module_has_an_old_word() -> None:
    found = [f"{path.relative_to(ROOT)}, {line}" for path in pages() for line in old_words(path.read_text("utf-8"))]
    assert found == []


@pytest.mark.parametrize(
    "text", ["It foretells the wait.", "12 tokens a step", "The dearest rank", "Died without a word"]
)
def test_an_old_word_is_found(text: str) -> None:
    assert len(list(old_words(f"A first line.\n{text}"))) == 1


@pytest.mark.parametrize("text", ["tokens/s", "most sequences a pack may hold", "rows a step of a source"])
def test_usual_words_are_not(text: str) -> None:
    assert list(old_words(text)) == []
