"""Sinks: one writer, the same curve after a restart, and no sink can stop a training."""

from __future__ import annotations

import csv
import importlib.util
import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import samestep
from samestep.monitor.record import Record
from samestep.monitor.sinks import Guarded, RunInfo, Sink, make_sink, scalars
from samestep.testing import RanksFailed, run_ranks
from tests.cases.helpers import Weight, quiet_run
from tests.monitor.test_ledger import record


class Mine:
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.told: list[Any] = []

    def open(self, info: RunInfo) -> None:
        self.told.append(("open", info.step))

    def window(self, record: Record) -> None:
        self.told.append(record.step)

    def event(self, kind: str, fields: dict[str, Any]) -> None:
        self.told.append(kind)

    def close(self) -> None:
        self.told.append("close")


class Broken(Mine):
    def window(self, record: Record) -> None:
        raise OSError("no space left")


def train(directory: str, sinks: list[Any], stop_at: int | None = None, windows: int = 6) -> int:
    with quiet_run(directory, sinks=sinks, save_every=2) as run:
        net = Weight()
        model, _ = run.prepare(net, torch.optim.SGD(net.parameters(), lr=0.01))
        loader = run.loader(torch.arange(2.0 * windows), batch_size=2, micro_batch_size=1)
        for _ in run.epochs(1):
            for window in loader:
                for (x,) in window:
                    window.backward(model(x).mean())
                window.step()
                if run.step == stop_at:
                    raise RuntimeError("the machine went away")
            run.log(accuracy=0.5)
        return run.step


def stopped_and_gone_on(directory: Path, sinks: list[Any]) -> None:
    """Stop after window 3 with a checkpoint of window 2, then do the rest."""
    with pytest.raises(RuntimeError, match="the machine went away"):
        train(str(directory), sinks, stop_at=3)
    assert train(str(directory), sinks) == 6


def test_a_sink_of_your_own_is_told_everything_in_order(tmp_path: Path) -> None:
    sink = Mine()
    train(str(tmp_path), [sink], windows=2)
    assert sink.told == [
        *(("open", 0), "start", "environment", "epochs", "digest", 1, 2),
        *("checkpoint", "log", "ranks", "checkpoint", "end", "close"),
    ]


def test_a_failing_sink_warns_once_and_the_training_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good = Mine()
    assert train(str(tmp_path), [Broken(), good], windows=30) == 30
    err = capsys.readouterr().err
    assert err.count("sink Broken failed (OSError: no space left)") == err.count("warning") == 1
    assert [told for told in good.told if isinstance(told, int)] == list(range(1, 31))


def test_a_sink_that_always_fails_is_left_alone() -> None:
    calls: list[int] = []

    class Counting(Broken):
        def window(self, record: Record) -> None:
            calls.append(record.step)
            raise ValueError("no")

    guarded = Guarded(Counting(), lambda text: None)
    for step in range(1, 100):
        guarded.window(record(step))
    assert len(calls) == 10


@pytest.mark.parametrize(
    ("sinks", "match"),
    [
        (["tensorbord"], "the sinks are csv, tensorboard, wandb, mlflow, trackio"),
        ([object()], "a sink has the methods open, window, event and close"),
        ("csv", "a list of names and objects"),
    ],
)
def test_what_is_no_sink_is_refused(tmp_path: Path, sinks: Any, match: str) -> None:
    with pytest.raises(samestep.ConfigError, match=match):
        train(str(tmp_path), sinks)


def test_sinks_need_a_directory() -> None:
    with pytest.raises(samestep.ConfigError, match="sinks without a directory"):
        samestep.Run(sinks=["csv"])


def test_a_missing_package_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise ImportError(name)

    monkeypatch.setattr("samestep.monitor.sinks.importlib.import_module", missing)
    with pytest.raises(samestep.ConfigError, match=r"pip install 'samestep\[wandb\]'"):
        make_sink("wandb")


def test_all_sinks_have_the_four_methods() -> None:
    assert isinstance(Mine(), Sink)
    assert isinstance(make_sink("csv"), Sink)
    assert not isinstance(3, Sink)


def test_scalars_leave_out_what_there_is_not() -> None:
    names = dict(scalars(record(1, lr=[0.1, 0.2], loss=2.0, seconds=0.5, samples=4)))
    assert names["samples_per_s"] == 8.0
    assert (names["lr"], names["lr/1"]) == (0.1, 0.2)
    assert "loss_scale" not in names
    assert "samples_per_s" not in dict(scalars(record(1)))


def test_csv_has_each_step_once_after_a_restart(tmp_path: Path) -> None:
    stopped_and_gone_on(tmp_path, ["csv"])
    with (tmp_path / "windows.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [int(row["step"]) for row in rows] == [1, 2, 3, 4, 5, 6]
    ledger = [json.loads(text) for text in (tmp_path / "ledger.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in ledger if line["kind"] == "window"]
    assert [float(row["loss"]) for row in rows] == losses
    assert (tmp_path / "values.csv").read_text().splitlines() == ["step,name,value", "6,accuracy,0.5"]


def points(directory: Path, name: str) -> list[tuple[int, float]]:
    """What TensorBoard shows of a curve."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    seen = EventAccumulator(str(directory))
    seen.Reload()
    return [(event.step, event.value) for event in seen.Scalars(name)]


def test_tensorboard_shows_one_curve_after_a_restart(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    stopped_and_gone_on(tmp_path, ["tensorboard"])
    train(str(tmp_path / "whole"), ["tensorboard"])
    assert points(tmp_path / "tensorboard", "loss") == points(tmp_path / "whole/tensorboard", "loss")
    assert [step for step, _ in points(tmp_path / "tensorboard", "loss")] == [1, 2, 3, 4, 5, 6]
    assert points(tmp_path / "tensorboard", "accuracy") == [(6, 0.5)]


def killed_between(directory: str) -> None:
    import os
    import signal

    class Killing(Mine):
        def window(self, record: Record) -> None:
            if record.step == 5:
                os.kill(os.getpid(), signal.SIGKILL)

    train(directory, ["tensorboard", "csv", Killing()])


def test_a_killed_run_leaves_no_gap_and_no_step_twice(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    with pytest.raises(RanksFailed):
        run_ranks(killed_between, 1, str(tmp_path))
    time.sleep(1.1)  # TensorBoard orders files by the second in their names
    assert train(str(tmp_path), ["tensorboard", "csv"]) == 6
    assert [step for step, _ in points(tmp_path / "tensorboard", "loss")] == [1, 2, 3, 4, 5, 6]
    with (tmp_path / "windows.csv").open(newline="") as file:
        assert [row["step"] for row in csv.DictReader(file)] == ["1", "2", "3", "4", "5", "6"]


def without(package: str) -> Any:
    missing = importlib.util.find_spec(package) is None
    return pytest.mark.skipif(missing, reason=f"needs {package}: pip install 'samestep[{package}]'")


@without("mlflow")
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
def test_mlflow_has_one_run_with_each_step_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import mlflow

    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"file:{tmp_path / 'mlruns'}")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    mlflow.set_tracking_uri(f"file:{tmp_path / 'mlruns'}")
    stopped_and_gone_on(tmp_path / "run", ["mlflow"])
    run = json.loads((tmp_path / "run/trackers.json").read_text())["mlflow"]["run"]
    history = mlflow.MlflowClient().get_metric_history(run, "loss")
    assert sorted(point.step for point in history) == [1, 2, 3, 4, 5, 6]


class FakeTracker:
    """Stands for wandb and trackio, whose packages are not part of the development set."""

    def __init__(self) -> None:
        self.begun: list[dict[str, Any]] = []
        self.sent: list[tuple[int, dict[str, float]]] = []
        self.finished = 0

    def init(self, **settings: Any) -> FakeTracker:
        self.begun.append(settings)
        return self

    def log(self, values: dict[str, float], step: int) -> None:
        self.sent.append((step, values))

    def finish(self) -> None:
        self.finished += 1


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_a_tracker_goes_on_in_its_own_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    fake = FakeTracker()
    monkeypatch.setitem(__import__("sys").modules, name, fake)
    stopped_and_gone_on(tmp_path / "run", [name])
    first, second = fake.begun
    same = "id" if name == "wandb" else "name"
    assert first[same] == second[same]
    assert first["resume"] == "allow"
    assert fake.finished == 2
    assert [step for step, values in fake.sent if "loss" in values] == [1, 2, 3, 4, 5, 6]
    assert [values for _, values in fake.sent if "accuracy" in values] == [{"accuracy": 0.5}]
