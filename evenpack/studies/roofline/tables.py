"""`evenpack study roofline` as tables."""

from rich.console import RenderableType

from evenpack import console
from evenpack.studies.roofline.study import PartRow, Roofline

_MOST_NAMED = 3
"""Parts that are named as those that hold a goal back."""


def roofline_tables(found: Roofline) -> list[RenderableType]:
    """Returns tables of the parts and the fusions, between what the figures are of and what they say of the goal."""
    head = (
        f"ESTIMATE, not measured: {found.run}, {found.model}, bfloat16, on one of {found.devices} x {found.device}; "
        f"{found.micro_batches} x {found.slots_per_micro_batch:,} slots per step"
    )
    return [
        console.text(head),
        console.table([_part(row) for row in found.parts] + [_launches(found)], title="Parts of a step"),
        console.table(_rates(found), title="Real tokens/s of one device"),
        console.text(verdict(found)),
        *(console.text(f"Assumed: {line}") for line in found.assumptions),
    ]


def verdict(found: Roofline) -> str:
    """Returns what holds the step back, and whether the goal is within the estimate."""
    most = ", ".join(f"{name} ({1e3 * seconds:.3g} ms)" for name, seconds in found.excesses[:_MOST_NAMED])
    above = f"Most above the floor: {most}."
    if found.is_host_bound:
        above += " The host issues kernels more slowly than the device runs them."
    if found.goal is None:
        return above
    wanted = 1e3 * found.tokens_per_step / found.goal
    goal = f"The goal of {found.goal:,.0f} tokens/s allows {wanted:.4g} ms a step: "
    if found.is_reached:
        return f"{goal}the estimate is within it. {above}"
    if found.reached_with is not None:
        return f"{goal}the estimate is within it with all fusions up to '{found.reached_with}'. {above}"
    if found.goal > found.floor_tokens_per_second:
        return f"{goal}that is less than the floor, so it cannot be reached. {above}"
    return f"{goal}the estimate is above it with all fusions. {above}"


def _part(row: PartRow) -> dict[str, str]:
    return {
        "part": row.part,
        "TFLOP": f"{row.flops / 1e12:.4g}",
        "GB": f"{row.bytes / 1e9:.4g}",
        "kernels": f"{row.kernels:,}",
        "floor, ms": f"{1e3 * row.floor_seconds:.4g}",
        "estimate, ms": f"{1e3 * row.expected_seconds:.4g}",
        "all fused, ms": f"{1e3 * row.fused_seconds:.4g}",
    }


def _launches(found: Roofline) -> dict[str, str]:
    return {
        "part": "launches",
        "TFLOP": "0",
        "GB": "0",
        "kernels": "0",
        "floor, ms": "0",
        "estimate, ms": f"{1e3 * found.launches_seconds:.4g}",
        "all fused, ms": f"{1e3 * found.fused_launches_seconds:.4g}",
    }


def _rates(found: Roofline) -> list[dict[str, str]]:
    rows = [
        {
            "step": "as it is",
            "tokens/s": f"{found.expected_tokens_per_second:,.0f}",
            "saves alone, ms": "-",
            "kind": f"estimate, MFU {console.percent(found.expected_mfu)}",
        }
    ]
    rows += [
        {
            "step": f"+ {row.fusion}",
            "tokens/s": f"{row.tokens_per_second:,.0f}",
            "saves alone, ms": f"{1e3 * row.saved_seconds:.4g}",
            "kind": "estimate",
        }
        for row in found.fusions
    ]
    floor = {"step": "all fused, at the peaks", "tokens/s": f"{found.floor_tokens_per_second:,.0f}"}
    return [*rows, floor | {"saves alone, ms": "-", "kind": "floor"}]
