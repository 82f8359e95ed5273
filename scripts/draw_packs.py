"""Draws docs/packs.svg, README's picture: one real step of the demo, padded and packed.

.venv/bin/python scripts/draw_packs.py        (after `make demo`)
"""

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
from svg import COLOURS, PADDING, document, rectangle, text

from evenpack.config import load_run_file
from evenpack.data.order.step_plan import StepPlanner
from evenpack.data.prepared import packed_sources
from evenpack.engine.config import RunConfig
from evenpack.engine.resolving.resolve import open_run

RANKS = 4
PACKS_PER_RANK = 3
PACKS = RANKS * PACKS_PER_RANK
STEP = 3
WIDTH, ROW, GAP = 300, 12, 4
LEFT, RIGHT, TOP = 24, 444, 64


def main() -> None:
    config = load_run_file(Path(sys.argv[1]), RunConfig, sys.argv[2:])
    run = open_run(config)
    prepared = run.prepared
    shape = replace(run.shape, items_per_step=PACKS, items_per_micro_batch=PACKS_PER_RANK)
    sources = packed_sources(prepared, "train", seed=config.run.seed)
    plan = StepPlanner(sources, prepared.weights, shape=shape, ranks=RANKS, objective=run.objective).plan(STEP)
    scale = WIDTH / prepared.pack_length
    parts: list[str] = []
    number = 0
    for rank in range(RANKS):
        y = TOP + rank * (PACKS_PER_RANK * (ROW + GAP) + 22) + 14
        packs = plan.micro_batch(rank, 0)
        squares = int((packs.lengths**2).sum())
        parts.append(
            text(RIGHT, y - 4, f"GPU {rank}: {PACKS_PER_RANK} packs, attention cost {squares / 1e6:.2f} M", size=12)
        )
        for pack in range(packs.packs):
            x, row = float(RIGHT), y + pack * (ROW + GAP) + 2
            parts.append(rectangle(RIGHT, row, WIDTH, ROW, PADDING))
            for length in packs.lengths[packs.offsets[pack] : packs.offsets[pack + 1]]:
                colour = COLOURS[number % len(COLOURS)]
                parts.append(rectangle(x, row, length * scale, ROW, colour))
                left = TOP + 2 + number * (ROW + GAP)
                parts += [
                    rectangle(LEFT, left, WIDTH, ROW, PADDING),
                    rectangle(LEFT, left, length * scale, ROW, colour),
                ]
                x += length * scale
                number += 1
    tokens, slots = plan.counts.tokens, prepared.pack_length
    padded, packed = 1 - tokens / (number * slots), 1 - tokens / (PACKS * slots)
    parts += [
        text(LEFT, 26, "Padded", size=17, weight=700),
        text(LEFT, 46, f"{number} rows for {number} documents, {padded:.0%} padding"),
        text(RIGHT, 26, "Packed", size=17, weight=700),
        text(RIGHT, 46, f"the same documents in {PACKS} packs, {packed:.1%} padding"),
    ]
    height = TOP + max(number * (ROW + GAP), RANKS * (PACKS_PER_RANK * (ROW + GAP) + 22)) + 16
    Path("docs/packs.svg").write_text(document(RIGHT + WIDTH + 24, height, parts))
    print(f"docs/packs.svg: {np.diff(plan.packs.offsets).tolist()} sequences a pack")


if __name__ == "__main__":
    main()
