"""What a run says and counts: who this rank is, means and results over all ranks, words printed once."""

from __future__ import annotations

import contextlib
import platform
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from samestep.config import RunConfig
from samestep.distributed.collectives import gather_json, sum_numbers
from samestep.distributed.process_group import World
from samestep.errors import ConfigError, RankError, WindowError
from samestep.monitor.meters import Mean, memory_report
from samestep.monitor.profile import start_profile
from samestep.precision.policy import Policy
from samestep.train.agree import reduce_over_ranks
from samestep.train.engine import Engine
from samestep.train.evaluate import evaluate, gather_results
from samestep.train.files import RunFiles
from samestep.train.global_batch import gather
from samestep.train.loader import Loader
from samestep.train.saving import Saving

__all__ = ["Reporting"]


class Reporting:
    """The half of `samestep.Run` that changes nothing: it is here to be read apart from the other half."""

    config: RunConfig
    world: World
    policy: Policy
    files: RunFiles
    saving: Saving
    epoch: int
    _engine: Engine
    _entered: bool
    _evaluated: Loader | None

    # Who and where ----------------------------------------------------------------------------------------------------

    @property
    def rank(self) -> int:
        """Global number of this rank."""
        return self.world.rank

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.world.size

    @property
    def is_main(self) -> bool:
        """True on global rank 0, on one rank of the whole run."""
        return self.world.is_main

    @property
    def step(self) -> int:
        """Windows finished since the run's first start, skipped ones included."""
        return self._engine.step

    @property
    def updates(self) -> int:
        """Updates applied since the run's first start. On a GPU the last window may still be on its way."""
        return self._engine.updates

    @property
    def samples(self) -> int:
        """Samples used by this start of the run, over all ranks."""
        return self._engine.samples

    @property
    def skips(self) -> int:
        """Windows skipped for a non-finite loss or gradient."""
        return self._engine.skips

    @property
    def loss_scale(self) -> float | None:
        """fp16's loss scale; None for other precisions. Waits for the device."""
        return None if self._engine.scaler is None else float(self._engine.scaler.scale)

    @property
    def resumed(self) -> bool:
        """Whether this run continues a checkpoint."""
        return self.saving.resumed

    # Evaluate ---------------------------------------------------------------------------------------------------------

    def evaluate(self, loader: Loader) -> Iterator[Any]:
        """This rank's batches of one pass over `loader`, each sample on exactly one rank, models in eval mode.

        Gradients are off, nothing is communicated, and modes and random states are as before when it ends.
        """
        self._check_entered("evaluate")
        self._evaluated = loader
        return self._timed(evaluate(self._engine, loader))

    def _timed(self, batches: Iterator[Any]) -> Iterator[Any]:
        begin = time.perf_counter()
        try:
            yield from batches
        finally:
            seconds = round(time.perf_counter() - begin, 6)
            self.files.event("evaluation", step=self._engine.step, seconds=seconds)

    def _compare_ranks(self, epoch: int) -> None:
        """Write what each rank spent its time on in this epoch. A collective."""
        memory = memory_report(self.world.device)
        peak = memory["process_peak"] if memory["peak_allocated"] is None else memory["peak_allocated"]
        mine = {**self._engine.clock.take_totals(), "peak_memory": peak, "host": platform.node()}
        ranks = gather_json(self.world, "the epoch's times", mine)
        self.files.event("ranks", step=self._engine.step, epoch=epoch, ranks=ranks)

    def profile(self, windows: int = 5, *, skip: int = 3, trace: bool = True) -> None:
        """Profile the next windows on main: a trace file, and a table of where a window's time goes.

        The trace (for Perfetto or chrome://tracing) and the table go into `profile/` of the run directory. On a GPU the
        stages are NVTX ranges too, for Nsight Systems.

        Args:
            windows: windows that are profiled.
            skip: windows before them, left out because the first ones are slower.
            trace: False: only mark the stages with NVTX ranges, until the run ends.

        Raises:
            ConfigError: for counts below 1 (skip: below 0), or without a run directory.
        """
        self._check_entered("profile")
        start_profile(self.files, self._engine, self.config.directory, windows, skip, trace)

    def gather_results(self, results: Sequence[Any]) -> Any:
        """The last evaluation's results of all ranks, one entry a sample in the dataset's order. A collective.

        Example: `outputs = [model(x) for x, _ in run.evaluate(valid)]`, then `run.gather_results(outputs)`.

        Args:
            results: one entry for each batch that `run.evaluate` gave this rank: a tensor with the batch's samples in its
                first dimension, or a list of JSON values with one a sample.

        Raises:
            DataError, WindowError: when they are not one for each batch and sample.
        """
        self._check_entered("gather_results")
        if self._evaluated is None:
            raise WindowError("run.gather_results before run.evaluate", "it gathers what an evaluation made")
        return gather_results(self._engine, self._evaluated, results)

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Every rank's rows of the open window's global batch, with gradients: for losses over in-batch negatives.

        Args:
            tensor: this rank's embeddings, shape (samples, ...), of its one micro-batch.

        Returns:
            Shape (samples of all ranks, ...), in the order of the global batch. Compute the loss over all of it on each
            rank, and call `window.backward(loss)` without a weight.

        Raises:
            WindowError: unless each rank has exactly one micro-batch of the window; `window.global_batch` takes any grid.
        """
        self._check_entered("gather")
        return gather(self._engine, tensor)

    # Numbers and words ------------------------------------------------------------------------------------------------

    def mean(self, value: float | torch.Tensor | Mean, weight: float | torch.Tensor = 1.0) -> float:
        """The weighted mean over all ranks: sum(value * weight) / sum(weight). A collective; NaN without any weight."""
        self._check_entered("mean")
        if not isinstance(value, Mean):
            mean = Mean()
            mean.add(value, weight)
            value = mean
        total, weights = sum_numbers(self.world, list(value.sums()))
        return total / weights if weights else float("nan")

    def log(self, **values: float | torch.Tensor | Mean) -> dict[str, float]:
        """Record named numbers once, at this step; what was recorded. All ranks call it.

        A `samestep.Mean` is reduced over the ranks exactly. A plain number must be the same on all ranks.

        Raises:
            RankError: for a plain number that differs between ranks.
        """
        self._check_entered("log")
        numbers = reduce_over_ranks(self.world, values)
        self._engine.settle()
        self.files.event("log", epoch=self.epoch, step=self._engine.step, **numbers)
        text = "  ".join(f"{name} {number:.4g}" for name, number in numbers.items())
        self.files.display.note(f"epoch {self.epoch}  {text}")
        return numbers

    def print(self, *values: object) -> None:
        """Print once, on main."""
        if self.is_main:
            self.files.display.print(*values)

    @contextlib.contextmanager
    def main_first(self) -> Iterator[bool]:
        """Main runs the block first, however long it takes; the others wait, then run it too. Gives `is_main`.

        For downloads, tokenising, caches: the others find the result. An exception on main ends all ranks.
        """
        self._check_entered("main_first")
        waiting = self.world.waiting
        if not self.is_main:
            self._raise_if(gather_json(self.world, "main_first", None, waiting)[0])
            yield False
            return
        try:
            yield True
        except BaseException as e:
            gather_json(self.world, "main_first", f"{type(e).__name__}: {e}", waiting)
            raise
        gather_json(self.world, "main_first", None, waiting)

    def _raise_if(self, failure: str | None) -> None:
        if failure is not None:
            raise RankError(f"main's preparation failed: {failure}", "the others do not go on without it")

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """The run's autocast, for computation outside the prepared models (which have it already)."""
        return self.policy.autocast()

    def fp32(self) -> contextlib.AbstractContextManager[Any]:
        """A region without autocast, inside or outside a model; cast its inputs with `.float()`."""
        return self.policy.fp32()

    def _check_entered(self, what: str) -> None:
        if not self._entered:
            raise ConfigError(
                f"run.{what} outside the run", "a Run is a context manager", "with samestep.Run() as run:"
            )
