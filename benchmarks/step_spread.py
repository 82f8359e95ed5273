"""Computes how much of the published spread of un-padded steps lengths explain, and what noise would explain the rest.

    python benchmarks/step_spread.py [--devices 8] [--steps 4000] [--json FILE]

PackedBERT (section E) fits the speed-up of a step on 8 GPUs, 32 sequences each, by a Gumbel law of scale 0.1288, a
standard deviation of 0.165. Here such steps are simulated on the published lengths, with costs of more and more parts:

    tokens       a micro-batch takes the time of its slots alone
    attention    also that of its squared lengths, as in the roofline of BERT-large on an H100
    fixed        also what a micro-batch and a step take in any layout, by the same roofline

For each of them the noise of a micro-batch's seconds is fitted with which simulated steps vary as much as the law says.
"""

import json
from dataclasses import asdict, replace

import measuring

from evenpack.data.packing import pack
from evenpack.studies.imbalance.cluster import ClusterOptions
from evenpack.studies.imbalance.extrapolation import PUBLISHED_CLUSTER, PUBLISHED_DEVICES, PUBLISHED_LENGTHS
from evenpack.studies.imbalance.simulation import fit_noise, make_cluster
from evenpack.studies.imbalance.step_cost import DEFAULT_COST, find_cost
from evenpack.studies.lengths.reading import published_histogram


def main() -> None:
    parser = measuring.parser_of(__doc__, json_file=True)
    parser.add_argument("--devices", type=int, default=PUBLISHED_DEVICES)
    parser.add_argument("--steps", type=int, default=4000)
    arguments = parser.parse_args()
    histogram = published_histogram(PUBLISHED_LENGTHS)
    packing = pack(histogram, "longest_pack_first", pack_length=histogram.longest)
    whole = find_cost(DEFAULT_COST)
    attention = replace(whole, constant=0.0, per_step=0.0)
    options = ClusterOptions(batch=32, steps=arguments.steps)
    costs = {"tokens": replace(attention, per_squared_length=0.0), "attention": attention, "fixed": whole}
    report = {"lengths": PUBLISHED_LENGTHS, "cost_model": whole.name, "steps": arguments.steps} | {
        name: asdict(
            fit_noise(
                make_cluster(histogram, packing, cost=cost, options=options),
                PUBLISHED_CLUSTER,
                devices=arguments.devices,
            )
        )
        for name, cost in costs.items()
    }
    measuring.write_report(report, arguments.json)
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
