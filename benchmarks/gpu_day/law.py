"""The speed-up of un-padding over padding on one device, step by step, beside the law that was inferred for one device.

    python benchmarks/gpu_day/law.py RUN.yaml --out FILE.json [--steps N] [section.key=value ...]

Micro-batches have as many sequences as the run file's have packs, and steps one micro-batch. A step's speed-up is its
sequences/s over the median of padding's, on the same device in the same rounds.
"""

from dataclasses import asdict

import numpy as np

from evenpack.files import write_json
from evenpack.studies.imbalance.extrapolation import PUBLISHED_CLUSTER, single_device_gumbel
from evenpack.studies.statistics.fits import ks_distance
from evenpack.studies.statistics.laws import Gumbel
from gpu_day.stepping import device_name, read_arguments, stepping

_WARMUP = 5
_DEVICES = 8
"""Devices of the published law."""


def main() -> None:
    """Measures both in turn and fits a Gumbel to the steps."""
    given = read_arguments(__doc__, steps=150)
    rates: dict[str, list[float]] = {"unpadded/arrival": [], "padded/arrival": []}
    with stepping(given.config, *rates) as (timer, datasets):
        for number in range(_WARMUP + given.steps):
            for of_form, dataset in zip(rates.values(), datasets, strict=True):
                step = timer.time_step_of(dataset, number)
                if number >= _WARMUP:
                    of_form.append(step.sequences / step.step_seconds)
        device = device_name(timer.world)
    speed_ups = np.array(rates["unpadded/arrival"]) / np.median(rates["padded/arrival"])
    fitted, published = Gumbel.fit(speed_ups), single_device_gumbel(PUBLISHED_CLUSTER, _DEVICES)
    value = {
        "device": device,
        "sequences_per_micro_batch": given.config.training.items_per_micro_batch,
        "padded_sequences_per_second": float(np.median(rates["padded/arrival"])),
        "speed_ups": speed_ups.tolist(),
        "mean": float(speed_ups.mean()),
        "deviation": float(speed_ups.std()),
        "fitted": asdict(fitted),
        "fitted_distance": ks_distance(fitted, speed_ups),
        "published": asdict(published),
        "published_distance": ks_distance(published, speed_ups),
    }
    write_json(given.out, value)
    print({name: one for name, one in value.items() if name != "speed_ups"})


if __name__ == "__main__":
    main()
