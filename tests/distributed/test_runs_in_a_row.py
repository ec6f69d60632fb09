"""Several runs one after the other in one process, under a launcher whose store outlives each."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPT = """
import samestep
for number in range(3):
    with samestep.Run(precision="fp32", progress=False, timeout_s=30) as run:
        run.print(number, run.mean(float(run.rank)))
"""


def test_three_runs_in_a_row_under_one_launcher(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, "-m", "samestep", "launch", "-n", "2", "script.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["0 0.5", "1 0.5", "2 0.5"]
