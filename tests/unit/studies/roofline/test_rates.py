"""Rates of devices: published ones come out again, and nothing is faster than a peak."""

import pytest

from evenpack.engine.optimizers.config import AdamWSection
from evenpack.errors import ConfigError
from evenpack.models.common.device_peaks import DEVICE_PEAKS, find_device_peak
from evenpack.models.cost import Work, attention_flops, model_products
from evenpack.models.gpt2.config import Gpt2Config
from evenpack.studies.roofline.estimate import attention_seconds, paper_step
from evenpack.studies.roofline.rates import FLASH_ATTENTION_2_TFLOPS, Rates

H100 = find_device_peak("h100")


@pytest.mark.parametrize(("length", "published"), FLASH_ATTENTION_2_TFLOPS[True].items())
def test_attention_takes_as_long_as_published(length: int, published: float) -> None:
    config = Gpt2Config(kind="gpt2")
    work = Work(slots=8 * length, squared_lengths=8 * length**2, head_slots=0, sequences=0)
    step = paper_step(
        config,
        work,
        vocabulary_size=2,
        max_positions=1024,
        micro_batches=1,
        optimizer=AdamWSection(learning_rate=1e-3),
        zero_stage=0,
        ranks=1,
    )
    seconds = attention_seconds(step, Rates.expected(H100, causal=True))
    # The source counts 3.5 forward passes over half of the square; here a pass counts its diagonal as well.
    counted = 3.5 * attention_flops(model_products(config, vocabulary_size=2), work) * length / (length + 1)
    assert counted / seconds / 1e12 == pytest.approx(published, rel=0.005)


def test_short_sequences_are_less_efficient() -> None:
    rates = Rates.expected(H100, causal=False)
    short, long = ((rates.attention_per_slot + rates.attention_per_pair * length) / length for length in (128, 512))
    assert short > 1.5 * long


@pytest.mark.parametrize(("name", "others"), [("a100", "a100-40gb or a100-80gb"), ("gh200", "another device")])
def test_a_device_of_several_sizes_is_refused_with_those_that_are_known(name: str, others: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} is not known, because the name stands for several; name {others}$"):
        Rates.expected(find_device_peak(name), causal=False)


KNOWN = [device for device in DEVICE_PEAKS if device.memory_bandwidth is not None]


@pytest.mark.parametrize("device", KNOWN, ids=lambda device: device.name)
def test_expected_rates_are_below_the_peaks(device) -> None:
    peak, expected = Rates.peak(device), Rates.expected(device, causal=False)
    assert 0.7 * peak.products < expected.products < 0.9 * peak.products
    assert expected.bandwidth == pytest.approx(0.9 * peak.bandwidth)
    assert 3e11 <= peak.bandwidth < 1e13
    assert 4 * 3 / expected.attention_per_pair < peak.products  # asymptotic rate of attention
