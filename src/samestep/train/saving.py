"""What a run's checkpoint holds, and how it comes back: each object when it is handed to the run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.optim import Optimizer

from samestep.checkpoint.names import match
from samestep.checkpoint.optimizer import optimizer_from_names, optimizer_to_names
from samestep.checkpoint.storage import Checkpoint, Store
from samestep.config import RunConfig
from samestep.distributed.collectives import broadcast_json
from samestep.distributed.process_group import World
from samestep.errors import CheckpointError
from samestep.train.engine import Engine
from samestep.train.prepared import Prepared, unwrap

__all__ = ["Saving"]


class Saving:
    """The checkpoints of one run. With DDP every rank holds the whole state, so main writes alone, without collectives.

    Args:
        directory: the run directory, or None: nothing is saved.
        config: the run's settings.
        world: the ranks.
        report: prints a line on main.
    """

    def __init__(self, directory: Path | None, config: RunConfig, world: World, report: Callable[[str], None]) -> None:
        self.store = Store(directory / "checkpoints", config.keep_last) if directory is not None else None
        self._config, self._world = config, world
        self.meta: dict[str, Any] = {}
        self._state: dict[str, Any] = {}
        self._claimed: set[str] = set()
        if self.store is None:
            return
        found = self._newest(report) if world.is_main and config.resume != "never" else None
        path = broadcast_json(world, "checkpoint to continue", str(found.path) if found else None)
        if path is None and config.resume == "must":
            raise CheckpointError(
                f"got resume='must' and no checkpoint in {self.store.directory}",
                "a run resumes from a whole checkpoint in its directory",
                "check the directory, or pass resume='auto' to start anew",
            )
        if path is not None:
            checkpoint = found or Checkpoint.open(Path(path))
            self.meta = dict(checkpoint.manifest.meta)
            self._check_meta()
            self._state = checkpoint.load("cpu")

    def _newest(self, report: Callable[[str], None]) -> Checkpoint | None:
        assert self.store is not None
        return self.store.newest(report)

    def _check_meta(self) -> None:
        saved = self.meta["config"]["seed"]
        if saved != self._config.seed:
            raise CheckpointError(
                f"the checkpoint was made with seed={saved}, this run has seed={self._config.seed}",
                "order, dropout and augmentation are functions of the seed, so a restart keeps it",
                f"pass seed={saved}, or resume='never' to start anew",
            )

    @property
    def resumed(self) -> bool:
        """Whether this run continues a checkpoint."""
        return bool(self.meta)

    def _claim(self, name: str) -> Any:
        """The saved state called `name`; None when the run starts anew.

        Raises:
            CheckpointError: when the checkpoint has no such part.
        """
        if not self.resumed:
            return None
        if name not in self._state:
            raise CheckpointError(
                f"the checkpoint holds no {name}; it has {', '.join(sorted(self._state))}",
                "a restart prepares and registers what the earlier start did",
                "use the same script, or resume='never'",
            )
        self._claimed.add(name)
        return self._state[name]

    def restore_engine(self, engine: Engine) -> None:
        """Counters, the weight reference and the loss scale."""
        state = self._claim("engine")
        if state is None:
            return
        for name in ("step", "updates", "skips", "consecutive_skips", "reference", "reduction"):
            setattr(engine, name, state[name])
        if engine.scaler is not None and state["scaler"] is not None:
            engine.scaler.load_state_dict(state["scaler"])

    def restore_model(self, number: int, model: Prepared) -> None:
        """A prepared model's parameters and buffers."""
        saved = self._claim(f"model{number}")
        if saved is not None:
            inner = unwrap(model.module)
            inner.load_state_dict(match(saved, inner.state_dict()), strict=True)

    def restore_optimizer(self, number: int, optimizer: Optimizer, names: dict[int, str]) -> None:
        """An optimizer's state, by parameter name."""
        saved = self._claim(f"optimizer{number}")
        if saved is not None:
            optimizer_from_names(optimizer, names, saved)

    def restore(self, name: str, thing: Any) -> bool:
        """Anything with load_state_dict; True when there was something to restore."""
        saved = self._claim(name)
        if saved is not None:
            thing.load_state_dict(saved)
        return saved is not None

    def check_all_claimed(self) -> None:
        """Raise CheckpointError when a part of the checkpoint found no object to go to."""
        left = sorted(self._state.keys() - self._claimed)
        if left:
            raise CheckpointError(
                f"the checkpoint holds {', '.join(left)}, which this script did not prepare or register",
                "a restart restores everything or nothing",
                "prepare and register the same objects before run.epochs, or resume='never'",
            )
        self._state = {}

    def save(self, state: dict[str, Any], meta: dict[str, Any], step: int) -> Path | None:
        """Write a checkpoint on main, and wait for it elsewhere; the path. Not a collective: main may call it alone."""
        if self.store is None:
            return None
        store_key = f"samestep/saved/{step}"
        if not self._world.is_main:
            self._world.wait_for(store_key, "main to save a checkpoint at this step")
            return self.store.directory
        path = self.store.save(step, state, meta)
        self._world.announce(store_key)
        return path


def engine_state(engine: Engine) -> dict[str, Any]:
    """What `Saving.restore_engine` takes."""
    names = ("step", "updates", "skips", "consecutive_skips", "reference", "reduction")
    return {
        **{name: getattr(engine, name) for name in names},
        "scaler": engine.scaler.state_dict() if engine.scaler is not None else None,
    }


def collect(engine: Engine, user: dict[str, Any]) -> dict[str, Any]:
    """The whole state of a run, as names to nested states."""
    state: dict[str, Any] = {"engine": engine_state(engine)}
    for number, model in enumerate(engine.models):
        state[f"model{number}"] = dict(model.state_dict())
    names = parameter_names(engine.models)
    for number, optimizer in enumerate(engine.optimizers):
        state[f"optimizer{number}"] = optimizer_to_names(optimizer, names)
    for number, schedule in enumerate(engine.schedules):
        state[f"schedule{number}"] = schedule.state_dict()
    for number, ema in enumerate(engine.emas):
        state[f"ema{number}"] = ema.state_dict()
    for name, thing in user.items():
        state[f"user/{name}"] = thing.state_dict()
    return state


def parameter_names(models: list[Prepared]) -> dict[int, str]:
    """{id of a parameter: its name}; with several models the name begins with the model's number."""
    several = len(models) > 1
    return {
        id(param): f"{number}:{name}" if several else name
        for number, model in enumerate(models)
        for name, param in unwrap(model.module).named_parameters()
    }


def named_tensors(models: list[Prepared]) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of the models' states; with several models the name begins with the model's number."""
    for number, model in enumerate(models):
        for name, value in model.state_dict().items():
            if isinstance(value, torch.Tensor):
                yield (f"{number}:{name}" if len(models) > 1 else name), value
