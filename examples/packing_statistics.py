"""Shows how full packs of your own sequences would be.

    python examples/packing_statistics.py [LENGTHS.txt]

LENGTHS.txt has one length per line, in tokens. Without it, 20,000 lengths are drawn from a log-normal distribution.
"""

import sys

import numpy as np

import evenpack

if len(sys.argv) > 1:
    lengths = np.loadtxt(sys.argv[1], dtype=np.int64, ndmin=1)
else:
    lengths = np.clip(np.random.default_rng(0).lognormal(5.0, 0.8, size=20_000).astype(np.int64), 1, 512)

print(f"{len(lengths):,} sequences, the longest of {lengths.max():,} tokens")
print(f"padded to the longest: {lengths.mean() / lengths.max():.1%} of all slots hold a token")
for max_sequences in (2, 3, None):
    packing = evenpack.pack(lengths, pack_length=int(lengths.max()), max_sequences_per_pack=max_sequences)
    limit = "any number of" if max_sequences is None else f"up to {max_sequences}"
    print(f"packs of {limit} sequences: {packing.efficiency:.1%}, {packing.packs:,} packs by {packing.algorithm}")

first = packing.assign(lengths)[0]
print(f"the first pack holds sequences {first.tolist()} of {lengths[first].tolist()} tokens")
