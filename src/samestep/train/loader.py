"""A loader as the training loop sees it: an epoch of windows, continuing where the run stands."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from samestep.data.move import prefetched
from samestep.data.source import Plan, Source
from samestep.errors import ConfigError, WindowError
from samestep.train.engine import Engine
from samestep.train.window import Window

__all__ = ["Loader"]


class Loader:
    """Iterate it for the windows of an epoch. `run.loader` makes it.

    Without `run.epochs` each full pass is one epoch, numbered from 0.
    """

    def __init__(self, engine: Engine, source: Source, name: str, after_window: Callable[[], None]) -> None:
        self.source, self.name = source, name
        self.epoch = 0
        self._engine, self._after_window = engine, after_window
        self._next = 0
        self._window: Window | None = None
        self._exhausted = False
        self.driven = False
        """run.epochs sets the epoch."""
        self.evaluated: list[tuple[int, int, int]] = []
        """(window, micro-batch, samples) of each batch that the last evaluation gave this rank."""
        self.trained = False
        """Its windows have been used, here or before the restart: its position is part of a checkpoint."""

    def __len__(self) -> int:
        """Windows in an epoch."""
        if self.source.num_windows is None:
            raise TypeError(f"{self.name} reads a stream: its number of windows is known when it ends")
        return self.source.num_windows

    @property
    def position(self) -> tuple[int, int]:
        """(epoch, the window that comes next)."""
        if self._window is not None:
            return self.epoch, self._window.number + int(self._window.closed)
        return self.epoch, self._next

    def set_position(self, epoch: int, window: int) -> None:
        """Continue at this window of this epoch."""
        self.epoch, self._next, self._window, self._exhausted = epoch, window, None, False
        self.trained = self.trained or (epoch, window) != (0, 0)

    def begin_epoch(self, epoch: int) -> None:
        """`run.epochs` has come to `epoch`; a position in that epoch, from a checkpoint, is kept."""
        self.driven = True
        if epoch != self.epoch or self._exhausted:
            self.set_position(epoch, 0)

    def __iter__(self) -> Iterator[Window]:
        self._check_grid()
        if self._exhausted:
            if self.driven:
                raise WindowError(
                    f"{self.name} was iterated twice in epoch {self.epoch}",
                    "an epoch uses each sample once",
                    "iterate it once for each pass of run.epochs",
                )
            self.set_position(self.epoch + 1, 0)
        engine, self.trained = self._engine, True
        if self._window is not None:  # the last pass was left early: go on where it stopped
            self.set_position(*self.position)
        for plan, stream in self._on_device(self.epoch, self._next):
            self._window = Window(engine, self.epoch, plan, stream, self.source)
            yield self._window
            self._window.close()
            if engine.find_nonfinite:
                engine.settle()
            if engine.offender is not None:
                yield self._window.repeated()
                raise engine.offender
            self._after_window()
        engine.settle()
        if self._window is not None:
            self._next = self._window.number + 1
        self._window, self._exhausted = None, True

    def evaluate(self) -> Iterator[Any]:
        """This rank's batches of one pass, each sample on one rank, without windows or collectives."""
        self.evaluated = []
        for plan, stream in self._on_device(0, 0):
            for number, size in zip(plan.share, plan.sizes, strict=True):
                self.evaluated.append((plan.window, number, size))
                yield next(stream)

    def _on_device(self, epoch: int, first: int) -> Iterator[tuple[Plan, Iterator[Any]]]:
        """The source's windows, their batches on the run's device; one iterator may serve many windows."""
        world = self._engine.world
        inner, stream = None, iter(())
        for plan, batches in self.source.windows(epoch, first, world.rank, world.size):
            if batches is not inner:
                inner, stream = batches, prefetched(batches, self._engine.device)
            yield plan, stream

    def _check_grid(self) -> None:
        engine, size = self._engine, self._engine.world.size
        if size > self.source.micro_batches:
            raise ConfigError(
                f"got {size} ranks for {self.source.micro_batches} micro-batch(es) a window",
                "a rank works on whole micro-batches, so some ranks would never work",
                f"start at most {self.source.micro_batches} ranks, or set a smaller micro_batch_size (at a new start: "
                "a checkpoint keeps its grid)",
            )
        if self.source.warning is not None and engine.world.is_main and _normalises_over_batch(engine):
            warnings.warn(
                f"{self.source.warning}, over which BatchNorm cannot compute a variance; pass drop_last=True or another "
                "batch_size or micro_batch_size",
                stacklevel=3,
            )
        static = any(model.replica.static_graph for model in engine.models)
        if static and 1 < size < self.source.micro_batches:
            raise ConfigError(
                f"got static_graph=True, {self.source.micro_batches} micro-batches a window and {size} ranks",
                "DDP's static_graph exchanges in each backward, so a rank has one micro-batch a window",
                f"pass micro_batches={size}, or prepare without static_graph",
            )
        if static and self.source.smallest_window < size:
            raise ConfigError(
                f"got static_graph=True and a window of {self.source.smallest_window} micro-batch(es) for {size} ranks",
                "static_graph needs the same work on every rank in every window",
                "pass drop_last=True, or prepare without static_graph",
            )


def _normalises_over_batch(engine: Engine) -> bool:
    return any(isinstance(module, nn.BatchNorm1d) for model in engine.models for module in model.modules())
