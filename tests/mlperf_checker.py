"""MLPerf's own compliance checker on a log, by the command of docs/bert.md."""

import subprocess
import sys
from pathlib import Path

from repository import ROOT

_LINE = "python -m mlperf_logging.compliance_checker "


def verdict(log: Path) -> tuple[bool, str]:
    """Returns whether a log passes, with what the checker says."""
    (line,) = [line for line in (ROOT / "docs/bert.md").read_text("utf-8").splitlines() if line.startswith(_LINE)]
    *options, _ = line.removeprefix(_LINE).split()
    command = [sys.executable, "-m", "mlperf_logging.compliance_checker", *options, str(log)]
    done = subprocess.run(command, cwd=log.parent, capture_output=True, text=True, check=False)
    said = done.stdout + done.stderr
    assert done.returncode in (0, 1), said
    assert "Traceback" not in said, said
    return done.returncode == 0, said
