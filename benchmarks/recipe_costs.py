"""Counts the rows and the padding that recipes make of a tokenised corpus; nothing is trained or timed.

    python benchmarks/recipe_costs.py RUN.yaml [section.key=value ...] [--json FILE]

Run `evenpack prepare` with the same arguments first. Only the tokens of the run are read, whatever its recipe is, of
both splits together; `padding` is compared with `concat` at each length of rows and each atom.
"""

import json

import measuring

from evenpack.config import load_run_file
from evenpack.data.prepared import PreparedData
from evenpack.data.recipes import ConcatRecipe, PaddingRecipe
from evenpack.data.sequences import build_view
from evenpack.data.tokens.file import TokenFile
from evenpack.engine.config import RunConfig

ATOMS = {64: (16, 32, 64, 128, 256), 512: (128, 256, 512, 1024, 2048)}
"""Atoms by the length of rows, in tokens."""


def main() -> None:
    arguments = measuring.parser_of(__doc__, run_file=True, json_file=True).parse_args()
    config = load_run_file(arguments.run_file, RunConfig, arguments.overrides)
    data = PreparedData.open(config.prepared_dir, config.data)
    report = {name: of_source(TokenFile(data.token_file_prefix(name))) for name in data.source_names}
    print(json.dumps(report, indent=2))
    measuring.write_report(report, arguments.json)


def of_source(file: TokenFile) -> dict[str, object]:
    """Returns the size of a tokenised source, and a row for each length and atom."""
    rows = [of_padding(file, length, atom) for length, atoms in ATOMS.items() for atom in atoms]
    return {"documents": file.documents, "tokens": file.tokens, "rows": rows}


def of_padding(file: TokenFile, length: int, atom: int) -> dict[str, int]:
    """Returns the rows of `concat` and of `padding`, and where the end-of-text tokens of `padding` come from."""
    concat = build_view(ConcatRecipe(kind="concat", max_sequence_length=length, atom=atom), file, None)
    padding = build_view(PaddingRecipe(kind="padding", max_sequence_length=length, atom=atom), file, None)
    return {
        "max_sequence_length": length,
        "atom": atom,
        "concat_rows": concat.count,
        "padding_rows": padding.count,
        "ends_behind_full_pieces": padding.accounting.tokens_subsequence_ends,
        "ends_in_tails": padding.accounting.tail_padding,
        "padding_slots": padding.accounting.padding_slots,
    }


if __name__ == "__main__":
    main()
