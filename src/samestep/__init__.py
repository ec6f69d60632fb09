"""Samestep: write the loop for one device in fp32, run it on N ranks in bf16 or fp16, get the same training.

The names below are loaded when they are first used, so that `import samestep` does not import torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from samestep.checkpoint.weights import load_weights
    from samestep.config import RunConfig
    from samestep.data.move import move
    from samestep.errors import (
        CheckpointError,
        ConfigError,
        DataError,
        ModelError,
        NonFiniteError,
        RankError,
        RunDirError,
        SamestepError,
        WindowError,
    )
    from samestep.monitor.meters import Mean, Throughput, memory_report
    from samestep.tasks.base import Task
    from samestep.train.plain import train_one_epoch
    from samestep.train.run import Run
    from samestep.train.window import Window

__version__ = "0.1.0"

_HOME = {
    "CheckpointError": "errors",
    "ConfigError": "errors",
    "DataError": "errors",
    "Mean": "monitor.meters",
    "ModelError": "errors",
    "NonFiniteError": "errors",
    "RankError": "errors",
    "Run": "train.run",
    "RunConfig": "config",
    "RunDirError": "errors",
    "SamestepError": "errors",
    "Throughput": "monitor.meters",
    "Window": "train.window",
    "WindowError": "errors",
    "load_weights": "checkpoint.weights",
    "memory_report": "monitor.meters",
    "move": "data.move",
    "train_one_epoch": "train.plain",
    "Task": "tasks.base",
}

__all__ = [
    "CheckpointError",
    "ConfigError",
    "DataError",
    "Mean",
    "ModelError",
    "NonFiniteError",
    "RankError",
    "Run",
    "RunConfig",
    "RunDirError",
    "SamestepError",
    "Task",
    "Throughput",
    "Window",
    "WindowError",
    "__version__",
    "load_weights",
    "memory_report",
    "move",
    "train_one_epoch",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'samestep' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"samestep.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
