"""`train_one_epoch` for loops of the plain habit: one call an epoch, on one device or in a process group."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from samestep.data.move import prefetched
from samestep.distributed.collectives import broadcast_json
from samestep.distributed.env import read_environment
from samestep.distributed.exchange import Replica
from samestep.distributed.process_group import World
from samestep.errors import ConfigError, DataError
from samestep.monitor.record import Record
from samestep.optim.finish import check_optimizer
from samestep.precision.policy import choose_policy
from samestep.precision.scaler import LossScaler
from samestep.train.buffers import Buffers
from samestep.train.engine import Engine
from samestep.train.local import LocalBatches
from samestep.train.prepared import Prepared, check_model, unwrap
from samestep.train.window import Window

__all__ = ["train_one_epoch"]


class _Session:
    """What calls with the same optimizer share: prepared model, loss scale, epoch number."""

    def __init__(self, model: nn.Module, optimizer: Optimizer, device: Any, precision: str) -> None:
        self.world = World(device)
        self.group = dist.group.WORLD if self.world.size > 1 else None
        self.precision, self.epoch = precision, 0
        policy = choose_policy(precision, self.world.device)
        inner = unwrap(model)
        check_model(inner, policy)
        check_optimizer(optimizer)
        scaler = LossScaler(self.world.device) if policy.scales_loss else None
        seed = broadcast_json(self.world, "seed", torch.initial_seed() % 2**63)
        self.engine = Engine(self.world, policy, seed, scaler, "raise" if scaler is None else "skip", max_skips=25)
        inner.to(self.world.device)
        self.model = Prepared(inner, Replica(self.world, inner, group=self.world.gradients), policy)
        self.engine.models.append(self.model)
        self.engine.optimizers.append(optimizer)
        self.engine.buffers = Buffers(self.world, [inner])
        self.total = self.weight = 0.0
        self.engine.on_record.append(self._add)

    def _add(self, record: Record) -> None:
        if record.weight and not record.skipped:
            self.total += record.loss * record.weight
            self.weight += record.weight

    def fits(self, model: nn.Module, device: Any, precision: str) -> bool:
        group = dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
        alive = self.group is group or (self.group is None and self.world.size == 1 and group is None)
        wanted = torch.device(device).type if device not in (None, "auto") else self.world.device.type
        return (
            self.model.module is unwrap(model)
            and alive
            and precision == self.precision
            and wanted == self.world.device.type
        )


_ATTRIBUTE = "_samestep_session"  # on the optimizer, so that the two are collected together


def train_one_epoch(
    model: nn.Module,
    loader: Iterable[Any],
    optimizer: Optimizer,
    criterion: Callable[[Any, Any], torch.Tensor],
    device: str | torch.device | None = None,
    use_bf16: bool = True,
    *,
    precision: str | None = None,
    accumulate: int = 1,
    clip_norm: float | None = 1.0,
    schedule: Any = None,
    log_every: int = 100,
    check_data: bool = True,
) -> float:
    """Train on each batch of `loader` once; the epoch's mean loss over all samples and ranks.

    Alone, or in a process group that the caller made: then `loader` gives this rank's own batches (DistributedSampler),
    gradients meet once a window, ranks may have different numbers of batches, and the result is that of one process
    which sees all of them. Calls with the same optimizer share one loss scale.

    Args:
        model: a plain module, or one in DistributedDataParallel; on any device.
        loader: an iterable of (inputs, targets).
        optimizer: of the model's parameters.
        criterion: (outputs, targets) to the mean loss over the batch.
        device: where to train; None: this rank's GPU if there is CUDA, else the CPU.
        use_bf16: True: bf16, without a loss scale; False: fp16 with one.
        precision: "fp32", "tf32", "bf16" or "fp16", instead of `use_bf16`.
        accumulate: batches of each rank that make one update.
        clip_norm: largest 2-norm of the gradient; None: no clipping.
        schedule: a learning-rate schedule to advance with each applied update.
        log_every: print the loss on main after so many updates; 0: never.
        check_data: refuse ranks that all begin with the same batch.

    Raises:
        ConfigError, DataError, ModelError, NonFiniteError: each says what to change.
    """
    precision = precision or ("bf16" if use_bf16 else "fp16")
    session = _session(model, optimizer, device, precision)
    engine, world = session.engine, session.world
    engine.schedules.replace(schedule)
    prepared = session.model
    prepared.train()
    session.total = session.weight = 0.0
    source = LocalBatches(world, loader, accumulate, check_data)
    for plan, batches in source.windows(session.epoch, 0, world.rank, world.size):
        window = Window(engine, session.epoch, plan, prefetched(batches, engine.device))
        for batch in window:
            inputs, targets = _pair(batch)
            window.backward(criterion(prepared(inputs), targets))
        window.step(clip_norm=clip_norm)
        if log_every and world.is_main and (plan.window + 1) % log_every == 0:
            print(f"epoch {session.epoch} step {plan.window + 1}  loss {window.loss:.4f}", flush=True)
    engine.settle()
    session.epoch += 1
    if not session.weight:
        raise DataError("no batch was trained on", "a loader has at least one batch on some rank", "check the loader")
    return session.total / session.weight


def _session(model: nn.Module, optimizer: Optimizer, device: Any, precision: str) -> _Session:
    initialised = dist.is_available() and dist.is_initialized()
    if not initialised and read_environment().world_size > 1:
        raise ConfigError(
            f"the environment says {read_environment().world_size} ranks and there is no process group",
            "train_one_epoch uses the group that the caller made",
            "call torch.distributed.init_process_group first, or use samestep.Run, which does",
        )
    session: _Session | None = getattr(optimizer, _ATTRIBUTE, None)
    if session is None or not session.fits(model, device, precision):
        epoch, scaler = (session.epoch, session.engine.scaler) if session is not None else (0, None)
        session = _Session(model, optimizer, device, precision)
        session.epoch = epoch
        if scaler is not None and session.engine.scaler is not None:
            session.engine.scaler.load_state_dict(scaler.state_dict())
        setattr(optimizer, _ATTRIBUTE, session)
    return session


def _pair(batch: Any) -> tuple[Any, Any]:
    if not isinstance(batch, list | tuple) or len(batch) != 2:
        raise DataError(
            f"got a batch of type {type(batch).__name__}",
            "train_one_epoch takes batches of (inputs, targets)",
            "write the loop with samestep.Run for other batches",
        )
    return batch[0], batch[1]
