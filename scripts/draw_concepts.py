"""Draws docs/isolation.svg, a picture of docs/concepts.md: the tokens to which each token of a pack attends.

.venv/bin/python scripts/draw_concepts.py
"""

from pathlib import Path

import numpy as np
import torch
from svg import COLOURS, FAINT, PADDING, document, rectangle, text

from evenpack.kernels.attention import packed_attention
from evenpack.kernels.segments import Segments

LENGTHS = (6, 4, 3)
PADDED = 1
CELL, LEFT, TOP = 18, 70, 96
"""Size in the isolation picture, in pixels."""


def main() -> None:
    Path("docs/isolation.svg").write_text(isolation())
    print("docs/isolation.svg")


def isolation() -> str:
    """Draws two squares: what attention computes in a pack, with isolation and without, for a decoder."""
    slots = sum(LENGTHS) + PADDED
    side = slots * CELL
    right = LEFT + side + 110
    owner = np.repeat(np.arange(len(LENGTHS) + 1), (*LENGTHS, PADDED))
    positions = np.concatenate([np.arange(length) for length in (*LENGTHS, PADDED)])
    parts = [
        text(LEFT, 26, "Isolated: each sequence sees itself", size=17, weight=700),
        text(LEFT, 46, f"{slots} slots: sequences of {', '.join(map(str, LENGTHS))} tokens, {PADDED} of padding"),
        text(right, 26, "Not isolated: all before it", size=17, weight=700),
        text(right, 46, "packing without boundaries"),
    ]
    for x, boundaries in ((LEFT, (0, *np.cumsum((*LENGTHS, PADDED)).tolist())), (right, (0, slots))):
        seen = visible(slots, boundaries)
        parts.append(text(x - 8, TOP - 24, "position", size=11, anchor="end", colour=FAINT))
        for slot in range(slots):
            colour = PADDING if owner[slot] == len(LENGTHS) else COLOURS[owner[slot]]
            label = positions[slot] if x == LEFT else slot
            parts.append(text(x + (slot + 0.5) * CELL, TOP - 24, str(label), size=11, anchor="middle", colour=FAINT))
            parts.append(rectangle(x + slot * CELL, TOP - 18, CELL, CELL - 4, colour))
            parts.append(rectangle(x - 24, TOP + slot * CELL, CELL, CELL - 2, colour))
            for key in range(slots):
                shade, opacity = (colour, 0.9) if seen[slot, key] else (PADDING, 0.5)
                parts.append(rectangle(x + key * CELL, TOP + slot * CELL, CELL, CELL - 2, shade, opacity=opacity))
    return document(right + side + 24, TOP + side + 20, parts)


def visible(slots: int, boundaries: tuple[int, ...]) -> np.ndarray:
    """Returns which keys have a weight in the attention of the reference backend, as bool[queries, keys]."""
    nothing = torch.zeros(slots, 1, slots)
    each_its_own = torch.eye(slots).unsqueeze(1)
    borders = torch.tensor(boundaries, dtype=torch.int32)
    segments = Segments(cu_seqlens=borders, max_sequence_length=slots, causal=True)
    weights = packed_attention(nothing, nothing, each_its_own, segments, backend="reference")
    return weights.squeeze(1).numpy() > 0


if __name__ == "__main__":
    main()
