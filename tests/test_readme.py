"""What the README shows works as it stands."""

from __future__ import annotations

import os
import re
import shlex
from pathlib import Path

import pytest

from samestep.testing import run_ranks

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def run_block(directory: str) -> str:
    """Run the README's Python block in `directory`; the ledger's last line."""
    os.chdir(directory)
    (block,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    exec(compile(block, "README.md", "exec"), {"__name__": "__main__"})  # noqa: S102
    return (Path(directory) / "runs/readme/ledger.jsonl").read_text().splitlines()[-1]


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_loop_runs_as_it_is_printed(ranks: int, tmp_path: Path) -> None:
    for last in run_ranks(run_block, ranks, str(tmp_path)):
        assert '"checkpoint"' in last


def test_every_command_of_the_table_names_tests_that_exist() -> None:
    commands = re.findall(r"`\$P (.*?)`", README)
    assert len(commands) == 10
    for command in commands:
        words = shlex.split(command)
        for word in words:
            if word.startswith("tests"):
                assert (ROOT / word).exists(), word
        if "-k" in words:
            name = words[words.index("-k") + 1]
            text = "".join((ROOT / word).read_text() for word in words if word.endswith(".py"))
            assert f"def test_{name}" in text or name in text
