"""What a person sees: lines on standard error, what they printed on standard output."""

from __future__ import annotations

import math
from typing import Any

import pytest

from samestep.monitor.console import Display
from samestep.monitor.record import Record


def record(step: int, **values: Any) -> Record:
    numbers = {"epoch": 0, "window": step - 1, "step": step, "micro_batches": 1, "lr": [0.1], "seconds": 0.1}
    return Record(**{**numbers, "data_seconds": 0.0, "loss": 1.5, "samples": 8, **values})


@pytest.mark.parametrize(("log_every", "lines"), [(1, 6), (2, 3), (4, 1), (0, 0)])
def test_one_line_each_so_many_windows(capsys: pytest.CaptureFixture[str], log_every: int, lines: int) -> None:
    display = Display(True, log_every)
    for step in range(1, 7):
        display.window(record(step))
    display.close()
    out, err = capsys.readouterr()
    assert out == ""
    assert len(err.splitlines()) == lines


def test_a_line_has_place_loss_rate_and_total(capsys: pytest.CaptureFixture[str]) -> None:
    display = Display(True, 1)
    display.num_windows = 40
    display.window(record(3, loss=math.nan))
    err = capsys.readouterr().err
    assert "epoch 0 window 3/40  loss nan  lr 0.1" in err
    assert "samples/s" in err


def test_a_disabled_display_shows_only_what_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    display = Display(False, 1)
    display.window(record(1))
    display.note("not this")
    display.print("this", 3, None)
    display.close()
    assert capsys.readouterr() == ("this 3 None\n", "")


def test_square_brackets_are_text_and_no_markup(capsys: pytest.CaptureFixture[str]) -> None:
    display = Display(True, 1)
    display.print("[bold]x[/bold]")
    display.note("a [/red] b")
    assert capsys.readouterr() == ("[bold]x[/bold]\n", "a [/red] b\n")


def test_a_table_survives_brackets(capsys: pytest.CaptureFixture[str]) -> None:
    Display(False, 0).table("end", [("loss", "1.0"), ("path", "/tmp/x [1]")])
    out = capsys.readouterr().out
    assert "loss" in out
    assert "/tmp/x [1]" in out
