"""The process group of a run: set up on entry, torn down on exit, also after an error."""

from __future__ import annotations

import datetime
import itertools
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from samestep.distributed.env import Ranks, read_environment
from samestep.errors import ConfigError, RankError

__all__ = ["World", "choose_device"]

_Group = Any  # torch types a process group as `ProcessGroup | None` in some versions and as an int in others


def choose_device(requested: str | torch.device | None, local_rank: int) -> torch.device:
    """The device of this rank: `cuda:local_rank` where there is CUDA, else the CPU.

    Args:
        requested: None, "auto", or anything `torch.device` takes; "cuda" gets this rank's index.
        local_rank: number of this rank on its machine.

    Raises:
        ConfigError: for a device that this machine or build does not have.
    """
    if requested is None or requested == "auto":
        requested = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(requested)
    except (RuntimeError, TypeError) as e:
        raise ConfigError(f"got device={requested!r}", "a device is 'cpu', 'cuda' or 'cuda:<index>'", str(e)) from None
    if device.type == "cuda":
        count = torch.cuda.device_count()
        index = local_rank if device.index is None else device.index
        if index >= count:
            raise ConfigError(
                f"got device={requested!r} on local_rank {local_rank}",
                f"this machine shows {count} CUDA device(s)",
                "start fewer ranks here, or pass device='cpu'",
            )
        return torch.device("cuda", index)
    if device.type not in ("cpu", "meta"):
        raise ConfigError(f"got device={requested!r}", "Samestep trains on 'cpu' and 'cuda'", "pass one of them")
    return device


_RUNS = itertools.count()
_RETIRED: list[_Group] = []
"""Groups of runs that have ended; a few hundred bytes each."""


class World:
    """The ranks of a run and the groups they talk through. Alone (world_size 1) there is no group at all.

    Three groups, so that no kind of traffic can be matched with another: `gradients` (nccl on CUDA, gloo on the CPU),
    `statistics` (the same backend), and `control` (gloo, CPU tensors: agreements, small messages).

    Args:
        device: this rank's device, or None to choose.
        timeout_s: seconds after which a collective that a rank did not join fails.
        ranks: this rank's place; read from the environment of torchrun or SLURM when None.
    """

    def __init__(
        self, device: str | torch.device | None = None, timeout_s: float = 600.0, ranks: Ranks | None = None
    ) -> None:
        if not timeout_s > 0:
            raise ConfigError(f"got timeout_s={timeout_s!r}", "a time-out is a positive number of seconds", "pass 600")
        self.timeout = datetime.timedelta(seconds=timeout_s)
        self._owns_default = False
        adopted = dist.is_available() and dist.is_initialized()
        self.ranks = ranks or (_ranks_of_default_group() if adopted else read_environment())
        self.device = choose_device(device, self.ranks.local_rank)
        self.gradients: _Group = None
        self.statistics: _Group = None
        self.control: _Group = None
        self._waiting: _Group = None
        self._others: list[_Group] = []
        self._store: Any = None
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        if self.size > 1:
            if adopted:
                self._store = dist.distributed_c10d._get_default_store()
            else:
                self._init_default()
            self._make_groups()

    @property
    def rank(self) -> int:
        """Global number of this rank."""
        return self.ranks.rank

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.ranks.world_size

    @property
    def is_main(self) -> bool:
        """True on global rank 0 only, never on every local rank 0."""
        return self.ranks.rank == 0

    @property
    def waiting(self) -> _Group:
        """A gloo group without a practical time-out, for waiting on a long preparation; made by all ranks together."""
        if self._waiting is None and self.size > 1:
            self._waiting = dist.new_group(backend="gloo", timeout=datetime.timedelta(days=30))
        return self._waiting

    def group_for_model(self, number: int) -> _Group:
        """The group of the `number`-th model's gradients: one each, so that two models' buckets are never mixed up."""
        if self.size == 1 or number == 0:
            return self.gradients
        backend = "nccl" if self.device.type == "cuda" else "gloo"
        self._others.append(dist.new_group(backend=backend, timeout=self.timeout))
        return self._others[-1]

    def _init_default(self) -> None:
        cuda = self.device.type == "cuda"
        store, rank, size = next(_rendezvous(self.ranks, self.timeout))
        store.set_timeout(self.timeout)
        # The launcher's store outlives a run: the next one in this process must not read this one's addresses in it.
        store = dist.PrefixStore(f"samestep/{next(_RUNS)}", store)  # type: ignore[attr-defined]
        self._store = store
        dist.init_process_group(
            "nccl" if cuda else "gloo",
            store=store,
            rank=rank,
            world_size=size,
            timeout=self.timeout,
            device_id=self.device if cuda else None,
        )
        self._owns_default = True

    def _make_groups(self) -> None:
        backend = "nccl" if self.device.type == "cuda" else "gloo"
        self.gradients = dist.new_group(backend=backend, timeout=self.timeout)
        self.statistics = dist.new_group(backend=backend, timeout=self.timeout)
        self.control = dist.new_group(backend="gloo", timeout=self.timeout)

    def announce(self, name: str, value: str = "1") -> None:
        """Leave a short text under `name` where all ranks can read it. Not a collective."""
        if self._store is not None:
            self._store.set(name, value)

    def announce_first(self, name: str, value: str) -> str:
        """Leave `value` under `name` unless there is one; what stands there now. Not a collective."""
        if self._store is None:
            return value
        try:
            return str(self._store.compare_set(name, "", value).decode())
        except RuntimeError:  # the rank that kept the store is gone
            return value

    def wait_for(self, name: str, what: str) -> None:
        """Wait until `name` is announced.

        Raises:
            RankError: after the time-out, naming `what` did not happen.
        """
        if self._store is None:
            return
        try:
            self._store.wait([name], self.timeout)
        except RuntimeError as e:
            raise RankError(
                f"rank {self.rank} waited {self.timeout.total_seconds():g} s for {what}",
                "it did not happen",
                "call it on main too, at the same step",
            ) from e

    def close(self) -> None:
        """Destroy what this object made. Safe to call twice, and after an error."""
        # A DDP module that outlives the run would be the last holder of its group, and freeing one there can deadlock:
        # gloo's threads are joined by a thread that holds the interpreter's lock, which one of them waits for.
        _RETIRED.extend(g for g in (self.gradients, self.statistics, self.control, self._waiting, *self._others) if g)
        if self._owns_default and dist.is_initialized():
            dist.destroy_process_group()
        elif self.size > 1 and dist.is_initialized():
            for group in (self.gradients, self.statistics, self.control, self._waiting, *self._others):
                if group is not None:
                    dist.destroy_process_group(group)
        self.gradients = self.statistics = self.control = self._waiting = self._store = None
        self._others = []
        self._owns_default = False


def _rendezvous(ranks: Ranks, timeout: datetime.timedelta) -> Iterator[tuple[Any, int, int]]:
    """The store of the launcher; `rank` and `world_size` are given so that SLURM needs no RANK variables."""
    return iter(rendezvous("env://", rank=ranks.rank, world_size=ranks.world_size, timeout=timeout))


def _ranks_of_default_group() -> Ranks:
    """This rank's place in a group that the caller made, e.g. with `dist.init_process_group`."""
    try:
        environment = read_environment()
        if environment.world_size == dist.get_world_size() and environment.rank == dist.get_rank():
            return environment
    except ConfigError:
        pass  # the group exists, so what the environment says does not matter
    rank, size = dist.get_rank(), dist.get_world_size()
    return Ranks(rank=rank, local_rank=rank, world_size=size, local_world_size=size, node_rank=0)
