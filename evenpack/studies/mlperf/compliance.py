"""The command `evenpack mlperf check`: MLPerf's own compliance checker on a log."""

import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from evenpack.engine.reporting.config import require_mlperf_logging
from evenpack.errors import RunError
from evenpack.studies.mlperf.results import MlperfResult, read_result

RULESET = "4.1.0"
"""The last ruleset but one that had BERT, which 5.0 left unchanged."""

_PASSED = "SUCCESS"


@dataclass(frozen=True, kw_only=True)
class Compliance:
    """The checker's result for a log."""

    log: Path
    ruleset: str
    passed: bool
    messages: str
    """Messages of the checker; empty if there are none."""
    result: MlperfResult


def check_log(log: Path) -> Compliance:
    """Runs the compliance checker of the package mlperf-logging, for the division and benchmark that the log names.

    Raises: ConfigError if the package is not installed; DataError if the file is not an MLPerf log; RunError if the
    checker itself fails.
    """
    require_mlperf_logging("the compliance checker")
    result = read_result(log)
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "checker.log"
        arguments = ["--usage", "training", "--ruleset", RULESET, "--log_output", str(output), str(log.resolve())]
        done = subprocess.run(
            [sys.executable, "-m", "mlperf_logging.compliance_checker", *arguments],
            capture_output=True,
            text=True,
            check=False,
        )
        written = output.read_text(encoding="utf-8") if output.exists() else ""
    if done.returncode not in (0, 1) or "Traceback" in done.stderr or not written:
        raise RunError(f"MLPerf's compliance checker failed on {log}:\n{done.stderr.strip()}")
    lines = [line for line in written.splitlines() if not line.startswith("INFO")]
    messages = "\n".join(lines).removesuffix("ERROR - FAILED").strip()
    return Compliance(log=log, ruleset=RULESET, passed=done.returncode == 0, messages=messages, result=result)
