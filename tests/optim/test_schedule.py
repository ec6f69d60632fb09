"""Schedules advance once for each applied update, or epoch, and never because of a skip."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, OneCycleLR, ReduceLROnPlateau, SequentialLR, StepLR

import samestep
from samestep.optim.schedule import Schedules
from samestep.testing import run_ranks
from tests.cases.helpers import Weight, quiet_run


def halving(optimizer: Any) -> LambdaLR:
    return LambdaLR(optimizer, lambda update: 0.5**update)


def skipping(every: str, fused: bool) -> tuple[list[float], int]:
    rates: list[float] = []
    data = torch.ones(6)
    data[2] = float("nan")
    with quiet_run(nonfinite="skip") as run:
        net = Weight()
        optimizer = torch.optim.SGD(net.parameters(), lr=1.0, fused=fused)
        model, _, schedule = run.prepare(net, optimizer, halving(optimizer), schedule_every=every)
        run._engine.on_record.append(lambda record: rates.extend(record.lr))
        for _ in run.epochs(1):
            for window in run.loader(data, batch_size=2, micro_batch_size=1):
                for (x,) in window:
                    window.backward(model(x).mean())
                window.step()
        return rates, schedule.last_epoch


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(
    ("every", "rates", "end"), [("window", [1, 0.5, 0.5], 2), ("epoch", [1, 1, 1], 1), ("manual", [1, 1, 1], 0)]
)
def test_a_skipped_window_holds_the_rate_on_all_ranks(
    fused: bool, ranks: int, every: str, rates: list, end: int
) -> None:
    assert run_ranks(skipping, ranks, every, fused) == [(pytest.approx(rates), end)] * ranks


def optimizer() -> torch.optim.Optimizer:
    return torch.optim.SGD([torch.nn.Parameter(torch.ones(()))], lr=1.0)


def test_an_unknown_moment_is_refused() -> None:
    with pytest.raises(samestep.ConfigError, match="window, epoch, manual"):
        Schedules().add(halving(optimizer()), "step")  # type: ignore[arg-type]


def test_a_schedule_that_someone_else_stepped_is_noticed_at_the_next_advance() -> None:
    schedules, mine = Schedules(), halving(optimizer())
    schedules.add(mine, "window")
    schedules.advance("window")
    schedules.advance("epoch")
    assert mine.last_epoch == 1
    mine.step()
    with pytest.raises(samestep.WindowError, match="was called by the loop"):
        schedules.advance("window")


def test_a_plateau_schedule_is_manual() -> None:
    schedules = Schedules()
    with pytest.raises(samestep.ConfigError, match="manual"):
        schedules.add(ReduceLROnPlateau(optimizer()), "epoch")
    schedules.add(ReduceLROnPlateau(optimizer()), "manual")
    schedules.advance("window")
    assert len(schedules) == 1


def test_replacing_by_the_same_schedule_keeps_its_place() -> None:
    schedules, mine = Schedules(), halving(optimizer())
    schedules.replace(mine)
    schedules.advance("window")
    schedules.replace(mine)
    schedules.advance("window")
    assert mine.last_epoch == 2
    schedules.replace(None)
    schedules.advance("window")
    assert (mine.last_epoch, list(schedules)) == (2, [])


def restart(directory: str, make: Any, epochs: int) -> list[float]:
    with quiet_run(directory) as run:
        net = Weight()
        opt = torch.optim.SGD(net.parameters(), lr=0.4, momentum=0.5)
        model, *_ = run.prepare(net, opt, make(opt))
        train = run.loader(torch.ones(8), batch_size=2, shuffle=True)
        rates = []
        for _ in run.epochs(epochs):
            for window in train:
                rates.append(opt.param_groups[0]["lr"])
                for (x,) in window:
                    window.backward(model(x).mean())
                window.step()
        return rates


def sequence(opt: Any) -> SequentialLR:
    return SequentialLR(opt, [StepLR(opt, 2, gamma=0.5), CosineAnnealingLR(opt, 5)], milestones=[5])


@pytest.mark.parametrize("make", [sequence, lambda opt: OneCycleLR(opt, 0.4, total_steps=13), halving])
def test_a_restart_continues_any_schedule(tmp_path: Any, make: Any) -> None:
    whole = restart(str(tmp_path / "whole"), make, 3)
    parts = restart(str(tmp_path / "parts"), make, 1) + restart(str(tmp_path / "parts"), make, 3)
    assert parts == whole


def test_a_restart_with_another_schedule_is_refused_naming_what_changed(tmp_path: Any) -> None:
    restart(str(tmp_path), lambda opt: OneCycleLR(opt, 0.4, total_steps=13), 1)
    with pytest.raises(samestep.ConfigError, match="total_steps was 13, is 20"):
        restart(str(tmp_path), lambda opt: OneCycleLR(opt, 0.4, total_steps=20), 2)
