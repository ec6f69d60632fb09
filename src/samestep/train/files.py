"""A run's directory and what main shows and writes: lock, ledger, display. The other ranks write nothing."""

from __future__ import annotations

import fcntl
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

import torch

from samestep.config import RunConfig
from samestep.distributed.collectives import broadcast_json
from samestep.distributed.process_group import World
from samestep.errors import RunDirError
from samestep.monitor import sinks
from samestep.monitor.console import Display
from samestep.monitor.environment import describe
from samestep.monitor.flops import FlopCount, device_name, mfu, mfu_text, peak_flops
from samestep.monitor.ledger import SCHEMA, Ledger, ledger_files
from samestep.monitor.meters import memory_report
from samestep.monitor.record import Record
from samestep.precision.policy import Policy
from samestep.train.engine import Engine

__all__ = ["RunFiles"]

_OF_A_RUN = ("checkpoints", "ledger.jsonl", "windows.csv", "values.csv", "tensorboard", "profile", "trackers.json")
_MEMORY_EVERY_S = 1.0  # a look at the allocator's counters costs more than the rest of a window's line


class RunFiles:
    """Open the run directory.

    Raises:
        RunDirError: on all ranks, when another run uses the directory or it cannot be written.
    """

    def __init__(self, config: RunConfig, world: World) -> None:
        self._directory, self._world, self._config = config.directory, world, config
        self.display = Display(config.progress and world.is_main, config.log_every)
        self._lock: TextIO | None = None
        self._ledger: sinks.Guarded | None = None
        self._sinks: list[sinks.Guarded] = []
        self._next_memory = 0.0
        self._closing: list[Callable[[], None]] = []
        if world.is_main:
            self._given = [sinks.make_sink(sink) for sink in config.sinks]
        problem = self._claim_directory() if world.is_main and config.directory is not None else None
        problem = broadcast_json(world, "run directory", problem)
        if problem is not None:
            raise RunDirError(*problem)

    def _claim_directory(self) -> list[str] | None:
        """Make and lock the directory; the three parts of an error message if that cannot be."""
        assert self._directory is not None
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            self._lock = (self._directory / ".lock").open("a")
        except OSError as e:
            return [f"cannot use {self._directory}: {e.strerror}", "a run writes into its directory", "pass another"]
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._lock.close()
            self._lock = None
            return [
                f"{self._directory} is in use by another run",
                "a directory holds one run at a time",
                "wait for it to end, or pass another directory",
            ]
        if self._config.resume == "never":
            self._set_earlier_aside(self._directory)
        return None

    def _set_earlier_aside(self, directory: Path) -> None:
        """resume="never" starts anew; what an earlier run left is moved, never deleted."""
        left = [path for name in _OF_A_RUN if (path := directory / name).exists()]
        left += [path for path in ledger_files(directory / "ledger.jsonl") if path not in left]
        if not left:
            return
        number = 1
        while (aside := directory / f"earlier-{number}").exists():
            number += 1
        aside.mkdir()
        for path in left:
            path.rename(aside / path.name)
        self.display.note(f"resume='never': the earlier run's files are now in {aside}")

    def begin(self, resumed: bool, engine: Engine, policy: Policy) -> None:
        """Open the ledger at the run's step, and say what was chosen."""
        if not self._world.is_main:
            return
        if self._directory is not None:
            self._open_sinks(self._directory, engine.step if resumed else 0)
        self._device = engine.device
        engine.on_record.append(self._window)
        self.event(
            "start",
            schema=SCHEMA,
            step=engine.step,
            world_size=self._world.size,
            precision=policy.name,
            exchange=self._config.exchange,
            seed=self._config.seed,
            device=engine.device.type,
            threads=torch.get_num_threads(),
            torch=str(torch.__version__),
            config=self._config.to_json(),
        )
        self.event("environment", step=engine.step, **describe(engine.device))
        if self._config.count_flops:
            self._count_flops(engine, policy.name)
        where = f"{self._world.size} rank{'s' * (self._world.size > 1)} on {engine.device.type}"
        self.display.note(f"{where}, precision {policy.name} ({policy.reason})")
        if resumed:
            self.display.note(f"continuing from step {engine.step}")

    def _count_flops(self, engine: Engine, precision: str) -> None:
        name = device_name(engine.device)
        peak = peak_flops(name, precision)

        def counted(per_sample: float) -> None:
            self.event(
                "flops", step=engine.step, per_sample=per_sample, peak=peak, device_name=name, precision=precision
            )
            self.display.mfu = lambda rate: mfu_text(mfu(per_sample, rate, peak, self._world.size))

        engine.clock.watchers.append(FlopCount(lambda: sum(engine.window._plan.sizes), counted))

    def _open_sinks(self, directory: Path, step: int) -> None:
        self._ledger = sinks.Guarded(Ledger(directory / "ledger.jsonl", step), sinks.warn)
        info = sinks.RunInfo(directory, step, self._config.to_json())
        self._sinks = [sinks.Guarded(sink, sinks.warn) for sink in self._given]
        for sink in self._sinks:
            sink.open(info)

    def _window(self, record: Record) -> None:
        """Show a finished window and hand it to the ledger and the sinks."""
        if record.time >= self._next_memory:
            self._next_memory = record.time + _MEMORY_EVERY_S
            report = memory_report(self._device)
            record.memory = {name: value for name, value in report.items() if isinstance(value, int)}
        self.display.window(record)
        if self._ledger is not None:
            self._ledger.window(record)
        for sink in self._sinks:
            sink.window(record)

    def event(self, kind: str, **fields: Any) -> None:
        """Write an event to the ledger and the sinks, on main."""
        if self._ledger is not None:
            self._ledger.event(kind, fields)
        for sink in self._sinks:
            sink.event(kind, fields)

    def when_closing(self, function: Callable[[], None]) -> None:
        """Call it before the files are closed."""
        self._closing.append(function)

    def close(self) -> None:
        """Close the ledger and the sinks, and free the directory."""
        for function in self._closing:
            function()
        self.display.close()
        for sink in (self._ledger, *self._sinks):
            if sink is not None:
                sink.close()
        self._ledger, self._sinks = None, []
        if self._lock is not None:
            self._lock.close()
            self._lock = None
