"""What is verified: a task, or a plain script's `check(probe)` function."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from samestep.errors import ConfigError
from samestep.tasks.base import BUILT_IN, Task, load_task

__all__ = ["is_check", "load_check", "load_target"]


def is_check(target: str | Callable[..., Any]) -> bool:
    """Whether `target` is a function of one required argument, the probe; a file is read for it but not run."""
    if not isinstance(target, str):
        return inspect.isfunction(target) and _takes_one(list(inspect.signature(target).parameters.values()))
    file, colon, name = target.rpartition(":")
    if target in BUILT_IN or not colon or not Path(file).is_file():
        return False
    for node in ast.parse(Path(file).read_text(encoding="utf-8"), file).body:
        if isinstance(node, ast.FunctionDef) and node.name == name:
            given = node.args.posonlyargs + node.args.args
            return len(given) - len(node.args.defaults) == 1
    return False


def _takes_one(parameters: list[inspect.Parameter]) -> bool:
    return sum(parameter.default is inspect.Parameter.empty for parameter in parameters) == 1


def load_check(target: str | Callable[..., Any]) -> Callable[[Any], Any]:
    """The check function itself.

    Raises:
        ConfigError: for a file that cannot be imported or has no such function.
    """
    if callable(target):
        return target
    file, _, name = target.rpartition(":")
    path = Path(file)
    spec = importlib.util.spec_from_file_location(f"samestep_check_{path.stem}", path)
    if not path.is_file() or spec is None or spec.loader is None:
        raise ConfigError(f"there is no Python file {file!r}", "a check is file.py:function", "check the path")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # loader workers and pickle find its classes by this name
    sys.path.insert(0, str(path.parent.resolve()))
    spec.loader.exec_module(module)
    check = getattr(module, name, None)
    if not callable(check):
        raise ConfigError(f"{file} has no function {name!r}", "a check is file.py:function", "check the name")
    return check  # type: ignore[no-any-return]


def load_target(target: str | Callable[[], Task]) -> Task:
    """The task, by name or made.

    Raises:
        ConfigError: when there is none, or what was made is not a task.
    """
    if isinstance(target, str):
        return load_task(target)
    task = target()
    missing = [part for part in ("model", "data", "loss", "evaluate") if not callable(getattr(task, part, None))]
    if missing:
        raise ConfigError(
            f"{target!r} made something without {', '.join(missing)}",
            "a task has model, data, loss and evaluate",
            "subclass samestep.Task",
        )
    return task
