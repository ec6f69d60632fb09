"""What the README and the pages in docs/ show works as it stands."""

from __future__ import annotations

import os
import re
import runpy
import shlex
import sys
from pathlib import Path

import pytest

import samestep
from samestep.cli.main import VERBS
from samestep.config import RunConfig
from samestep.testing import run_ranks

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def run_block(directory: str) -> str:
    """Run the README's Python block in `directory`; the ledger's last line but one, before its end."""
    os.chdir(directory)
    (block,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    exec(compile(block, "README.md", "exec"), {"__name__": "__main__"})  # noqa: S102
    return (Path(directory) / "runs/readme/ledger.jsonl").read_text().splitlines()[-2]


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


PAGES = [*sorted((ROOT / "docs").rglob("*.md")), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]


@pytest.mark.skipif(sys.version_info >= (3, 13), reason="argparse lays its help out differently from 3.13 on")
def test_the_page_of_the_command_line_is_what_help_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    page = runpy.run_path(str(ROOT / "docs/make_cli.py"))["page"]
    assert page() == (ROOT / "docs/cli.md").read_text(), "run: python docs/make_cli.py"


def test_every_exception_and_verb_has_its_section() -> None:
    errors = (ROOT / "docs/errors.md").read_text()
    assert [name for name in samestep.__all__ if name.endswith("Error") and f"## {name}" not in errors] == []
    cli = (ROOT / "docs/cli.md").read_text()
    assert [verb for verb in VERBS if f"## `samestep {verb}`" not in cli] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_files_and_settings_of_a_page_exist(page: Path) -> None:
    text = page.read_text()
    for target in re.findall(r"\]\(([^)#]+)\)", text):
        assert target.startswith("https:") or (page.parent / target).exists(), target
    for path in re.findall(r"`((?:tests|docs|examples|benchmarks|src)/[\w/.]+)`", text):
        assert (ROOT / path).exists(), path
    for settings in re.findall(r"\bRun\((\w+)=", text):
        assert settings in RunConfig.__dataclass_fields__, settings
    for name in re.findall(r"\bsamestep\.([A-Z]\w+|move|memory_report|train_one_epoch)\b", text):
        assert hasattr(samestep, name), name
    for name in re.findall(r"\brun\.([a-z_]+)\b", text):
        assert hasattr(samestep.Run, name) or name in ("device", "policy", "world", "epoch"), f"run.{name}"
    for name in re.findall(r"\bwindow\.([a-z_]+)\b", text):
        assert hasattr(samestep.Window, name) or name in ("share", "number", "epoch", "num_micro_batches", "py"), name
