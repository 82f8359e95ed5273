"""Defines the units of the numbers in a run file, which `evenpack config explain` shows; and text for messages."""

import re
from dataclasses import dataclass
from typing import Annotated, Any

UNIT_IN_SCHEMA = "unit"
"""The key under which pydantic's JSON schema of a section has the unit of a number."""


@dataclass(frozen=True)
class Unit:
    """Annotates a number with its unit."""

    name: str

    def __get_pydantic_json_schema__(self, schema: Any, handler: Any) -> dict[str, Any]:
        return {**handler(schema), UNIT_IN_SCHEMA: self.name}


Channels = Annotated[int, Unit("channels")]
Checkpoints = Annotated[int, Unit("checkpoints")]
Entries = Annotated[int, Unit("entries")]
Heads = Annotated[int, Unit("heads")]
Layers = Annotated[int, Unit("layers")]
Packs = Annotated[int, Unit("packs")]
Passes = Annotated[int, Unit("passes")]
Positions = Annotated[int, Unit("positions")]
Processes = Annotated[int, Unit("processes")]
Rows = Annotated[int, Unit("rows")]
Sequences = Annotated[int, Unit("sequences")]
Shards = Annotated[int, Unit("shards")]
Slots = Annotated[int, Unit("slots")]
Steps = Annotated[int, Unit("steps")]
Tokens = Annotated[int, Unit("tokens")]

FP32_BYTES, BF16_BYTES = 4, 2
"""Bytes of a number."""
Words = Annotated[int, Unit("words")]
StepNumber = Annotated[int, Unit("step, from 1")]
"""A position in a run, as opposed to a number of steps."""

Epochs = Annotated[float, Unit("epochs")]
Medians = Annotated[float, Unit("medians")]
MeasureValue = Annotated[float, Unit("nats/target, or share")]
Seconds = Annotated[float, Unit("s")]
Share = Annotated[float, Unit("share, 0 to 1")]
TokensPerParameter = Annotated[float, Unit("tokens/parameter")]


def counted(number: int, noun: str) -> str:
    """Returns a number with its noun: "1 rank", "2 ranks"."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")


def visible(text: str) -> str:
    """Returns a text for a terminal: control characters, as a file's name may have them, are written as escapes."""
    return _CONTROLS.sub(lambda found: ascii(found[0])[1:-1], text)
