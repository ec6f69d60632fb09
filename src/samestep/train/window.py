"""ONE OPTIMIZER STEP, from top to bottom: a window opens, its micro-batches go forward and backward, it steps.

The order of this file is the order of the stages:
  1. open         forget old gradients, remember the opening buffers
  2. micro-batch  say whether this one exchanges, seed dropout, hand out the batch
  3. backward     loss x weight / reference x scale; the last one sends the statistics and exchanges the gradients
  4. step         everyone has exchanged -> divide by the global weight, unscale, clip, step or skip -> EMA, buffers
  5. close        update the scale, count, and let the numbers start their way to the host
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import torch
from torch.optim import Optimizer

from samestep.data.fetch import seed_everything
from samestep.data.source import Plan, Source
from samestep.distributed.collectives import broadcast_json
from samestep.errors import NonFiniteError, WindowError
from samestep.monitor.record import Record
from samestep.optim.finish import Number, Outcome, check_clip, finish
from samestep.rng import Purpose, key
from samestep.train.checks import check_loss, check_step, checked_weight
from samestep.train.engine import Engine, Pending
from samestep.train.global_batch import global_batch
from samestep.train.nonfinite import Finder, Suspects
from samestep.train.statistics import Statistics

__all__ = ["Reduction", "Window"]

Reduction = Literal["mean", "sum"]


class Window:
    """One optimizer step. A loader makes it; iterate it for this rank's micro-batches, then call `step`.

    Attributes:
        epoch: the epoch's number.
        number: the window's number in its epoch.
        num_micro_batches: over all ranks.
        share: numbers of this rank's micro-batches; may be empty.
    """

    def __init__(
        self, engine: Engine, epoch: int, plan: Plan, batches: Iterator[Any], source: Source | None = None
    ) -> None:
        self._source = source
        self.engine, self.epoch, self.number = engine, epoch, plan.window
        self.num_micro_batches, self.share = plan.bounds[-1], plan.share
        self.bounds = plan.bounds
        self.closed = self.phase_open = self.gathered = False
        self.current: int | None = None
        self.backwards = 0
        self._plan, self._batches = plan, batches
        self.finder: Finder | None = None
        self._kept: list[Any] = []
        self._fetched = self._reached = 0
        self._stepped: list[int] = []
        self._outcomes: list[Outcome] = []

    # 1. open ----------------------------------------------------------------------------------------------------------

    def _open(self, numbers: Sequence[int]) -> None:
        """Begin a pass over the micro-batches for the optimizers of these numbers."""
        engine = self.engine
        if not engine.optimizers:
            raise WindowError("a window was used before run.prepare", "prepare comes first", "call run.prepare")
        if self.closed or self.phase_open:
            raise WindowError(
                "a window was iterated " + ("after its step" if self.closed else "twice without a step"),
                "a pass over the micro-batches ends with step()",
                "call window.step(), or take the next window",
            )
        self._numbers, self._optimizers = numbers, [engine.optimizers[i] for i in numbers]
        models = engine.models_of(self._optimizers)
        for model in models:
            model.check_unmoved()
        self._replicas = [model.replica for model in models]
        for replica in self._replicas:
            replica.open(self._plan.bounds)
        engine.buffers.open()
        self.statistics = Statistics(engine.world, self.num_micro_batches, len(models))
        self._weights: list[Number] = [0.0] * len(self.share)
        self._done = [False] * len(self.share)
        self._forwards_at_open = [replica.forwards for replica in self._replicas]
        self.backwards, self._reached, self.current, self.phase_open = 0, 0, None, True
        engine.window = self
        engine.clock.open()

    # 2. micro-batches -------------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Any]:
        return self._micro_batches(range(len(self.engine.optimizers)), 0)

    def phase(self, *optimizers: Optimizer) -> Iterator[Any]:
        """The same micro-batches, for one of several optimizers (a GAN's two): the next backward and step are for it.

        Each phase has random numbers of its own and its own `step()`; the loss scale is updated once a window.
        """
        numbers = [i for i, opt in enumerate(self.engine.optimizers) if any(opt is other for other in optimizers)]
        if not optimizers or len(numbers) != len(optimizers):
            raise WindowError("got a phase for an optimizer that was not prepared", "run.prepare comes first")
        again = self._stepped.count(numbers[0]) * len(self.engine.optimizers)
        return self._micro_batches(numbers, 1 + numbers[0] + again)

    def _micro_batches(self, numbers: Sequence[int], phase: int) -> Iterator[Any]:
        self._open(numbers)
        yield from self.again(phase)

    def again(self, phase: int = 0) -> Iterator[Any]:
        """Hand out the micro-batches of an opened window."""
        for k, number in enumerate(self.share):
            batch = self._batch(k)
            for replica in self._replicas:
                replica.sync(number == self.share[-1])
            self._seed(number, phase)
            self.current, self.forwards_before, self._reached = k, self.forwards(), k + 1
            if self.finder is not None:
                self.finder.micro_batch = number
            try:
                yield batch
            finally:  # also when the loop is left early
                self._leave()

    def _seed(self, number: int, phase: int) -> None:
        """Dropout's random numbers are those of the micro-batch, on whatever rank it is."""
        engine = self.engine
        seed = key(engine.seed, Purpose.MICRO_BATCH, self.epoch, self.number, number, phase)
        seed_everything(seed, engine.device)

    def _batch(self, k: int, keep: bool = False) -> Any:
        if k < len(self._kept):
            return self._kept[k]
        self.engine.clock.enter("data")
        batch = next(self._batches)
        self.engine.clock.leave()
        self._fetched += 1
        if keep or self.engine.find_nonfinite or len(self.engine.optimizers) > 1:  # it may be wanted again
            self._kept.append(batch)
        return batch

    def _leave(self) -> None:
        """The current micro-batch is over: keep what it left in the buffers, go back to the window's opening values."""
        if self.current is not None:
            weight, number = self._weights[self.current], self.share[self.current]
            for replica in self._replicas:
                replica.leave(number, last=number == self.share[-1])
            self.engine.buffers.leave(number, keep=isinstance(weight, torch.Tensor) or weight > 0)
            self.current = None

    def forwards(self) -> int:
        """Forwards of all prepared models so far that could train."""
        return sum(model.replica.forwards for model in self.engine.models)

    def had_backward(self, k: int) -> bool:
        """Whether the share's k-th micro-batch has had its backward."""
        return self._done[k]

    # 3. backward ------------------------------------------------------------------------------------------------------

    def backward(
        self, loss: torch.Tensor, *, weight: float | torch.Tensor | None = None, reduction: Reduction = "mean"
    ) -> None:
        """Add this micro-batch's part of the window's gradient.

        Over the window and all ranks the gradient is sum(weight * grad) / sum(weight) for reduction="mean", and
        sum(grad) for reduction="sum".

        Args:
            loss: one number that requires a gradient: the mean (or sum) over this micro-batch's terms.
            weight: how many terms it is over: samples, or valid tokens. None: the samples of the micro-batch. A
                micro-batch of weight 0 is left out, its loss may be NaN. A tensor on a GPU stays there; its zero gives
                a zero gradient, not no gradient.
            reduction: which of the two `loss` is; the same in the whole run.

        Raises:
            WindowError: outside a micro-batch, twice in one, or for a loss that is not one number with a gradient.
            ModelError: for a loss computed past the prepared model.
            NonFiniteError: for a weight that is NaN, infinite or negative.
        """
        k = check_loss(self, loss, reduction)
        if weight is None:
            weight = 1.0 if self.gathered else self._plan.sizes[k]
        elif self.gathered:
            raise WindowError(
                "got a weight after run.gather",
                "a loss over the global batch is no mean over micro-batches",
                "leave it out",
            )
        self._backward(k, loss, loss, checked_weight(self, weight), reduction)

    def _backward(
        self, k: int, loss: torch.Tensor, shown: torch.Tensor, weight: float | torch.Tensor, reduction: Reduction
    ) -> None:
        engine = self.engine
        number = self.share[k]
        self._weights[k], self._done[k] = weight, True
        self.statistics.weight(number, weight)
        self.backwards += 1
        reference = self._reference(weight, reduction)
        if isinstance(weight, torch.Tensor):
            loss = torch.where(weight > 0, loss, torch.zeros_like(loss))
            shown = loss
        elif weight == 0:
            return  # 0 x NaN is NaN: leave it out; step() sees to the exchange
        self.statistics.loss(number, shown)
        if k == len(self.share) - 1:
            self._send_statistics()
        factor: Number = 1.0 if reduction == "sum" else weight / reference
        if engine.scaler is not None:
            factor = factor * engine.scaler.scale
        if isinstance(factor, torch.Tensor) or factor != 1.0:
            loss = loss * factor
        engine.clock.backward(loss, k == len(self.share) - 1)

    def global_batch(
        self, embed: Callable[[Any], torch.Tensor], loss: Callable[[torch.Tensor], torch.Tensor]
    ) -> torch.Tensor:
        """Forward and backward for a loss over the whole global batch, such as in-batch negatives; then `step`.

        Takes the place of the loop over the window. Equal to one process with the whole batch in one forward, on any
        number of ranks and micro-batches, as long as rows are embedded independently (no BatchNorm).

        Args:
            embed: a batch to its rows, shape (samples, ...); called twice for each micro-batch, with the same seeds.
            loss: all rows of the global batch, in its order, to one number. Computed on each rank, alike.

        Returns:
            The loss, 0-d, without a gradient.
        """
        return global_batch(self, embed, loss)

    def embedded(self, embed: Callable[[Any], torch.Tensor]) -> list[torch.Tensor]:
        """Open the window and embed its micro-batches without gradients; buffers stay as they were."""
        self._open(range(len(self.engine.optimizers)))
        rows = []
        for k, number in enumerate(self.share):
            batch = self._batch(k, keep=True)
            self._seed(number, 0)
            with torch.no_grad():
                rows.append(embed(batch))
            self.engine.buffers.leave(number, keep=False)
        return rows

    def backward_as(self, loss: torch.Tensor, shown: torch.Tensor) -> None:
        """Backward of `loss` with weight 1, recorded as `shown`."""
        self._backward(check_loss(self, loss, "mean"), loss, shown, 1.0, "mean")

    def _reference(self, weight: float | torch.Tensor, reduction: str) -> float:
        """A typical window's weight (main's first weight x M): dividing by it keeps gradients near their usual size.

        A raw count of 4,096 tokens as a factor would cost fp16 twelve windows until the loss scale has come down.
        """
        engine = self.engine
        if engine.reference is None:
            agreed = broadcast_json(
                engine.world, "reference weight", [(float(weight) or 1.0) * self.num_micro_batches, reduction]
            )
            engine.reference, engine.reduction = float(agreed[0]), agreed[1]
        return engine.reference

    def _send_statistics(self) -> None:
        """Start adding the statistics over the ranks: they travel while the last backward runs."""
        statistics = self.statistics
        for k, number in enumerate(self.share):
            statistics.samples(number, self._plan.digests[k], self._plan.sizes[k])
        statistics.identity(self._identity)
        for i, (replica, before) in enumerate(zip(self._replicas, self._forwards_at_open, strict=True)):
            statistics.forwards(i, replica.forwards - before)
        statistics.send()

    # 4. step ----------------------------------------------------------------------------------------------------------

    def step(self, *, clip_norm: float | None = None, clip_value: float | None = None) -> None:
        """Finish the window: one update with the window's mean gradient, or none if it is not finite.

        Every rank calls it once a window (once a phase), whatever its share.

        Args:
            clip_norm: largest 2-norm of the gradient of all stepped parameters together, or None.
            clip_value: largest absolute value of one element of it, or None.

        Raises:
            ConfigError: for a limit that is not positive, or both.
            WindowError: without a backward although this rank has micro-batches, or inside an open autocast.
        """
        check_clip(clip_norm, clip_value)
        check_step(self)
        engine, statistics = self.engine, self.statistics
        engine.clock.enter("exchange")
        self._exchanged()
        engine.clock.leave()
        if self.finder is not None:
            self._blame(self.finder)
        loss = statistics.mean_loss(engine.reduction)
        divisor = statistics.divisor(engine.reduction, self._reference(1.0, "mean"))
        engine.settle()  # on a GPU: learn whether the last window was applied, so that this one has its rate
        self._rates = [float(group["lr"]) for opt in self._optimizers for group in opt.param_groups]
        engine.clock.enter("finish")
        outcome = finish(
            self._optimizers,
            divisor=divisor,
            loss=loss,
            scaler=engine.scaler,
            clip_norm=clip_norm,
            clip_value=clip_value,
        )
        engine.clock.leave()
        for ema in engine.emas:
            ema.update(outcome.skipped)
        engine.buffers.close(self.num_micro_batches, statistics.weights, outcome.skipped)
        for replica in self._replicas:
            replica.live = False
        self.phase_open = False
        self._outcomes.append(outcome)
        self._stepped += self._numbers
        if len(set(self._stepped)) == len(engine.optimizers):
            self.close()

    def _exchanged(self) -> None:
        """Make sure that this rank took part in each exchange of the window; have everybody's statistics."""
        self._leave()
        for number in self.share[self._reached :]:  # the loop was left early: an empty place in the sum
            for replica in self._replicas:
                replica.leave(number, last=number == self.share[-1])
        self._reference(1.0, "mean")
        if not self.statistics.sent:
            self._send_statistics()
        extra = [i for i, replica in enumerate(self._replicas) if replica.contribute_nothing()]
        for replica in self._replicas:
            replica.finish()
        self.statistics.arrive()
        for i in extra:
            # If nobody used this model its gradients are zeros by now, and weight decay would move it.
            if not self.statistics.anybody_used(i):
                self._replicas[i].drop_gradients()

    def repeated(self) -> Window:
        """This window once more, watched: its step does not update but raises the offence, with what was found."""
        window = Window(self.engine, self.epoch, self._plan, self._batches, self._source)
        window._kept, window._fetched, window.finder = self._kept, self._fetched, Finder(self.engine.models)
        return window

    def _blame(self, finder: Finder) -> None:
        found, offence = finder.verdict(self.engine.world), self.engine.offender
        assert offence is not None
        fix = "keep that module in fp32 (run.fp32() and .float() on its inputs), lower the learning rate, or mend the data"
        said = "; ".join(found) if found else "repeated, every module's output and gradient was finite"
        raise NonFiniteError(f"{offence.got}; {said}", offence.rule, fix)

    # 5. close ---------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """End the window. `step` does it, or the loader when the loop stepped fewer optimizers, or none."""
        if self.closed:
            return
        self.closed = True
        engine = self.engine
        engine.window = None
        for _ in range(len(self.share) - self._fetched):
            next(self._batches)  # what the loop left unread belongs to this window, not to the next
        if self.phase_open:
            for replica in self._replicas:
                replica.live = False
            if self.backwards:
                raise WindowError(
                    f"window {self.number} of epoch {self.epoch} had backward() but no step()",
                    "each window with a backward is stepped",
                    "call window.step() after the loop over the window",
                )
        engine.step += 1
        if not self._stepped:
            engine.clock.restart()
            return  # the loop left the window out: no update, and the run goes on behind it
        if engine.scaler is not None:
            overflows = [outcome.overflow for outcome in self._outcomes]
            engine.scaler.update(
                overflows[0] if len(overflows) == 1 else torch.as_tensor(sum(overflows)).clamp(max=1.0)
            )
        engine.settle()
        engine.post(self._pending())

    def _pending(self) -> Pending:
        engine = self.engine
        decided = [part for outcome in self._outcomes for part in (outcome.grad_norm, outcome.skipped)]
        if engine.scaler is not None:
            decided.append(engine.scaler.scale)
        record = Record(
            epoch=self.epoch,
            window=self.number,
            step=engine.step,
            micro_batches=self.num_micro_batches,
            lr=self._rates,
            seconds=0.0,
            data_seconds=0.0,
        )
        engine.clock.close(record)
        exposed, engine.clock.exposed = engine.clock.exposed, None
        arrived = self.statistics.start_back(decided)
        locate = functools.partial(self._source.locate, self.epoch, self.number) if self._source else lambda _: None
        suspects = Suspects(self.bounds, self._outcomes, locate)
        return Pending(record, self.statistics, arrived, self._identity, suspects, exposed)

    @property
    def _identity(self) -> int:
        return self.epoch << 32 | self.number

    # What came out, for loops that want to look. Each waits for the device. -------------------------------------------

    @property
    def loss(self) -> float:
        """The window's loss over all ranks, after step: the weighted mean, or the sum. Waits for the device."""
        if not self._outcomes or self.phase_open:
            raise WindowError("window.loss before window.step()", "the mean over all ranks is known after the step")
        return float(self.statistics.mean_loss(self.engine.reduction))

    @property
    def grad_norm(self) -> float:
        """The 2-norm of the window's gradient before clipping, after step. Waits for the device."""
        return float(self._last_outcome().grad_norm)

    @property
    def skipped(self) -> bool:
        """Whether the last step left the weights as they were. Waits for the device."""
        return bool(self._last_outcome().skipped)

    def _last_outcome(self) -> Outcome:
        if not self._outcomes:
            raise WindowError("a window's outcome was read before window.step()", "it is known after the step")
        return self._outcomes[-1]
