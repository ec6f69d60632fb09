"""What a task is: the five things that `samestep train` cannot know."""

from __future__ import annotations

import abc
import difflib
import importlib
import importlib.util
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, OneCycleLR

from samestep.errors import ConfigError

__all__ = ["BUILT_IN", "Task", "load_task"]

BUILT_IN = {"bytes_lm": "samestep.tasks.bytes_lm:BytesLm", "digits": "samestep.tasks.digits:Digits"}


class Task(abc.ABC):
    """A model, data, and a loss. The class attributes are defaults that the command line overrides."""

    epochs: int = 10
    batch_size: int = 64
    micro_batch_size: int | None = None
    learning_rate: float = 1e-3
    clip_norm: float | None = 1.0
    goal: tuple[str, float] | None = None
    """A metric of `evaluate` and what it should reach, for the summary."""

    @abc.abstractmethod
    def model(self) -> nn.Module:
        """A new model. Random numbers are seeded by the run."""

    @abc.abstractmethod
    def data(self) -> tuple[Any, Any]:
        """(training set, validation set): anything that `run.loader` takes."""

    @abc.abstractmethod
    def loss(self, model: nn.Module, batch: Any) -> tuple[torch.Tensor, float | torch.Tensor]:
        """(mean loss over this batch's terms, number of terms)."""

    @abc.abstractmethod
    def evaluate(self, model: nn.Module, batch: Any) -> dict[str, tuple[Any, Any]]:
        """{metric: (mean over this batch's terms, number of terms)}."""

    def optimizer(self, model: nn.Module, learning_rate: float) -> Optimizer:
        """AdamW with torch's fused kernels, unless overridden."""
        return torch.optim.AdamW(model.parameters(), lr=learning_rate, fused=True)

    def schedule(self, optimizer: Optimizer, num_updates: int) -> LRScheduler | None:
        """One cycle over the whole training, unless overridden. Source: Smith, "Super-convergence", 2018."""
        rates = [group["lr"] for group in optimizer.param_groups]
        return OneCycleLR(optimizer, max_lr=rates, total_steps=max(num_updates, 1) + 1, pct_start=0.2)


def load_task(name: str) -> Task:
    """A built-in task by name, or a class of the user's by "file.py:Name".

    Raises:
        ConfigError: when there is no such task, file or class.
    """
    place = BUILT_IN.get(name, name)
    file, colon, attribute = place.rpartition(":")
    if not colon:
        known = ", ".join(sorted(BUILT_IN))
        near = difflib.get_close_matches(name, BUILT_IN, n=1)
        hint = f"did you mean {near[0]}?" if near else "pass one of them"
        raise ConfigError(f"got task {name!r}", f"a task is one of {known}, or file.py:ClassName", hint)
    module = _import_file(Path(file)) if name not in BUILT_IN else importlib.import_module(file)
    made = getattr(module, attribute, None)
    if made is None:
        raise ConfigError(f"{file} has no {attribute!r}", "file.py:Name names a class or a function", "check the name")
    task = made() if callable(made) else made
    missing = [part for part in ("model", "data", "loss", "evaluate") if not callable(getattr(task, part, None))]
    if missing:
        raise ConfigError(
            f"{name} has no {', '.join(missing)}", "a task has model, data, loss and evaluate", "subclass samestep.Task"
        )
    return task  # type: ignore[no-any-return]


def _import_file(path: Path) -> Any:
    if not path.is_file():
        raise ConfigError(f"there is no file {path}", "a task of your own is file.py:ClassName", "check the path")
    name = f"samestep_task_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{path} is not a Python file", "a task of your own is file.py:ClassName", "check the path")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # loader workers find the dataset's class by this name
    sys.path.insert(0, str(path.parent.resolve()))
    spec.loader.exec_module(module)
    return module
