"""What one rank does in a verification of a task: train a few windows, keep or compare each one's numbers."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, Subset

from samestep.errors import DataError
from samestep.monitor.record import Record
from samestep.tasks.base import Task
from samestep.train.run import Run
from samestep.train.window import Window
from samestep.verify.compare import Difference, by_envelope, by_order_of_sums, digest
from samestep.verify.target import load_target

__all__ = ["Recorded", "Setting", "Step", "record_all"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One configuration, whatever the number of ranks."""

    target: Any
    """Built-in name, file.py:Name, or a callable that makes a task."""
    precision: str
    exchange: str
    accumulate: int
    batch_size: int
    micro_batch_size: int
    num_samples: int
    windows: int
    seed: int
    drop_last: bool = False

    @property
    def opening(self) -> str:
        """Folder of the weights that each window starts from, the same for all precisions."""
        return f"{self.accumulate}-opening"

    @property
    def truth(self) -> str:
        """Folder of this setting's one-rank gradients."""
        return f"{self.accumulate}-{self.precision}-{self.exchange}"

    @property
    def fp32(self) -> str:
        """Folder of the one-rank gradients in fp32."""
        return f"{self.accumulate}-fp32-fast"


@dataclasses.dataclass(slots=True, kw_only=True)
class Step:
    """One window as one rank saw it."""

    digest: str
    samples: int
    weight: float
    loss: float
    skipped: bool
    scale: float | None
    gradients: str
    """SHA-256 of all gradients."""
    zero: bool
    """Each gradient is zero."""
    buffers: str
    """SHA-256 of the closing buffers."""
    difference: Difference | None = None
    """To one rank in the same precision; main only."""
    precision: Difference | None = None
    """To fp32; of one rank only."""


@dataclasses.dataclass(slots=True)
class Recorded:
    """What a rank hands back for one setting."""

    steps: list[Step]
    weights: str
    """SHA-256 of the final weights and buffers."""
    dropout: bool
    """The model has active dropout."""
    batch_norm: bool
    """The model has batch normalisation."""


def record_all(settings: list[Setting], folder: str, keep: bool) -> list[Recorded]:
    """Run every setting on this number of ranks, one after the other.

    Args:
        settings: in the order to run; with `keep` fp32 in the fast exchange comes first for each `accumulate`.
        folder: where the reference is written to or read from.
        keep: these are the one-rank runs that the others are compared with.
    """
    return [_Recording(setting, Path(folder), keep).run() for setting in settings]


class _Recording:
    """One setting, window by window."""

    def __init__(self, setting: Setting, folder: Path, keep: bool) -> None:
        self.setting, self.folder, self.keep = setting, folder, keep
        self.steps: list[Step] = []
        self.grads: dict[str, torch.Tensor] = {}
        self.sums: dict[str, torch.Tensor] = {}
        self.records: list[Record] = []

    def run(self) -> Recorded:
        """Train `windows` windows."""
        setting = self.setting
        task = load_target(setting.target)
        settings: dict[str, Any] = {"precision": setting.precision, "exchange": setting.exchange, "seed": setting.seed}
        with Run(
            device="cpu",
            num_threads=1,  # the number of threads changes the order of sums inside a kernel
            progress=False,
            nonfinite="skip",
            max_skips=10**6,
            init_scale=2.0**10,  # low enough that a usual model does not skip the few windows there are
            **settings,
        ) as run:
            data, _ = task.data()
            data, collate_fn = _part(data, setting.num_samples)
            net = task.model()
            loader = run.loader(
                data,
                batch_size=setting.batch_size,
                micro_batch_size=setting.micro_batch_size,
                shuffle=True,
                drop_last=setting.drop_last,
                collate_fn=collate_fn,
            )
            optimizer = task.optimizer(net, task.learning_rate)
            schedule = task.schedule(optimizer, setting.windows)
            things = (net, optimizer) if schedule is None else (net, optimizer, schedule)
            model, *_ = run.prepare(*things)
            run._engine.on_record.append(self.records.append)
            if self.keep:
                self._watch(net)
            for _ in itertools.takewhile(lambda _: len(self.steps) < setting.windows, run.epochs(10**6)):
                for window in loader:
                    self._window(task, run, net, model, window)
                    if len(self.steps) == setting.windows:
                        break
        modules = list(net.modules())
        dropout = any(isinstance(m, nn.modules.dropout._DropoutNd) and m.p > 0 for m in modules)
        batch_norm = any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in modules)
        return Recorded(self.steps, digest(net.state_dict()), dropout, batch_norm)

    def _watch(self, net: nn.Module) -> None:
        """Add up the absolute gradients of the micro-batches: the bound on the rounding of their sum needs them."""

        def add(name: str) -> Callable[[torch.Tensor], None]:
            def hook(grad: torch.Tensor) -> None:
                dense = grad.detach().to_dense().abs()
                self.sums[name] = self.sums[name] + dense if name in self.sums else dense

            return hook

        for name, param in net.named_parameters():
            if param.requires_grad:
                param.register_hook(add(name))  # type: ignore[no-untyped-call]

    def _window(self, task: Task, run: Run, net: nn.Module, model: nn.Module, window: Window) -> None:
        number, setting = len(self.steps), self.setting
        if setting.exchange == "fast":  # exact has the same weights without help, and its final ones are compared
            self._open(net, self.folder / setting.opening, number)
        self.sums.clear()
        exchanged = window._exchanged

        def capture() -> None:
            exchanged()
            # Later is too late: unscaling and clipping work in place, and a fused optimizer does so only when it steps.
            named = [(name, param.grad) for name, param in net.named_parameters() if param.grad is not None]
            self.grads = {name: grad.detach().to_dense().clone() for name, grad in named if grad is not None}

        window._exchanged = capture  # type: ignore[method-assign]
        scale = run.loss_scale or 1.0
        for batch in window:
            loss, weight = task.loss(model, batch)
            window.backward(loss, weight=weight)
        window.step(clip_norm=task.clip_norm)
        run._engine.settle()
        self._keep(run, net, window, scale)

    def _open(self, net: nn.Module, folder: Path, number: int) -> None:
        """Start from the reference's weights and buffers, so that differences do not add up over windows."""
        file = folder / f"{number}.pt"
        if file.exists():
            net.load_state_dict(torch.load(file, weights_only=True))
        else:
            folder.mkdir(exist_ok=True)
            torch.save(net.state_dict(), file)

    def _keep(self, run: Run, net: nn.Module, window: Window, scale: float) -> None:
        record, setting = self.records[-1], self.setting
        engine = run._engine
        factor = 1.0 if engine.reduction == "sum" else record.weight / float(engine.reference or 1.0)
        step = Step(
            digest=record.digest,
            samples=record.samples,
            weight=record.weight,
            loss=record.loss,
            skipped=record.skipped,
            scale=record.scale,
            gradients=digest(self.grads),
            zero=not any(bool(grad.any()) for grad in self.grads.values()),
            buffers=digest(dict(net.named_buffers())),
        )
        name = f"{len(self.steps)}.pt"
        if self.keep:
            sums = {name: self.sums.get(name, torch.zeros_like(grad)) for name, grad in self.grads.items()}
            kept = {"grads": self.grads, "sums": sums, "factor": factor * scale, "skipped": step.skipped}
            folder = self.folder / setting.truth
            folder.mkdir(exist_ok=True)
            torch.save(kept, folder / name)
            if setting.precision != "fp32" and setting.exchange == "fast":
                step.precision = self._to_fp32(torch.load(self.folder / setting.fp32 / name, weights_only=True), kept)
        elif run.is_main:
            truth = torch.load(self.folder / setting.truth / name, weights_only=True)
            if not (step.skipped and truth["skipped"]):
                leaves = window.num_micro_batches
                step.difference = by_order_of_sums(self.grads, truth["grads"], truth["sums"], leaves)
        self.steps.append(step)

    def _to_fp32(self, truth: dict[str, Any], kept: dict[str, Any]) -> Difference | None:
        """The true gradients of this precision against fp32's; None when one of the two was skipped."""
        if truth["skipped"] or kept["skipped"]:
            return None
        mine, theirs, sums = (
            {name: value.double() / source["factor"] for name, value in source[part].items()}
            for source, part in ((kept, "grads"), (truth, "grads"), (truth, "sums"))
        )
        return by_envelope(mine, theirs, sums, self.setting.precision)


def _part(data: Any, num_samples: int) -> tuple[Any, Any]:
    """`num_samples` samples spread over the data, and its collate_fn if it is a DataLoader."""
    collate_fn = None
    if isinstance(data, DataLoader):
        data, collate_fn = data.dataset, data.collate_fn
    if isinstance(data, IterableDataset) or not (isinstance(data, tuple | list) or hasattr(data, "__len__")):
        raise DataError(
            f"got training data of type {type(data).__name__}",
            "verify cuts a part out of a map-style dataset or tensors, so that the short last window comes early",
            "let data() return one of them",
        )
    if isinstance(data, tuple) and all(hasattr(part, "shape") for part in data):
        chosen = _spread(len(data[0]), num_samples)
        return tuple(part[chosen] for part in data), collate_fn
    if isinstance(data, torch.Tensor | np.ndarray):
        return data[_spread(len(data), num_samples)], collate_fn
    return Subset(data, _spread(len(data), num_samples)), collate_fn


def _spread(length: int, count: int) -> list[int]:
    """`count` of range(length), evenly spread: sorted data shows all its classes."""
    if length < count:
        raise DataError(
            f"got {length} training samples for a verification of {count}",
            "an epoch of it has a short last window after at least one full one",
            "pass a smaller batch_size, or more data",
        )
    return [number * length // count for number in range(count)]
