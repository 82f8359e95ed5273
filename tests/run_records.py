"""What runs say of themselves in run.json."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from evenpack.engine.reporting.run_record import DataIdentity, RunRecord, StartRecord

DATA = DataIdentity(fingerprint="f" * 32, tokenizer="t" * 32, vocabulary_size=256, pack_length=64, sources=("wiki",))


def start(**values: Any) -> StartRecord:
    """Returns a start on two devices, with other values than usual if they are given."""
    software = {"commit": "abc123", "evenpack": "0.1", "torch": "2"}
    usual = {"steps_done": 0, "ranks": 2, "device": "H100", "date": "2026-11-22T10:00:00"}
    return StartRecord.model_validate(usual | software | values)


def run_record(
    *starts: StartRecord, data: DataIdentity = DATA, config: Mapping[str, Any] = MappingProxyType({})
) -> RunRecord:
    """Returns the record of a run that was started so, by default once."""
    return RunRecord(config={"run": {"name": "one"}, **config}, data=data, starts=starts or (start(),))
