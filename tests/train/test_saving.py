"""What a run's checkpoint holds, when it is written, and that all of it comes back."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import samestep
from samestep.testing import RanksFailed, run_ranks
from tests.cases.helpers import Weight, quiet_run


class Counter:
    """Something of the user's, with nested plain state."""

    def __init__(self) -> None:
        self.state: dict[str, Any] = {
            "n": 0,
            "names": ["a"],
            "t": torch.zeros(2),
            "none": None,
            "deep": {"x": [1.5, True]},
        }

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


def train(directory: Any, kill_at: int | None, late: bool = False, **settings: Any) -> dict[str, Any]:
    """A GAN-like pair with everything that a run can hold; `late` makes the loader when the epochs have begun."""
    with quiet_run(directory, **{"save_every": 2, "precision": "fp16", "growth_interval": 2, **settings}) as run:
        torch.manual_seed(1)
        g, d = nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)), nn.Linear(2, 1)
        opt_g = torch.optim.AdamW([{"params": g[0].parameters()}, {"params": g[2].parameters(), "lr": 0.1}], lr=0.01)
        opt_d = torch.optim.SGD(d.parameters(), lr=0.1, momentum=0.9)
        schedule = torch.optim.lr_scheduler.StepLR(opt_g, 2, 0.5)
        net_g, net_d, *_ = run.prepare(g, d, opt_g, opt_d, schedule)
        ema = run.ema(net_g, 0.5)
        counter = run.register("counter", Counter())
        data = torch.randn(20, 2, generator=torch.Generator().manual_seed(3))
        settings = {"batch_size": 4, "micro_batch_size": 2, "shuffle": True}
        loader = None if late else run.loader(data, **settings)
        for _ in run.epochs(2):
            loader = loader or run.loader(data, **settings)
            for window in loader:
                for (x,) in window:
                    window.backward(net_d(net_g(x)).square().mean())
                window.step(clip_norm=1.0)
                counter.state["n"] += 1
                counter.state["t"] = counter.state["t"] + 0.1
                if run.step == kill_at:
                    os.kill(os.getpid(), signal.SIGKILL)
        return {
            "g": [v.tolist() for v in g.state_dict().values()],
            "d": [v.tolist() for v in d.state_dict().values()],
            "ema": [v.tolist() for v in ema.averages],
            "lr": [group["lr"] for group in opt_g.param_groups],
            "scale": run.loss_scale,
            "counter": {**counter.state, "t": counter.state["t"].tolist()},
            "numbers": (run.step, run.updates, run.skips, run.epoch),
        }


def test_loaders_made_after_epochs_has_begun_are_refused_at_a_restart(tmp_path: Path) -> None:
    with pytest.raises(RanksFailed, match="SIGKILL"):
        run_ranks(train, 1, str(tmp_path), 3, True)
    with pytest.raises(samestep.ConfigError, match="in the middle of loader0, which this script did not make"):
        train(tmp_path, None, True)


@pytest.mark.parametrize("kill_at", [1, 2, 3, 7])
def test_killed_at_any_window_the_end_is_that_of_the_uninterrupted_run(tmp_path: Path, kill_at: int) -> None:
    (whole,) = run_ranks(train, 1, str(tmp_path / "whole"), None)
    assert whole["numbers"][0] == 10
    assert whole["counter"]["n"] == 10
    assert whole["scale"] != 2.0**16
    with pytest.raises(RanksFailed, match="SIGKILL"):
        run_ranks(train, 1, str(tmp_path / "parts"), kill_at)
    assert run_ranks(train, 1, str(tmp_path / "parts"), None) == [whole]


def steps(directory: Path) -> list[str]:
    return sorted(path.name for path in (directory / "checkpoints").iterdir() if path.name.startswith("step-"))


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"save_every": 3}, [6, 9, 10]),
        ({"save_every": None}, [5, 10]),
        ({"keep_last": 1}, [10]),
        ({"keep_last": None, "save_every": 4}, [4, 5, 8, 10]),
    ],
)
def test_checkpoints_are_written_when_said_and_old_ones_go(tmp_path: Path, settings: dict, expected: list[int]) -> None:
    train(tmp_path, None, **settings)
    assert steps(tmp_path) == [f"step-{step:08d}" for step in expected]


def test_without_a_directory_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    train(None, None)
    with quiet_run() as run:
        assert run.save() is None
    assert list(tmp_path.iterdir()) == []


def one_window(directory: Any, make: Any) -> None:
    with quiet_run(directory) as run:
        net = make()
        model, _ = run.prepare(net, torch.optim.AdamW(net.parameters(), lr=0.1))
        for window in run.loader(torch.ones(2, 2), batch_size=2, name="train"):
            for (x,) in window:
                window.backward(model(x).mean())
            window.step()
        run.save()


def test_another_model_is_refused_naming_its_tensors(tmp_path: Path) -> None:
    one_window(tmp_path, lambda: nn.Sequential(nn.Linear(2, 1)))
    with pytest.raises(samestep.CheckpointError, match="weight"):
        one_window(tmp_path, lambda: nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1)))
    with pytest.raises(samestep.CheckpointError, match="weight"):
        one_window(tmp_path, lambda: nn.Sequential(nn.Linear(2, 2)))


def test_another_order_of_the_optimizers_parameters_is_no_other_optimizer(tmp_path: Path) -> None:
    def run_it(reverse: bool) -> list[float]:
        with quiet_run(tmp_path) as run:
            torch.manual_seed(0)
            net = nn.Linear(2, 1)
            params = list(net.parameters())[:: -1 if reverse else 1]
            model, optimizer = run.prepare(net, torch.optim.AdamW(params, lr=0.1))
            if not run.resumed:
                for window in run.loader(torch.ones(2, 2), batch_size=2, name="train"):
                    for (x,) in window:
                        window.backward(model(x).mean())
                    window.step()
                run.save()
            return [optimizer.state[param]["exp_avg"].sum().item() for param in net.parameters()]

    assert run_it(False) == run_it(True)


def test_a_restart_in_another_precision_keeps_the_weights(tmp_path: Path) -> None:
    weights = []
    for precision in ("fp16", "bf16", "fp32", "fp16"):
        with quiet_run(tmp_path, precision=precision) as run:
            net = Weight(5.0)
            run.prepare(net)
            if not run.resumed:
                with torch.no_grad():
                    net.w.fill_(7.0)
            weights.append(net.w.item())
            run.save()
    assert weights == [7.0] * 4


def test_saving_between_a_windows_backward_and_its_step_is_refused(tmp_path: Path) -> None:
    with quiet_run(tmp_path) as run:
        net = Weight()
        model, _ = run.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
        for window in run.loader(torch.ones(4), batch_size=2, micro_batch_size=1):
            for (x,) in window:
                window.backward(model(x).mean())
                with pytest.raises(samestep.WindowError, match="save"):
                    run.save()
            window.step()
