"""The ledger: one valid line a window, whatever happened."""

from __future__ import annotations

import json
import math
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from samestep.monitor.ledger import Ledger, read_ledger
from samestep.monitor.record import Record
from samestep.testing import RanksFailed, run_ranks
from tests.cases.helpers import Weight, quiet_run


def record(step: int, **values: Any) -> Record:
    return Record(
        **{
            "epoch": 0,
            "window": step - 1,
            "step": step,
            "micro_batches": 1,
            "lr": [0.1],
            "seconds": 0.0,
            "data_seconds": 0.0,
            **values,
        }
    )


def strictly(text: str) -> Any:
    """Parse as JSON without NaN and Infinity, which Python's reader would take."""

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is not JSON")

    return json.loads(text, parse_constant=refuse)


def test_numbers_that_are_not_finite_are_words_and_the_line_is_json(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "l", None)
    ledger.window(record(1, loss=math.nan, grad_norm=math.inf, lr=[-math.inf, 0.5]))
    ledger.event("log", value={"deep": [math.nan]})
    ledger.close()
    window, event = (strictly(line) for line in (tmp_path / "l").read_text().splitlines())
    assert (window["loss"], window["grad_norm"], window["lr"]) == ("nan", "inf", ["-inf", 0.5])
    assert event["value"] == {"deep": ["nan"]}
    assert (window["kind"], event["kind"]) == ("window", "log")


def test_a_line_is_in_the_file_as_soon_as_it_is_written(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "l", None)
    ledger.window(record(1))
    assert len(read_ledger(tmp_path / "l")) == 1
    ledger.close()


def test_a_restart_drops_the_steps_after_its_checkpoint_and_a_line_that_was_cut(tmp_path: Path) -> None:
    path = tmp_path / "l"
    ledger = Ledger(path, None)
    for step in range(1, 6):
        ledger.window(record(step))
    ledger.close()
    with path.open("a") as file:
        file.write('{"kind": "window", "ste')
    assert [line["step"] for line in read_ledger(path)] == [1, 2, 3, 4, 5]
    ledger = Ledger(path, 3)
    ledger.window(record(4, loss=2.0))
    ledger.close()
    lines = [strictly(line) for line in path.read_text().splitlines()]
    assert [line["step"] for line in lines if line["kind"] == "window"] == [1, 2, 3, 4]
    (lost,) = (line for line in lines if line["kind"] == "lost")
    assert (lost["windows"], lost["last_step"]) == (2, 5)


def test_a_restart_without_an_old_file_begins_one(tmp_path: Path) -> None:
    Ledger(tmp_path / "l", 7).close()
    assert read_ledger(tmp_path / "l") == []


def killed(directory: str, kill_at: int | None) -> int:
    with quiet_run(directory, save_every=2) as run:
        net = Weight()
        model, _ = run.prepare(net, torch.optim.SGD(net.parameters(), lr=0.01))
        train = run.loader(torch.arange(14.0), batch_size=2, micro_batch_size=1, shuffle=True)
        for _ in run.epochs(2):
            for window in train:
                for (x,) in window:
                    window.backward(model(x).mean())
                window.step()
                if run.step == kill_at and run.is_main:
                    os.kill(os.getpid(), signal.SIGKILL)
        return run.step


@pytest.mark.parametrize("ranks", [(1, 1), (2, 1)])
def test_after_kills_and_restarts_each_window_has_one_line(tmp_path: Path, ranks: tuple[int, int]) -> None:
    run_ranks(killed, 1, str(tmp_path / "whole"), None)
    for number, kill_at in zip((*ranks, 1), (3, 10, None), strict=True):
        try:
            run_ranks(killed, number, str(tmp_path / "parts"), kill_at)
        except RanksFailed as e:
            assert "SIGKILL" in str(e)
            assert kill_at is not None
    whole, parts = (
        [line for line in read_ledger(tmp_path / name / "ledger.jsonl") if line["kind"] == "window"]
        for name in ("whole", "parts")
    )
    assert [line["step"] for line in parts] == list(range(1, 15))
    for name in ("digest", "epoch", "window", "samples", "weight", "updates"):
        assert [line[name] for line in parts] == [line[name] for line in whole]
    assert [line["loss"] for line in parts] == pytest.approx([line["loss"] for line in whole], rel=1e-5)


def nan_window(directory: str) -> None:
    with quiet_run(directory, nonfinite="skip") as run:
        net = Weight()
        model, _ = run.prepare(net, torch.optim.SGD(net.parameters(), lr=0.01))
        for window in run.loader(torch.tensor([1.0, float("nan"), 3.0]), batch_size=1):
            for (x,) in window:
                window.backward(model(x).mean())
            window.step()
        run.log(bad=float("nan"))


def test_a_nan_loss_is_valid_json_and_marked_as_skipped(tmp_path: Path) -> None:
    nan_window(str(tmp_path))
    lines = [strictly(line) for line in (tmp_path / "ledger.jsonl").read_text().splitlines()]
    windows = [line for line in lines if line["kind"] == "window"]
    assert [(line["skipped"], line["updates"]) for line in windows] == [(False, 1), (True, 1), (False, 2)]
    assert windows[1]["loss"] == "nan"
    assert next(line for line in lines if line["kind"] == "log")["bad"] == "nan"
