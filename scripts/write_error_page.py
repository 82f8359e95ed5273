"""Writes docs/errors.md, what wrong inputs are told: `python scripts/write_error_page.py`."""

import contextlib
import io
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from unittest.mock import patch

PAGE = Path(__file__).parents[1] / "docs" / "errors.md"

_HEAD = """\
# What wrong inputs are told

Each message names what was expected, what was found and what to do. Commands end with code 2 and leave no half-written
file. `python scripts/write_error_page.py` runs them and writes this page, which a test compares, so that a change of
wording is read in its diff.
"""

_RUN = """\
run: {name: small, output_dir: out, seed: 3}
data:
  sources: {wiki: {kind: jsonl, path: text.jsonl}}
  tokenizer: {kind: train, vocabulary_size: 300}
  recipe: {kind: documents, max_sequence_length: 32}
  pack_length: 32
model: {kind: gpt2, preset: tiny, hidden_size: 32, heads: 2}
training: {packs_per_step: 8, packs_per_micro_batch: 2, steps: 4, precision: fp32}
optimizer: {learning_rate: 3e-3}
"""

_FILES = {
    "run.yaml": _RUN,
    "text.jsonl": "".join(f'{{"text": "some words of document {n} {"and more " * (n % 5)}"}}\n' for n in range(120)),
    "cut.jsonl": '{"text": "a b c"}\n{"text": "a b\n',
    "list.jsonl": '{"text": "a b c"}\n[1, 2]\n',
    "other_key.jsonl": '{"body": "a b c", "id": 1}\n',
    "no_utf8.jsonl": '{"text": "a b c"}\n{"text": "\udcff\udcfe"}\n',
    "empty.jsonl": "",
    "nothing.jsonl": '{"text": ""}\n',
    "twice.yaml": "run: {name: a}\nrun: {name: b}\n",
    "no_yaml.yaml": "run: [1, 2\n",
    "list.yaml": "- 1\n",
    "alias.yaml": "run: &a [*a]\n",
    "object.yaml": "run: !!python/object:os.system {}\n",
    "vocabulary/vocab.json": "{}",
    "vocabulary/merges.txt": "#version: 0.2\n",
    "words/vocab.json": '{"[UNK]": 0, "hello": 1, "world": 2}',
    "words/merges.txt": "#version: 0.2\n",
    "cut/vocab.json": "{",
    "cut/merges.txt": "#version: 0.2\n",
    "taken/file": "",
}
"""Files of the folder in which the commands run."""


def _prepare(*words: str) -> tuple[str, ...]:
    return ("prepare", "run.yaml", *words)


_INPUTS: dict[str, Sequence[tuple[str, ...]]] = {
    "Names of keys": (
        _prepare("training.step=5"),
        _prepare("trainig.steps=5"),
        _prepare("data.sources.wikki.path=x"),
        _prepare("batch_size=8"),
        _prepare("training.lr=1"),
        _prepare("steps=60"),
        _prepare("training.seed=3"),
        _prepare("model.token_types=2"),
        _prepare("training.steps", "60"),
        ("train", "run.yaml", "--training.steps=60"),
        ("train", "run.yaml", "--deepspeed_config", "ds.json"),
    ),
    "Values": (
        _prepare("training.steps=0"),
        _prepare("training.steps=many"),
        _prepare("training.steps=010"),
        _prepare("training.steps=1:30"),
        _prepare("training.steps=true"),
        _prepare("optimizer.learning_rate=.nan"),
        _prepare("run.name=no"),
        _prepare("run.name=12"),
        _prepare("model.kind=gtp2"),
        _prepare("model.heads=3"),
        _prepare("data.recipe.kind=documnts"),
        _prepare("data.recipe.max_sequence_length=64"),
        _prepare("data.packing.algorithm=longest"),
        _prepare("training.packs_per_micro_batch=3"),
        _prepare("schedule.warmup_steps=11"),
        _prepare(f"run.output_dir=a/{'b' * 256}/c"),
    ),
    "Run files": (
        ("prepare", "nowhere.yaml"),
        ("prepare", "run.yml"),
        ("prepare", "twice.yaml"),
        ("prepare", "no_yaml.yaml"),
        ("prepare", "list.yaml"),
        ("prepare", "alias.yaml"),
        ("prepare", "object.yaml"),
    ),
    "Documents": (
        _prepare("data.sources.wiki.path=missing.jsonl"),
        _prepare("data.sources.wiki.path=cut.jsonl"),
        _prepare("data.sources.wiki.path=list.jsonl"),
        _prepare("data.sources.wiki.path=other_key.jsonl"),
        _prepare("data.sources.wiki.path=no_utf8.jsonl"),
        _prepare("data.sources.wiki.path=empty.jsonl"),
        _prepare("data.sources.wiki.path=nothing.jsonl"),
        _prepare("data.tokenizer={kind: gpt2, path: nowhere}"),
        _prepare("data.tokenizer={kind: gpt2, path: vocabulary}"),
        _prepare("data.tokenizer={kind: gpt2, path: words}"),
        _prepare("data.tokenizer={kind: gpt2, path: cut}"),
    ),
    "Commands": (
        ("prepair", "run.yaml"),
        ("train", "run.yaml", "--dry-rn"),
        ("train", "run.yaml"),
        ("train", "run.yaml", "data.pack_length=64", "data.prepared_dir=data"),
        ("train", "run.yaml", "data.prepared_dir=data", "--cpu-ranks", "3"),
        ("evaluate", "run.yaml", "data.prepared_dir=data"),
        ("export", "run.yaml", "taken", "data.prepared_dir=data"),
        ("prepare", "run.yaml", "data.prepared_dir=taken"),
        ("fork", "taken", "--at", "100", "child.yaml"),
        ("config", "explain", "training.stepp"),
        ("study", "packing", "missing.npy"),
    ),
}
"""Commands by subject; the data of run.yaml are prepared in the folder `data`."""


def page() -> str:
    """Runs every command and returns the page."""
    with tempfile.TemporaryDirectory(prefix="evenpack-errors-") as folder, contextlib.chdir(folder):
        for name, text in _FILES.items():
            Path(name).parent.mkdir(exist_ok=True)
            Path(name).write_text(text, encoding="utf-8", errors="surrogateescape")
        code, message = _run(*_prepare("data.prepared_dir=data"))
        if code != 0:
            raise SystemExit(message)
        text = "\n".join([_HEAD, '```yaml title="run.yaml"', _RUN + "```", "", *_sections()])
        return text.replace(str(Path.cwd()), "/home/me")


def _sections() -> Iterator[str]:
    for subject, commands in _INPUTS.items():
        yield f"## {subject}\n"
        for command in commands:
            before = sorted(Path().rglob("*"))
            code, message = _run(*command)
            if code != 2 or "Traceback" in message:
                raise SystemExit(f"{' '.join(command)} ended with code {code}: {message}")
            made = [path for path in sorted(Path().rglob("*")) if path not in before and path.is_file()]
            if made:
                raise SystemExit(f"{' '.join(command)} has left {made}")
            shown = " ".join(f"'{word}'" if " " in word else word for word in command)
            said = message[message.index("error: " if "\nerror: " in f"\n{message}" else "Usage: ") :]  # no progress
            lines = "\n".join(line.rstrip() for line in said.strip().splitlines())
            yield f"```\n$ evenpack {shown}\n{lines}\n```\n"


def _run(*arguments: str) -> tuple[int, str]:
    from evenpack.launcher.cli.app import main

    shown = io.StringIO()
    environment = {**os.environ, "COLUMNS": "120", "CUDA_VISIBLE_DEVICES": "", "NO_COLOR": "1"}
    with (
        patch.object(sys, "argv", ["evenpack", *arguments]),
        patch.dict(os.environ, environment),
        contextlib.redirect_stderr(shown),
        contextlib.redirect_stdout(io.StringIO()),
    ):
        try:
            main()
        except SystemExit as end:
            return int(end.code or 0), shown.getvalue()
    return 0, shown.getvalue()


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
