"""`samestep train`: a task from a file, restarts, and errors of one line, in one process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from samestep.cli.main import main

TASK = """
import torch
from torch import nn
from samestep import Task

class Tiny(Task):
    epochs = 2
    batch_size = 4
    def model(self): return nn.Linear(3, 1)
    def data(self):
        data = torch.arange(30, dtype=torch.float32).reshape(10, 3) / 30
        return data, data[:3]
    def loss(self, model, batch): return model(batch[0]).square().mean(), len(batch[0])
    def evaluate(self, model, batch): return {"size": (model(batch[0]).abs().mean(), len(batch[0]))}
"""


@pytest.fixture
def task(tmp_path: Path) -> str:
    (tmp_path / "task.py").write_text(TASK)
    return f"{tmp_path / 'task.py'}:Tiny"


def lines(directory: Path, kind: str) -> list[dict]:
    text = (directory / "ledger.jsonl").read_text()
    return [line for line in map(json.loads, text.splitlines()) if line["kind"] == kind]


def test_a_task_from_a_file_trains_and_leaves_ledger_and_checkpoints(task: str, tmp_path: Path, capsys) -> None:
    directory = tmp_path / "run"
    assert main(["train", task, "--run-dir", str(directory), "--quiet", "--precision", "fp32"]) == 0
    assert "2 epochs" in capsys.readouterr().out or lines(directory, "window")
    assert [line["step"] for line in lines(directory, "window")] == [1, 2, 3, 4, 5, 6]
    assert [line["samples"] for line in lines(directory, "window")] == [4, 4, 2] * 2
    assert sorted(path.name for path in (directory / "checkpoints").iterdir()) == ["step-00000003", "step-00000006"]


def test_a_finished_run_says_so_and_evaluates(task: str, tmp_path: Path, capsys) -> None:
    arguments = ["train", task, "--run-dir", str(tmp_path / "run"), "--precision", "fp32"]
    assert main(arguments) == 0
    capsys.readouterr()
    assert main([*arguments, "--resume", "must"]) == 0
    out, err = capsys.readouterr()
    assert "nothing left to train: 2 of 2 epochs are done" in err
    assert "size" in out
    assert len(lines(tmp_path / "run", "window")) == 6, "no line twice"


def test_another_schedule_length_is_refused_before_it_continues(task: str, tmp_path: Path, capsys) -> None:
    arguments = ["train", task, "--run-dir", str(tmp_path / "run"), "--quiet"]
    assert main(arguments) == 0
    assert main([*arguments, "--epochs", "3"]) == 1
    assert "total_steps was 7, is 10" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nothing"], "a task is one of bytes_lm, digits, or file.py:ClassName"),
        (["nowhere.py:Task"], "there is no file nowhere.py"),
        (["digits", "--batch-size", "0"], "got batch_size=0"),
        (["digits", "--micro-batch-size", "100"], "micro_batch_size=100 with batch_size=64"),
        (["digits", "--seed", "-1"], "got seed=-1"),
        (["digits", "--workers", "-1"], "got num_workers=-1"),
        (["digits", "--device", "cuda:7"], "CUDA device(s)"),
        (["digits", "--resume", "must"], "no checkpoint in"),
    ],
)
def test_what_cannot_be_obeyed_is_refused_in_one_line(
    arguments: list[str], message: str, tmp_path: Path, capsys, monkeypatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["train", *arguments, "--quiet"]) == 1
    err = capsys.readouterr().err.strip()
    assert message in err
    assert len(err.splitlines()) == 1
