"""`samestep diff`: exit codes, the table, the JSON file."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from samestep.cli.main import main
from samestep.errors import RunDirError


def ledger(directory: Path, loss: float = 1.0, windows: int = 3) -> str:
    directory.mkdir()
    lines: list[dict[str, Any]] = [{"kind": "start", "step": 0, "world_size": 1, "precision": "fp32"}]
    for step in range(1, windows + 1):
        line = {
            "epoch": 0,
            "window": step - 1,
            "step": step,
            "loss": loss if step == 2 else 1.0,
            "digest": "1",
            "lr": [0.1],
        }
        lines.append({"kind": "window", **line})
    (directory / "ledger.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(directory)


def test_the_same_exits_with_0_and_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diff", ledger(tmp_path / "a"), ledger(tmp_path / "b")]) == 0
    assert "the same in 3 windows" in capsys.readouterr().out


def test_a_difference_exits_with_1_and_shows_place_field_distance_and_cause(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["diff", ledger(tmp_path / "a"), ledger(tmp_path / "b", loss=1.25)]) == 1
    out = capsys.readouterr().out
    for words in (
        "window 1 of epoch 0 (step 2)",
        "loss",
        "1.25",
        "2.0e-01",
        "does not look like rounding",
        "likely cause",
    ):
        assert words in out


def test_rounding_is_called_rounding(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["diff", ledger(tmp_path / "a"), ledger(tmp_path / "b", loss=1.0000001)])
    out = capsys.readouterr().out
    assert "\nlooks like rounding" in out
    assert "1.0000001" in out


def test_the_tolerance_makes_it_the_same(tmp_path: Path) -> None:
    assert main(["diff", ledger(tmp_path / "a"), ledger(tmp_path / "b", loss=1.0000001), "--tolerance", "1e-6"]) == 0


@pytest.mark.parametrize("text", [None, "", "hello\n", '{"kind": "start", "step": 0, "schema": 7}\n'])
def test_an_unreadable_ledger_exits_with_2_after_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str | None
) -> None:
    if text is not None:
        (tmp_path / "bad").write_text(text)
    assert main(["diff", ledger(tmp_path / "a"), str(tmp_path / "bad")]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("samestep diff: error: ")
    assert captured.err.count("\n") == 1
    assert "bad" in captured.err


def test_a_tolerance_that_is_no_fraction_exits_with_2(tmp_path: Path) -> None:
    assert main(["diff", ledger(tmp_path / "a"), ledger(tmp_path / "b"), "--tolerance", "nan"]) == 2


def test_the_whole_traceback_can_be_had(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SAMESTEP_TRACEBACK", "1")
    with pytest.raises(RunDirError):
        main(["diff", str(tmp_path), str(tmp_path)])


def test_the_json_file_holds_what_the_table_shows(tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    assert main(["diff", ledger(tmp_path / "a"), ledger(tmp_path / "b", loss=1.25), "--json", str(file)]) == 1
    result = json.loads(file.read_text())
    assert (result["same"], result["step"], result["windows"], result["windows_same"]) == (False, 2, [3, 3], 1)
    assert result["differences"] == [{"field": "loss", "label": "loss", "a": 1.0, "b": 1.25, "relative": 0.2}]
    assert result["cause"]
    assert result["evidence"]
    assert result["rounding"] is False


def test_infinity_is_a_word_in_the_json_file(tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    main(["diff", ledger(tmp_path / "a"), ledger(tmp_path / "b", loss=float("inf")), "--json", str(file)])
    assert json.loads(file.read_text())["differences"][0]["relative"] == "inf"


def test_json_alone_goes_to_standard_output(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diff", ledger(tmp_path / "a"), ledger(tmp_path / "b"), "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out)["same"] is True


def test_a_json_file_that_cannot_be_written_exits_with_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a = ledger(tmp_path / "a")
    assert main(["diff", a, a, "--json", str(tmp_path / "no" / "out.json")]) == 2
    assert "out.json" in capsys.readouterr().err


def test_names_with_brackets_are_shown_as_they_are(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["diff", ledger(tmp_path / "[bold]a"), ledger(tmp_path / "b", loss=2.0)])
    assert "[bold]a" in capsys.readouterr().out


def test_comparing_needs_no_torch(tmp_path: Path) -> None:
    import subprocess

    a, b = ledger(tmp_path / "a"), ledger(tmp_path / "b", loss=2.0)
    code = "import sys; from samestep.cli.main import main; main(sys.argv[1:]); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code, "diff", a, b], capture_output=True).returncode == 0
