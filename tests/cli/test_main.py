"""The `samestep` command: fast help, the nearest right word, errors in one line, exit codes."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
import types

import pytest

from samestep import __version__
from samestep.cli.main import VERBS, main
from samestep.errors import ConfigError

COMMAND = [sys.executable, "-m", "samestep"]


def verb(monkeypatch: pytest.MonkeyPatch, run: object) -> None:
    """Make `samestep probe` do `run`."""
    module = types.ModuleType("probe_verb", "Probe.")
    module.EXAMPLES = "examples:\n  samestep probe"  # type: ignore[attr-defined]
    module.run = run  # type: ignore[attr-defined]

    def add_arguments(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--precision", choices=("fp32", "bf16", "fp16"))
        parser.add_argument("--batch-size", type=int)

    module.add_arguments = add_arguments  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "probe_verb", module)
    monkeypatch.setitem(VERBS, "probe", ("probe_verb", "a probe"))


@pytest.mark.parametrize("words", [["--help"], *[[name, "--help"] for name in VERBS]])
def test_help_is_fast_has_examples_and_imports_no_torch(words: list[str]) -> None:
    code = "import sys; from samestep.cli.main import main\ntry: main(sys.argv[1:])\nfinally: print('torch' in sys.modules)"
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        result = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True)
        seconds.append(time.perf_counter() - start)
    assert result.returncode == 0
    assert "examples:\n" in result.stdout
    assert result.stdout.endswith("False\n")
    assert min(seconds) < 0.3


def test_the_version_is_the_packages(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out == f"samestep {__version__}\n"


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["lanch"], "did you mean launch?"),
        (["--verison"], "did you mean --version?"),
        (["launch", "--nporc", "2", "x.py"], "did you mean --nproc?"),
        (["probe", "--presision", "bf16"], "did you mean --precision?"),
        (["probe", "--batchsize=3"], "did you mean --batch-size?"),
        (["probe", "--precision", "bf61"], "did you mean bf16?"),
    ],
)
def test_a_wrong_word_is_answered_with_the_nearest_right_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: list[str], hint: str
) -> None:
    verb(monkeypatch, lambda arguments: 0)
    with pytest.raises(SystemExit) as caught:
        main(words)
    assert caught.value.code == 2
    assert capsys.readouterr().err.rstrip().endswith(hint)


@pytest.mark.parametrize("words", [[], ["xyzzy"], ["probe", "--zzz"], ["probe", "--prec", "bf16"]])
def test_wrong_usage_exits_with_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: list[str]
) -> None:
    verb(monkeypatch, lambda arguments: 0)
    with pytest.raises(SystemExit) as caught:
        main(words)
    assert caught.value.code == 2
    assert "usage: samestep" in capsys.readouterr().err


def test_a_verbs_exit_code_is_the_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    verb(monkeypatch, lambda arguments: arguments.batch_size)
    assert main(["probe", "--batch-size", "7"]) == 7


def refuse(arguments: argparse.Namespace) -> int:
    error = ConfigError("got 1", "it is 2", "pass 2\nor more")
    error.add_note("in window 3")
    raise error


def test_an_error_is_one_line_and_exit_code_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("SAMESTEP_TRACEBACK", raising=False)
    verb(monkeypatch, refuse)
    assert main(["probe"]) == 1
    assert capsys.readouterr().err == "samestep: error: got 1; it is 2; pass 2 or more in window 3\n"


def test_the_whole_traceback_can_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SAMESTEP_TRACEBACK", "1")
    verb(monkeypatch, refuse)
    with pytest.raises(ConfigError):
        main(["probe"])


def interrupt(arguments: argparse.Namespace) -> int:
    raise KeyboardInterrupt


def test_ctrl_c_exits_with_130(monkeypatch: pytest.MonkeyPatch) -> None:
    verb(monkeypatch, interrupt)
    assert main(["probe"]) == 130


def test_a_verb_whose_module_is_missing_does_not_break_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    verb(monkeypatch, lambda arguments: 0)
    monkeypatch.setitem(VERBS, "broken", ("samestep.cli.no_such_module", "none"))
    assert main(["probe"]) == 0


def test_a_reader_that_goes_away_is_no_error() -> None:
    read, write = os.pipe()
    os.close(read)
    result = subprocess.run([*COMMAND, "doctor"], stdout=write, stderr=subprocess.PIPE, text=True)
    os.close(write)
    assert (result.returncode, result.stderr) == (141, "")
