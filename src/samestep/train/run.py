"""The run: what a training script talks to. It owns everything around the loop; the loop stays the user's."""

from __future__ import annotations

import contextlib
import os
import time
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from samestep.config import RunConfig, refuse_unknown
from samestep.data.build import LoaderSpec, make_source
from samestep.data.fetch import seed_everything
from samestep.distributed.collectives import sum_numbers
from samestep.distributed.process_group import World
from samestep.errors import ConfigError, RankError, WindowError
from samestep.monitor.digests import Digests
from samestep.optim.ema import Ema
from samestep.optim.schedule import Every
from samestep.precision.compute import compute_mode
from samestep.precision.policy import choose_policy
from samestep.precision.scaler import LossScaler
from samestep.rng import Purpose, key
from samestep.train.agree import check_same_settings, first_failure
from samestep.train.buffers import BufferRule
from samestep.train.engine import Engine
from samestep.train.files import RunFiles
from samestep.train.loader import Loader
from samestep.train.prepare import Wrapping, prepare
from samestep.train.prepared import Prepared
from samestep.train.reporting import Reporting
from samestep.train.saving import Saving, collect, named_tensors

__all__ = ["Run"]


class Run(Reporting):
    """A training run, as a context manager.

    Example:
        >>> import samestep, torch
        >>> net = torch.nn.Linear(4, 2)
        >>> data = torch.randn(10, 4), torch.randint(0, 2, (10,))
        >>> with samestep.Run(precision="fp32", progress=False) as run:
        ...     model, optimizer = run.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
        ...     train = run.loader(data, batch_size=4, shuffle=True)
        ...     for epoch in run.epochs(1):
        ...         for window in train:
        ...             for x, y in window:
        ...                 window.backward(torch.nn.functional.cross_entropy(model(x), y))
        ...             window.step(clip_norm=1.0)
        >>> run.step
        3

    Args:
        directory: where checkpoints and the ledger go; None writes nothing.
        settings: the fields of `samestep.RunConfig`.

    Raises:
        ConfigError: for a setting that cannot be obeyed here.
        RunDirError: for a directory that another run is using, or that cannot be written (on entry).
        CheckpointError: when there is a checkpoint to continue and it cannot be (on entry).
    """

    def __init__(self, directory: str | os.PathLike[str] | None = None, **settings: Any) -> None:
        refuse_unknown(settings)
        self.config = RunConfig(directory=None if directory is None else Path(directory), **settings)
        self.epoch = 0
        self._entered = self._used = False
        self._loaders: dict[str, Loader] = {}
        self._registered: dict[str, Any] = {}
        self._rules: dict[str, BufferRule] = {}
        self._evaluated = None
        self._digests: Digests | None = None

    # Begin and end ----------------------------------------------------------------------------------------------------

    def __enter__(self) -> Run:
        config = self.config
        if self._used:
            raise ConfigError("a Run was entered twice", "a Run is one run", "make a new Run")
        self._entered = self._used = True
        with contextlib.ExitStack() as stack:
            self.world = World(config.device, config.timeout_s)
            stack.callback(self.world.close)
            self.device = self.world.device
            self.policy = choose_policy(config.precision, self.device)
            stack.enter_context(self.policy.matmul_mode())
            stack.enter_context(compute_mode(self.device, config.exchange == "exact", config.num_threads))
            check_same_settings(self.world, config)
            self.files = RunFiles(config, self.world)
            stack.callback(self.files.close)
            self.saving = Saving(config.directory, config, self.world, self.files.display.note)
            self._engine = self._make_engine()
            self.files.begin(self.saving.resumed, self._engine, self.policy)
            if config.digest_every is not None and self.world.is_main and config.directory is not None:
                self._digests = Digests(
                    config.digest_every, lambda: named_tensors(self._engine.models), self.files.event
                )
            seed_everything(key(config.seed, Purpose.MODEL), self.device)
            self.epoch = int(self.saving.meta.get("position", {}).get("epoch", 0))
            stack.callback(self._close_loaders)
            self._stack = stack.pop_all()
        return self

    def _close_loaders(self) -> None:
        for loader in self._loaders.values():
            loader.source.close()

    def _make_engine(self) -> Engine:
        config, scaler = self.config, None
        if self.policy.scales_loss:
            scaler = LossScaler(self.device, init_scale=config.init_scale, growth_interval=config.growth_interval)
        nonfinite = config.nonfinite
        if nonfinite == "auto":
            nonfinite = "skip" if scaler is not None else "raise"
        engine = Engine(self.world, self.policy, config.seed, scaler, nonfinite, config.max_skips)
        engine.exact = config.exchange == "exact"
        engine.find_nonfinite = config.find_nonfinite
        self.saving.restore_engine(engine)
        return engine

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: types.TracebackType | None
    ) -> None:
        try:
            if error is None:
                self._settle()
        finally:
            ending = "done" if error is None else f"{type(error).__name__}: {error}"
            self.files.event("end", step=self._engine.step, status=ending)
            first = first_failure(self.world, error) if error is not None else None
            self._stack.close()
            self._entered = False
        if first is not None:
            follows = RankError(first, "this rank stops with it")
            follows.follows = True
            raise follows from None
        if isinstance(error, Exception) and self.world_size > 1:
            error.add_note(f"(on rank {self.rank} of {self.world_size})")

    # Prepare ----------------------------------------------------------------------------------------------------------

    def prepare(
        self,
        *things: Any,
        schedule_every: Every = "window",
        find_unused_parameters: bool = False,
        static_graph: bool = False,
        bucket_cap_mb: float | None = None,
        buffers: Mapping[str, BufferRule] | None = None,
    ) -> Any:
        """Take models, optimizers and schedules over; restore them when the run continues a checkpoint.

        Args:
            things: modules, optimizers and schedules, in any order and number.
            schedule_every: when schedules advance: "window" (with each applied update), "epoch", or "manual".
            find_unused_parameters: as in DistributedDataParallel.
            static_graph: as in DistributedDataParallel.
            bucket_cap_mb: as in DistributedDataParallel.
            buffers: {buffer name: "mean" | "last" | function} for buffers that training changes.

        Returns:
            The prepared things in the order given; one thing alone, not in a tuple.

        Raises:
            ModelError: for a model that cannot be prepared, or an optimizer of parameters that belong to no prepared one.
            ConfigError: for anything that is none of the three.
        """
        self._check_entered("prepare")
        wrapping = Wrapping(find_unused_parameters, static_graph, bucket_cap_mb)
        self._rules.update(buffers or {})
        results = prepare(self._engine, self.saving, things, wrapping, schedule_every, self._rules)
        return results[0] if len(results) == 1 else results

    def ema(self, model: Prepared, decay: float) -> Ema:
        """An exponential moving average of a prepared model's weights; it advances with applied updates and is saved."""
        self._check_entered("ema")
        ema = Ema(model, decay)
        self.saving.restore(f"ema{len(self._engine.emas)}", ema)
        self._engine.emas.append(ema)
        return ema

    def register(self, name: str, thing: Any) -> Any:
        """Save `thing` (state_dict and load_state_dict; plain values and tensors) with each checkpoint; restore it now."""
        self._check_entered("register")
        if name in self._registered or not (hasattr(thing, "state_dict") and hasattr(thing, "load_state_dict")):
            raise ConfigError(
                f"got register({name!r}, {type(thing).__name__})",
                "a name is used once, for an object with state_dict() and load_state_dict()",
                "rename it, or give it the two methods",
            )
        self.saving.restore(f"user/{name}", thing)
        self._registered[name] = thing
        return thing

    def loader(
        self,
        data: Any,
        *,
        batch_size: int | None = None,
        micro_batch_size: int | None = None,
        micro_batches: int | None = None,
        shuffle: bool = False,
        weights: Sequence[float] | None = None,
        num_draws: int | None = None,
        sampler: Any = None,
        batch_sampler: Any = None,
        drop_last: bool = False,
        collate_fn: Callable[[Any], Any] | None = None,
        pin_memory: bool | None = None,
        name: str | None = None,
        **options: Any,
    ) -> Loader:
        """An epoch of windows over `data`: each sample once, the same global batches on any number of ranks.

        Args:
            data: a map-style dataset, tensors or arrays of equal length, or a torch DataLoader, whose dataset, order,
                collate_fn and workers are kept and whose batch_size is taken as the global one.
            batch_size: samples of one optimizer step over all ranks.
            micro_batch_size: samples of one forward; None: one micro-batch a rank at the first start, then as recorded.
            micro_batches: instead of micro_batch_size: how many make a window.
            shuffle: a new order each epoch, a function of (seed, epoch).
            weights: draw samples with replacement, in proportion to these.
            num_draws: draws an epoch with `weights`; None: the dataset's length.
            sampler: an order of your own; drawn whole on each rank with keyed seeds.
            batch_sampler: micro-batches of your own, dealt whole to the ranks and weighted by size.
            drop_last: leave the short last window out.
            collate_fn: as in DataLoader.
            pin_memory: None: on a GPU.
            name: of the loader's position in the checkpoint; None: "loader" and a number.
            options: num_workers, prefetch_factor, timeout, worker_init_fn, multiprocessing_context of DataLoader.

        Raises:
            ConfigError, DataError: for settings or data that cannot be used.
            CheckpointError: when the run continues a checkpoint and this would change the rest of its epoch.
        """
        self._check_entered("loader")
        name = name or f"loader{len(self._loaders)}"
        if name in self._loaders:
            raise ConfigError(f"got a second loader named {name!r}", "a name is used once", "pass another name=")
        spec = LoaderSpec(
            data=data,
            batch_size=batch_size,
            micro_batch_size=micro_batch_size,
            micro_batches=self.config.micro_batches if micro_batches is micro_batch_size is None else micro_batches,
            shuffle=shuffle,
            weights=weights,
            num_draws=num_draws,
            sampler=sampler,
            batch_sampler=batch_sampler,
            drop_last=drop_last,
            collate_fn=collate_fn,
            pin_memory=pin_memory,
            options=options,
        )
        saved = self.saving.meta.get("loaders", {}).get(name)
        source = make_source(
            spec,
            seed=self.config.seed,
            world_size=self.world_size,
            device=self.device,
            recorded=saved["source"] if saved else None,
            agree=lambda numbers: sum_numbers(self.world, numbers),
        )
        loader = Loader(self._engine, source, name, self._after_window)
        if saved:
            loader.set_position(*saved["position"])
        self._loaders[name] = loader
        if self.files.display.num_windows is None:
            self.files.display.num_windows = source.num_windows
        return loader

    # The loop ---------------------------------------------------------------------------------------------------------

    def epochs(self, num_epochs: int) -> Iterator[int]:
        """The epochs still to do, up to `num_epochs` in all; a restart continues in the middle of the one it stopped in."""
        self._check_entered("epochs")
        if isinstance(num_epochs, bool) or not isinstance(num_epochs, int) or num_epochs < 0:
            raise ConfigError(f"got epochs({num_epochs!r})", "it is a whole number, 0 or more", "pass 10")
        self._check_restored()
        self.files.display.num_epochs = num_epochs
        self.files.event(
            "epochs", step=self._engine.step, num_epochs=num_epochs, num_windows=self.files.display.num_windows
        )
        self._digest()  # before the first window: other initial weights show here
        for epoch in range(self.epoch, num_epochs):
            self.epoch = epoch
            for loader in self._loaders.values():
                loader.begin_epoch(epoch)
            yield epoch
            self._engine.settle()
            self._compare_ranks(epoch)
            self._engine.schedules.advance("epoch")
            self.epoch = epoch + 1
            for loader in self._loaders.values():
                loader.begin_epoch(epoch + 1)
            self.save()

    def _check_restored(self) -> None:
        self.saving.check_all_claimed()
        missing = self.saving.meta.get("loaders", {}).keys() - self._loaders.keys()
        if missing:
            raise ConfigError(
                f"the checkpoint is in the middle of {', '.join(sorted(missing))}, which this script did not make",
                "a restart makes the same loaders",
                "create them before run.epochs",
            )

    def _settle(self) -> None:
        self._engine.settle()
        if self._digests is not None:
            self._digests.flush()

    def _digest(self) -> None:
        if self._digests is not None:
            self._digests.after_window(self._engine.step)

    def _after_window(self) -> None:
        self._digest()
        every = self.config.save_every
        if every is not None and self._engine.step % every == 0:
            self.save()

    def save(self) -> Path | None:
        """Write a checkpoint now, at a window boundary; the path. Safe to call on all ranks, or on main alone.

        On the other ranks it returns when main's is written.

        Raises:
            CheckpointError: when it cannot be written; earlier ones stay whole.
            RankError: on another rank, when main never saves at this step.
        """
        self._check_entered("save")
        window = self._engine.window
        if window is not None and (window.current is not None or window._stepped):
            raise WindowError(
                "run.save in the middle of a window", "a checkpoint is of a window's end", "call it after window.step()"
            )
        if self.config.directory is None:
            return None
        begin = time.perf_counter()
        self._settle()
        position = {"epoch": self.epoch}
        trained = {name: loader for name, loader in self._loaders.items() if loader.trained}
        meta = {
            "position": position,
            "loaders": {
                name: {"position": list(loader.position), "source": loader.source.describe()}
                for name, loader in trained.items()
            },
            "config": self.config.to_json(),
            "precision": self.policy.name,
            "world_size": self.world_size,
        }
        state = collect(self._engine, self._registered) if self.is_main else {}
        path = self.saving.save(state, meta, self._engine.step)
        seconds = round(time.perf_counter() - begin, 6)
        self.files.event("checkpoint", step=self._engine.step, path=str(path), seconds=seconds)
        return path
