"""Cases C08, C10, C23, C33: what counts as a step for averages and schedules."""

from __future__ import annotations

import pytest
import torch
from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau, StepLR

import samestep
from samestep.testing import run_ranks
from tests.cases.helpers import Weight, quiet_run


def c08(skip_second: bool) -> list[float]:
    with quiet_run(nonfinite="skip") as run:
        net = Weight(1.0)
        model, _ = run.prepare(net, torch.optim.SGD(net.parameters(), lr=1.0))
        ema = run.ema(model, decay=0.9)
        # window 0 takes 0.5 off the weight, window 1 another 0.25; each has two micro-batches
        data = torch.tensor([0.5, 0.5, float("nan") if skip_second else 0.25, 0.25])
        averages = []
        for window in run.loader(data, batch_size=2, micro_batch_size=1):
            for (x,) in window:
                window.backward(model(x).mean())
            window.step()
            averages.append(ema.averages[0].item())
        with ema.applied():
            assert net.w.item() == averages[-1]
        assert net.w.item() == pytest.approx(0.5 if skip_second else 0.25)
        return averages


@pytest.mark.parametrize("ranks", [1, 2])
def test_c08_the_moving_average_advances_once_an_update_and_not_on_a_skipped_one(ranks: int) -> None:
    assert run_ranks(c08, ranks, False) == [pytest.approx([0.95, 0.88])] * ranks
    assert run_ranks(c08, ranks, True) == [pytest.approx([0.95, 0.95])] * ranks


def c10(micro_batch_size: int) -> list[float]:
    with quiet_run() as run:
        net = Weight()
        optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
        warmup = LambdaLR(optimizer, lambda update: min(1.0, (update + 1) / 4))
        model, _, _ = run.prepare(net, optimizer, warmup)
        rates: list[float] = []
        run._engine.on_record.append(lambda record: rates.extend(record.lr))
        for window in run.loader(torch.zeros(32), batch_size=4, micro_batch_size=micro_batch_size):
            for (x,) in window:
                window.backward(model(x).mean())
            window.step()
        return rates


@pytest.mark.parametrize(("ranks", "micro_batch_size"), [(1, 1), (2, 1), (1, 4)])
def test_c10_warm_up_counts_updates_whatever_ranks_and_window(ranks: int, micro_batch_size: int) -> None:
    right = [0.25, 0.5, 0.75, 1, 1, 1, 1, 1]
    assert run_ranks(c10, ranks, micro_batch_size) == [pytest.approx(right)] * ranks


def c23(directory: str, every: str, stops: list[int]) -> list[float]:
    rates = []
    for stop in stops:
        with quiet_run(directory, resume="auto") as run:
            net = Weight()
            optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
            schedule = StepLR(optimizer, step_size=2 if every == "epoch" else 4, gamma=0.1)
            model, _, _ = run.prepare(net, optimizer, schedule, schedule_every=every)
            train = run.loader(torch.zeros(4), batch_size=2)
            for epoch in run.epochs(stop):
                rates.append(optimizer.param_groups[0]["lr"])
                for window in train:
                    for (x,) in window:
                        window.backward(model(x).mean())
                    window.step()
                assert epoch == len(rates) - 1
    return rates


@pytest.mark.parametrize("every", ["epoch", "window"])
def test_c23_the_rate_continues_after_a_restart(tmp_path, every: str) -> None:
    right = [0.1, 0.1, 0.01, 0.01, 0.001, 0.001]
    assert run_ranks(c23, 1, str(tmp_path / "whole"), every, [6]) == [pytest.approx(right)]
    assert run_ranks(c23, 1, str(tmp_path / "parts"), every, [2, 6]) == [pytest.approx(right)]


def test_a_schedule_that_the_loop_steps_as_well_is_refused() -> None:
    with quiet_run() as run:
        net = Weight()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        schedule = StepLR(optimizer, 1)
        model, _, _ = run.prepare(net, optimizer, schedule)
        with pytest.raises(samestep.WindowError, match=r"StepLR\.step\(\) was called by the loop"):
            for window in run.loader(torch.zeros(4), batch_size=2):
                for (x,) in window:
                    window.backward(model(x).mean())
                window.step()
                schedule.step()


def c33() -> tuple[list[float], int]:
    with quiet_run() as run:
        net = Weight()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        plateau = ReduceLROnPlateau(optimizer, factor=0.1, patience=0)
        run.prepare(net, optimizer, plateau, schedule_every="manual")
        mine = [[1.0, 0.9, 0.8], [1.0, 1.2, 1.4]][run.rank]
        rates, best, waited, stopped = [], float("inf"), 0, -1
        for epoch, local in enumerate(mine):
            loss = run.mean(local)
            plateau.step(loss)
            rates.append(optimizer.param_groups[0]["lr"])
            waited = 0 if loss < best else waited + 1
            best = min(best, loss)
            if waited > 1 and stopped < 0:
                stopped = epoch
        return rates, stopped


def test_c33_a_decision_on_the_global_mean_is_the_same_on_all_ranks() -> None:
    assert run_ranks(c33, 2) == [(pytest.approx([0.1, 0.01, 0.001]), 2)] * 2


def test_a_plateau_schedule_is_refused_where_it_would_step_without_its_metric() -> None:
    with quiet_run() as run:
        net = Weight()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        with pytest.raises(samestep.ConfigError, match="schedule_every='manual'"):
            run.prepare(net, optimizer, ReduceLROnPlateau(optimizer))
