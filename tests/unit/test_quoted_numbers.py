"""The numbers by which a reader decides are those of committed results, as they are rounded on the page.

README's order hash and costs are compared by the test that runs its lines.
"""

import json
from typing import Any

import pytest
from repository import ROOT


def result(name: str) -> Any:
    return json.loads((ROOT / f"benchmarks/results/{name}.json").read_text("utf-8"))


def packs_over_padding() -> float:
    """Returns the speed-up of BERT-large's packs on one H100, uncompiled: the median of the rounds' ratios."""
    measured = result("h100_2026-11-27_C")["results"]["throughput_bert_large_phase2_sprint_layouts"]
    return measured["ratio_of_promised_speed_up"] * measured["layouts"][0]["sequences_per_pack"]


def gpt2_tokens_per_second() -> float:
    row = result("h100_2026-11-27_A_whole_tiles")["results"]["throughput_gpt2_small_compiled"]["layouts"][0]
    return row["tokens_per_second"]["median"]


def lost_on_64_gpus() -> float:
    """Returns what un-padding by arrival loses to waiting on 64 GPUs, in %, by the public logs of 8 A100."""
    rows = result("public_mlperf_bert_logs")["systems"]["dgxa100_ngc20.06_pytorch"]["forecast"]["rows"]
    return 100 * (1 - next(row for row in rows if row["devices"] == 64)["estimates"]["normal"]["expected"])


def simulated(layout: str, policy: str) -> float:
    """Returns the speed-up over padding on 2,048 devices, BERT-large."""
    rows = result("imbalance_wikipedia_512_estimate_2026-11-29")["simulation"]["rows"]
    key = (layout, policy, False, 2048)
    return next(r["speed_up"] for r in rows if (r["layout"], r["policy"], r["dense"], r["devices"]) == key)


def packs_of_wikipedia() -> float:
    key = ("wikipedia_512", None, "cutting_stock")
    rows = result("packing_cpu_2026-11-21")
    return next(row["packs"] for row in rows if (row["histogram"], row["depth"], row["algorithm"]) == key)


def packed_less_unpacked() -> float:
    """Returns the difference of held-out losses of a small BERT, ten seeds, in nats per masked token."""
    rows = result("equivalence_mini_ten_seeds_cpu_2026-11-26")["comparison"]["rows"]
    return next(row for row in rows if row["arm"] == "packed")["difference"]["mean"]


def rate_of_the_loader() -> float:
    return result("peers_loaders_wiki_cpu_2026-11-26")["loaders"]["evenpack"]["tokens_per_cpu_second"] / 1e6


def steps_to_name_a_slow_rank() -> float:
    rows = result("slow_ranks_cpu_2026-11-26")["slowed"]
    return next(row for row in rows if row["slowdown"] == 0.2)["median_delay"]


@pytest.mark.parametrize(
    ("page", "words", "value"),
    [
        ("README.md", "{:.2f} times as fast as pad", packs_over_padding()),
        ("docs/gpu.md", "packs were {:.2f} times as fast as padding", packs_over_padding()),
        ("docs/gpu.md", "| {:,.0f} |", gpt2_tokens_per_second()),
        ("docs/imbalance.md", "| 64 | {:.1f} (", lost_on_64_gpus()),
        ("docs/imbalance.md", "{:.3f} on 2,048; waits 25 %", simulated("unpadded", "arrival")),
        ("docs/packing.md", "| wikipedia_512 | none | {:,.0f} | 8,135,727 |", packs_of_wikipedia()),
        ("docs/equivalence.md", "nats per masked token ({:.4f}, 95 % interval", packed_less_unpacked()),
        ("docs/peers.md", "| `evenpack.Loader` | 100.0 | {:.1f} |", rate_of_the_loader()),
        ("docs/runs_compared.md", "20 % was named after {:.0f} steps in the median", steps_to_name_a_slow_rank()),
    ],
)
def test_a_number_of_a_page_is_that_of_its_result(page: str, words: str, value: float) -> None:
    assert words.format(value) in " ".join((ROOT / page).read_text("utf-8").split())
