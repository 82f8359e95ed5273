"""The kinds of sources, each in a file of its own, and the two functions of any kind.

builtin    the standard library's own text        library_text.py
jsonl      *.jsonl, *.jsonl.zst, *.jsonl.gz       json_lines.py
parquet    a column of text                       columns.py, tables/parquet.py
arrow      the same; folders of save_to_disk      columns.py, tables/arrow.py, saved_sets.py
text       plain text
hub        through `datasets`                     hub_rows.py
megatron   existing tokens; no text
hdf5       existing masked pairs                      ../shards/
"""

from typing import Any

from evenpack.data.sources import arrow, builtin, hdf5, hub, jsonl, megatron, parquet, text
from evenpack.data.sources.config import Source, SourceOfText
from evenpack.data.sources.corpus import Corpus, SourceKind
from evenpack.data.sources.input_files import InputFile
from evenpack.data.sources.rows import RowChoice, RowCorpus

KINDS: dict[str, SourceKind[Any]] = {
    "builtin": builtin.KIND,
    "jsonl": jsonl.KIND,
    "parquet": parquet.KIND,
    "arrow": arrow.KIND,
    "text": text.KIND,
    "hub": hub.KIND,
    "megatron": megatron.KIND,
    "hdf5": hdf5.KIND,
}
"""The kinds by `kind` in the run file."""


def open_corpus(name: str, source: Source) -> Corpus:
    """Opens the corpus of source `name`, or that of its rows.

    It finds the files and reads none of them. A dataset of the hub is loaded.

    Raises: DataError if the path is missing or leads to no file, or if the source holds tokens and no text.
    """
    corpus = KINDS[source.kind].open_corpus(name, source)
    if not isinstance(source, SourceOfText) or not source.changes_rows:
        return corpus
    choice = RowChoice(rows=source.rows, minimum_words=source.minimum_words, maximum_rows=source.maximum_rows)
    return RowCorpus(name, corpus, choice)


def source_inputs(name: str, source: Source) -> tuple[InputFile, ...]:
    """Returns the files of a source as they are now; none for a name on the hub, which is not queried again.

    Raises: DataError if the path is missing or leads to no file.
    """
    return KINDS[source.kind].inputs(name, source)
