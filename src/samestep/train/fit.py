"""The whole training loop of a task, as a user would write it."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import torch

from samestep.monitor.meters import Mean
from samestep.tasks.base import Task
from samestep.train.run import Run

__all__ = ["Fitted", "fit"]


@dataclasses.dataclass(frozen=True, slots=True)
class Fitted:
    """What a training came to."""

    epochs: int
    step: int
    updates: int
    skips: int
    train_loss: float
    metrics: dict[str, float]
    seconds: float
    samples_per_s: float


def fit(task: Task, run: Run, *, epochs: int, learning_rate: float, num_workers: int = 0, **loader: Any) -> Fitted:
    """Train `task` in `run`: prepare, loop, evaluate after each epoch.

    Args:
        task: what to train.
        run: an entered run.
        epochs: in all; a restart does the rest.
        learning_rate: the schedule's peak.
        num_workers: loader processes a rank.
        loader: batch_size, micro_batch_size, drop_last of the training loader.
    """
    train_set, valid_set = task.data()
    net = task.model()
    train = run.loader(train_set, shuffle=True, num_workers=num_workers, name="train", **loader)
    valid = run.loader(valid_set, batch_size=512, num_workers=num_workers, name="valid")
    optimizer = task.optimizer(net, learning_rate)
    schedule = task.schedule(optimizer, epochs * len(train))
    things = (net, optimizer) if schedule is None else (net, optimizer, schedule)
    model, *_ = run.prepare(*things)

    begin = time.perf_counter()
    metrics: dict[str, float] = {}
    for _ in run.epochs(epochs):
        train_loss = Mean()
        for window in train:
            for batch in window:
                loss, weight = task.loss(model, batch)
                window.backward(loss, weight=weight)
                train_loss.add(loss, weight)
            window.step(clip_norm=task.clip_norm)
        metrics = run.log(train_loss=train_loss, **evaluate(task, run, model, valid))
    if not metrics:
        run.files.display.note(f"nothing left to train: {run.epoch} of {epochs} epochs are done")
        metrics = run.log(**evaluate(task, run, model, valid))
    seconds = time.perf_counter() - begin
    return Fitted(
        epochs=run.epoch,
        step=run.step,
        updates=run.updates,
        skips=run.skips,
        train_loss=metrics.pop("train_loss", float("nan")),
        metrics=metrics,
        seconds=seconds,
        samples_per_s=run.samples / seconds,
    )


def evaluate(task: Task, run: Run, model: torch.nn.Module, loader: Any) -> dict[str, Mean]:
    """The task's metrics over `loader`, each sample once over all ranks; reduced when logged."""
    means: dict[str, Mean] = {}
    for batch in run.evaluate(loader):
        for name, (value, weight) in task.evaluate(model, batch).items():
            means.setdefault(name, Mean()).add(value, weight)
    return means
