"""`samestep plan` says the derived numbers and trains nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from samestep.cli.main import main

TASK = """
import torch
from torch import nn
from samestep import Task

class Nine(Task):
    batch_size = 8
    def model(self): return nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    def data(self): return torch.randn(9, 3), torch.randn(4, 3)
    def loss(self, model, batch): raise AssertionError("plan trains nothing")
    def evaluate(self, model, batch): raise AssertionError
"""


def plan(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["plan", *arguments]) == 0
    return " ".join(capsys.readouterr().out.replace("│", " ").split())


def test_a_plan_names_windows_shares_and_the_tail(capsys: pytest.CaptureFixture[str]) -> None:
    text = plan(capsys, "digits", "--nproc", "3")
    assert "1437 samples = 22 windows of 64 + a tail of 29; 4 micro-batches of 16 a window" in text
    assert "20 epochs of 23 windows: 460 updates" in text
    assert "rank 2: 0 micro-batches, 0 samples" in text


def test_a_tail_that_batchnorm_cannot_take_is_a_warning(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "task.py"
    file.write_text(TASK)
    assert "BatchNorm cannot" in plan(capsys, f"{file}:Nine")
    text = plan(capsys, f"{file}:Nine", "--drop-last")
    assert "BatchNorm" not in text
    assert "1 of 9 samples dropped" in text


def test_the_exact_exchange_states_its_memory(capsys: pytest.CaptureFixture[str]) -> None:
    assert "exact exchange 77.95 KiB more (2 gradients)" in plan(capsys, "digits", "--exchange", "exact")


def test_more_ranks_than_micro_batches_are_an_error_of_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "digits", "--nproc", "5", "--micro-batch-size", "16"]) == 1
    assert "got 5 ranks for windows of 4 micro-batch(es)" in capsys.readouterr().err
