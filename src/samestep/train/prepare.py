"""Taking models, optimizers and schedules over: check, wrap, restore."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from samestep.distributed.exchange import Replica
from samestep.errors import ConfigError, ModelError
from samestep.optim.finish import check_optimizer
from samestep.optim.schedule import Every
from samestep.train.buffers import BufferRule, Buffers
from samestep.train.engine import Engine
from samestep.train.prepared import Prepared, check_model, unwrap
from samestep.train.saving import Saving, parameter_names

__all__ = ["Wrapping", "prepare"]


@dataclasses.dataclass(frozen=True, slots=True)
class Wrapping:
    """What is passed on to DistributedDataParallel."""

    find_unused_parameters: bool
    static_graph: bool
    bucket_cap_mb: float | None


def prepare(
    engine: Engine,
    saving: Saving,
    things: tuple[Any, ...],
    wrapping: Wrapping,
    every: Every,
    rules: Mapping[str, BufferRule],
) -> tuple[Any, ...]:
    """`things` as the loop uses them, in the order given: modules first, then what holds their parameters.

    Raises:
        ModelError: for a model that cannot be prepared, or an optimizer of parameters of no prepared model.
        ConfigError: for anything that is neither module, optimizer nor schedule.
    """
    for thing in things:
        if not isinstance(thing, nn.Module | Optimizer | LRScheduler):
            raise ConfigError(
                f"got {type(thing).__name__} to prepare",
                "prepare takes modules, optimizers and learning-rate schedules",
                "data goes to run.loader, other objects with a state_dict to run.register",
            )
    prepared: dict[int, Any] = {}
    for thing in things:
        if isinstance(thing, nn.Module):
            prepared[id(thing)] = _prepare_model(engine, saving, thing, wrapping)
    for thing in things:
        if isinstance(thing, Optimizer):
            _prepare_optimizer(engine, saving, thing)
    for thing in things:
        if isinstance(thing, LRScheduler):
            number = len(engine.schedules)
            engine.schedules.add(thing, every)
            fresh = thing.state_dict()
            if saving.restore(f"schedule{number}", thing):
                engine.schedules.restored(thing, fresh)
    engine.buffers = Buffers(engine.world, [unwrap(model.module) for model in engine.models], rules)
    return tuple(prepared.get(id(thing), thing) for thing in things)


def _prepare_model(engine: Engine, saving: Saving, module: nn.Module, wrapping: Wrapping) -> Prepared:
    check_model(module, engine.policy)
    known = parameter_names(engine.models)
    for name, param in module.named_parameters():
        if id(param) in known:
            raise ModelError(
                f"parameter {name} belongs to a model that was prepared before",
                "gradients of a parameter meet over the ranks once a window",
                "prepare a model once; put models that share parameters into one module",
            )
    number = len(engine.models)
    module.to(engine.device)
    group = engine.world.group_for_model(number)
    replica = Replica(engine.world, module, group=group, exact=engine.exact, **dataclasses.asdict(wrapping))
    model = Prepared(module, replica, engine.policy)
    saving.restore_model(number, model)
    engine.models.append(model)
    return model


def _prepare_optimizer(engine: Engine, saving: Saving, optimizer: Optimizer) -> None:
    check_optimizer(optimizer)
    if any(optimizer is other for other in engine.optimizers):
        raise ConfigError(
            f"got the same {type(optimizer).__name__} to prepare twice", "an optimizer is prepared once", "leave it out"
        )
    names = parameter_names(engine.models)
    for group in optimizer.param_groups:
        for param in group["params"]:
            if id(param) not in names:
                raise ModelError(
                    f"{type(optimizer).__name__} holds a parameter of shape {tuple(param.shape)} of no prepared model",
                    "gradients meet over the ranks for prepared models only",
                    "prepare the model that it belongs to, in the same call or before",
                )
    saving.restore_optimizer(len(engine.optimizers), optimizer, names)
    engine.optimizers.append(optimizer)
