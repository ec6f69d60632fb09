"""What the windows of a run share: its ranks, models, optimizers, counters, and the numbers still on their way."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer

from samestep.distributed.process_group import World
from samestep.errors import NonFiniteError, RankError
from samestep.monitor.clock import Clock
from samestep.monitor.record import Record
from samestep.optim.ema import Ema
from samestep.optim.schedule import Schedules
from samestep.precision.policy import Policy
from samestep.precision.scaler import LossScaler
from samestep.train.buffers import Buffers
from samestep.train.nonfinite import Suspects, explain
from samestep.train.prepared import Prepared
from samestep.train.statistics import Statistics, weighted_mean

__all__ = ["Engine", "Pending"]


@dataclasses.dataclass(slots=True)
class Pending:
    """A window whose numbers are on their way to the host."""

    record: Record
    statistics: Statistics
    """Followed by norm and skip of each finish, then the scale if there is one."""
    arrived: torch.cuda.Event | None
    identity: int
    suspects: Suspects
    """Where to look if it is not finite."""
    exposed: tuple[torch.cuda.Event, torch.cuda.Event] | None = None
    """On a GPU with several ranks: the ends of the last backward and of its exchange."""


class Engine:
    """State shared by a run's windows. Owned by `samestep.Run`; users do not make one.

    Args:
        world: the ranks.
        policy: the precision.
        seed: the run's seed.
        scaler: the loss scale, or None for precisions without one.
        nonfinite: "raise" or "skip": what a window without a finite loss and gradient does, besides not updating.
        max_skips: consecutive skipped windows after which the run gives up.
    """

    def __init__(
        self, world: World, policy: Policy, seed: int, scaler: LossScaler | None, nonfinite: str, max_skips: int
    ) -> None:
        self.world, self.policy, self.seed, self.scaler = world, policy, seed, scaler
        self.nonfinite, self.max_skips = nonfinite, max_skips
        self.device = world.device
        self.exact = False
        """Gradients meet by the exact exchange."""
        self.models: list[Prepared] = []
        self.optimizers: list[Optimizer] = []
        self.schedules = Schedules()
        self.emas: list[Ema] = []
        self.buffers = Buffers(world, [])
        self.reference: float | None = None
        """A typical weight, the same for the whole run and all ranks: backward divides by it, finish multiplies."""
        self.reduction: str | None = None
        """What the losses of this run are, "mean" or "sum"."""
        self.find_nonfinite = False
        """Repeat a window that is not finite, watching every module."""
        self.offender: NonFiniteError | None = None
        """With find_nonfinite: why the last window is to be repeated."""
        self.step = 0
        self.updates = 0
        self.consecutive_skips = 0
        self.skips = 0
        self.samples = 0
        self.on_record: list[Callable[[Record], None]] = []
        self._pending: Pending | None = None
        self.clock = Clock(world.device, world.size == 1)
        self.window: Any = None
        """The open window, if there is one."""

    def models_of(self, optimizers: list[Optimizer]) -> list[Prepared]:
        """The models that hold a parameter of these optimizers, in the order they were prepared."""
        if len(optimizers) == len(self.optimizers):
            return self.models
        ids = {id(param) for opt in optimizers for group in opt.param_groups for param in group["params"]}
        return [model for model in self.models if any(id(param) in ids for param in model.parameters())]

    def post(self, pending: Pending) -> None:
        """Take a finished window's numbers. On the CPU they are here already; on a GPU they are read a window late."""
        self._pending = pending
        if pending.arrived is None:
            self.settle()

    def settle(self) -> None:
        """Act on the last window's numbers: advance schedules if it was applied, count, tell the listeners.

        Raises:
            NonFiniteError: by the run's policy.
            RankError: when the ranks were not in the same window.
        """
        pending, self._pending = self._pending, None
        if pending is None:
            return
        if pending.arrived is not None:
            pending.arrived.synchronize()
        record = pending.record
        if (waited := Clock.device_exchange(pending.exposed)) is not None:
            record.exchange_seconds = waited
        bad = self._fill(pending)
        if record.skipped:
            self.skips += 1
            self.consecutive_skips += 1
        else:
            self.updates += 1
            self.consecutive_skips = 0
            self.schedules.advance("window")
        record.updates = self.updates
        self.samples += record.samples
        for listener in self.on_record:
            listener(record)
        if record.skipped and record.weight:
            self._judge(record, pending.suspects, bad)

    def _fill(self, pending: Pending) -> dict[int, float]:
        """Put the arrived numbers into the record.

        Returns:
            {micro-batch: its loss} where that is not finite.
        """
        record = pending.record
        pending.statistics.take()
        weights, losses, digests, sizes, identities, decided = pending.statistics.parts()
        self._check_identities(identities, pending.identity)
        if self.scaler is not None:
            record.scale = decided.pop()
        record.grad_norm = math.hypot(*decided[0::2])
        record.skipped = any(decided[1::2])
        record.weight = sum(weights)
        record.loss = sum(losses) if self.reduction == "sum" else weighted_mean(losses, weights)
        record.samples = int(sum(sizes))
        record.digest = f"{sum(map(int, digests)) % (1 << 52):013x}" if any(digests) else ""
        if not record.skipped:
            return {}
        return {i: loss for i, (loss, weight) in enumerate(zip(losses, weights, strict=True)) if weight and loss - loss}

    def _check_identities(self, identities: list[float], mine: int) -> None:
        if all(identity == mine for identity in identities):
            return
        places = ", ".join(
            f"rank {rank} in window {int(identity) & 0xFFFFFFFF} of epoch {int(identity) >> 32}"
            for rank, identity in enumerate(identities)
        )
        raise RankError(
            f"the ranks stepped different windows: {places}",
            "a loop that leaves a window out does so on all ranks",
            "decide from values that all ranks share (run.mean), not from a rank's own",
        )

    def _judge(self, record: Record, suspects: Suspects, losses: dict[int, float]) -> None:
        """A skipped window: go on, or end the run and say what is to blame."""
        place = f"window {record.window} of epoch {record.epoch} (step {record.step})"
        if self.nonfinite == "raise":
            failure = NonFiniteError(
                f"loss {record.loss} and gradient norm {record.grad_norm} in {place}: "
                + explain(self.models, suspects, losses),
                "with nonfinite='raise' a run stops at the first; the weights are those before this window",
                "look at these samples and the learning rate; Run(find_nonfinite=True) names the module, "
                "Run(nonfinite='skip') goes on",
            )
        elif self.consecutive_skips >= self.max_skips:
            scale = "" if record.scale is None else f", loss scale now {record.scale:g}"
            failure = NonFiniteError(
                f"{self.consecutive_skips} windows in a row were skipped, the last is {place}: loss {record.loss}, "
                f"gradient norm {record.grad_norm}{scale}: {explain(self.models, suspects, losses)}",
                f"a run gives up after max_skips={self.max_skips}",
                "look for NaN in the data or an overflow in the model (run.fp32() around the layer)",
            )
        else:
            return
        if not self.find_nonfinite:
            raise failure
        self.offender = failure
