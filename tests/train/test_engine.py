"""What happens between windows: no waiting for the device, records, and when a run gives up."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import samestep
from samestep.testing import run_ranks
from tests.cases.helpers import Weight, quiet_run


@pytest.fixture
def numbers_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a GPU does, on a CPU: a window's numbers are tensors that nobody reads."""
    monkeypatch.setattr("samestep.train.statistics.on_host", lambda device: False)


class HostReads(TorchDispatchMode):
    """Where Samestep's frames read a tensor's value on the host, by function name."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func)
        if "_local_scalar_dense" in name or "is_nonzero" in name or "aten.equal" in name:
            self._note()
        return func(*args, **(kwargs or {}))

    def _note(self) -> None:
        frame = sys._getframe(2)
        while frame is not None:
            module = frame.f_globals.get("__name__", "")
            if module.startswith("samestep.") and not module.startswith("samestep.testing"):
                self.found.append(f"{module}:{frame.f_code.co_name}")
                return
            if module.startswith(("torch.optim", "tests.")):
                return
            frame = frame.f_back


def reads(optimizer: str, settings: dict[str, Any]) -> list[str]:
    with quiet_run(**settings) as run:
        net = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.1), nn.BatchNorm1d(8), nn.Linear(8, 1))
        kind = torch.optim.AdamW if optimizer != "sgd momentum" else torch.optim.SGD
        how = {"lr": 0.01, "fused": optimizer != "unfused"} | ({"momentum": 0.9} if optimizer == "sgd momentum" else {})
        opt = kind(net.parameters(), **how)
        model, _, _ = run.prepare(net, opt, torch.optim.lr_scheduler.LambdaLR(opt, lambda update: 1 / (update + 1)))
        run.ema(model, 0.9)
        # On a CPU a window's numbers are on the host when they are computed, and settle() takes them there and then; on
        # a GPU the same function runs a window later, behind an asynchronous copy. So it is no part of this count.
        run._engine.settle = lambda: None
        mode = HostReads()
        for window in run.loader(torch.randn(40, 4), batch_size=8, micro_batch_size=2):
            with mode if window.number > 1 else HostReads():
                for (x,) in window:
                    window.backward(model(x).square().mean())
                window.step(clip_norm=1.0)
        return mode.found


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("optimizer", ["adamw", "sgd momentum"])
@pytest.mark.usefixtures("numbers_on_the_device")
def test_a_window_with_a_fused_optimizer_never_waits_for_the_device(precision: str, optimizer: str) -> None:
    assert reads(optimizer, {"precision": precision, "init_scale": 1024.0}) == []


@pytest.mark.usefixtures("numbers_on_the_device")
def test_an_optimizer_without_a_fused_path_costs_one_read_a_window() -> None:
    assert reads("unfused", {"precision": "fp16", "init_scale": 1024.0}) == ["samestep.optim.finish:_step"] * 3


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("optimizer", ["adamw", "unfused"])
def test_numbers_on_the_device_give_the_training_that_numbers_on_the_host_give(
    precision: str, optimizer: str, request: pytest.FixtureRequest
) -> None:
    on_host = outcomes(precision, optimizer)
    request.getfixturevalue("numbers_on_the_device")
    assert outcomes(precision, optimizer) == pytest.approx(on_host, rel=1e-5)


def outcomes(precision: str, optimizer: str) -> list[float]:
    """Of windows with an infinite loss, a short tail, BatchNorm, an EMA and a schedule."""
    seen: list[float] = []
    with quiet_run(precision=precision, nonfinite="skip", init_scale=2.0**10, growth_interval=2) as run:
        net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
        nn.init.constant_(net[0].weight, 0.3)
        nn.init.constant_(net[2].weight, 0.2)
        opt = torch.optim.AdamW(net.parameters(), lr=0.01, fused=optimizer == "adamw")
        model, opt, _ = run.prepare(net, opt, torch.optim.lr_scheduler.LambdaLR(opt, lambda update: 1 / (update + 1)))
        ema = run.ema(model, 0.5)
        run._engine.on_record.append(lambda r: seen.extend((r.loss, r.grad_norm, r.skipped, r.lr[0], r.scale or 0)))
        data = torch.randn(44, 4, generator=torch.Generator().manual_seed(1))
        data[17] = torch.inf
        for window in run.loader(data, batch_size=8, micro_batch_size=2):
            for (x,) in window:
                window.backward(model(x).square().mean())
            window.step(clip_norm=0.1)
            seen += [window.loss, window.grad_norm, float(window.skipped)]
        for tensor in (*net.state_dict().values(), *ema.averages):
            seen += tensor.double().flatten().tolist()
    return [number if number - number == 0 else -1.0 for number in map(float, seen)]


def records(values: list[float], **settings: Any) -> tuple[list[Any], samestep.Run, str]:
    """Train on these values, two a window; what was recorded, and the error's text."""
    seen: list[Any] = []
    message = ""
    with quiet_run(**settings) as run:
        net = Weight()
        model, _ = run.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
        run._engine.on_record.append(seen.append)
        try:
            for window in run.loader(torch.tensor(values), batch_size=2, micro_batch_size=1):
                for (x,) in window:
                    window.backward(model(x).mean())
                window.step()
        except samestep.NonFiniteError as e:
            message = str(e)
    return seen, run, message


def test_a_record_says_what_went_in_and_what_came_out() -> None:
    (first, second), run, _ = records([1.0, 3.0, 5.0])
    assert (first.epoch, first.window, first.step, first.updates) == (0, 0, 1, 1)
    assert (first.micro_batches, first.samples, first.weight, first.loss, first.grad_norm) == (2, 2, 2.0, 2.0, 2.0)
    assert first.lr == [0.1]
    assert first.scale is None
    assert not first.skipped
    assert len(first.digest) == 13
    assert first.digest != second.digest
    assert (second.micro_batches, second.samples, second.weight) == (1, 1, 1.0)
    assert first.data_seconds >= 0
    assert (run.step, run.updates, run.samples) == (2, 2, 3)


def test_raise_stops_at_the_first_and_skip_goes_on() -> None:
    bad = [1.0, 1.0, float("inf"), 1.0, 1.0, 1.0]
    seen, run, message = records(bad)
    assert len(seen) == 2
    assert "window 1 of epoch 0 (step 2)" in message
    seen, run, message = records(bad, nonfinite="skip")
    assert ([record.skipped for record in seen], message) == ([False, True, False], "")
    assert (run.updates, run.skips) == (2, 1)


def test_consecutive_skips_give_up_and_single_ones_do_not() -> None:
    bad, good = [float("nan")] * 2, [1.0] * 2
    seen, _, message = records(bad + good + bad + bad + good, nonfinite="skip", max_skips=3)
    assert (len(seen), message) == (5, "")
    seen, _, message = records(good + bad + bad + bad + good, nonfinite="skip", max_skips=3)
    assert len(seen) == 4
    assert "3 windows in a row were skipped, the last is window 3 of epoch 0" in message


def diverging() -> tuple[int, str]:
    seen, _run, message = records([1.0, 1.0] + [float("nan"), 1.0] * 3, nonfinite="skip", max_skips=2, precision="fp16")
    return len(seen), message


def test_all_ranks_give_up_at_the_same_window() -> None:
    (alone,) = run_ranks(diverging, 1)
    assert alone[0] == 3
    assert "loss scale now 16384" in alone[1], "GradScaler backs off for a NaN as for an overflow"
    assert run_ranks(diverging, 2) == [alone] * 2


def same_numbers() -> list[Any]:
    seen, *_ = records([1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0])
    return [(record.loss, record.grad_norm, record.weight, record.samples, record.digest) for record in seen]


@pytest.mark.parametrize("ranks", [2, 3])
def test_records_are_the_same_on_all_ranks_and_for_any_number(ranks: int) -> None:
    if ranks == 3:
        with pytest.raises(AssertionError, match="3 ranks for 2 micro-batch"):
            run_ranks(same_numbers, ranks)
        return
    (alone,) = run_ranks(same_numbers, 1)
    assert run_ranks(same_numbers, ranks) == [alone] * ranks
