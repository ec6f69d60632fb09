"""Running a function on several ranks in a test: one helper, a time limit, and every rank's traceback."""

from __future__ import annotations

import contextlib
import dataclasses
import faulthandler
import multiprocessing
import multiprocessing.connection
import os
import pickle
import random
import secrets
import signal
import socket
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

__all__ = ["RanksFailed", "free_port", "run_ranks"]

_CONTEXT = multiprocessing.get_context("forkserver")
# The server imports torch once (single-threaded, so forking it is safe); a rank then starts in milliseconds.
# torch imports its compiler when the first optimizer is made, which costs a second.
_PRELOAD = ["torch", "torch._dynamo", "samestep.train.run", "samestep.train.fit", "samestep.train.plain"]
_CONTEXT.set_forkserver_preload(_PRELOAD + [name for name in ("pytest", "hypothesis") if name in sys.modules])

_AFTER_FAILURE_S = 20.0  # for the other ranks, so that they can fail by name; they hardly ever need it
_EXIT_S = 5.0  # from a rank's return to the end of its process
_STACK_SIGNAL = (
    signal.SIGRTMAX - 1 if hasattr(signal, "SIGRTMAX") else signal.SIGUSR2
)  # tests are free to use the others


class RanksFailed(AssertionError):  # noqa: N818 - says what happened, like pytest's Failed
    """A rank raised, died, or did not end in time; the message has every such rank's traceback or stack.

    Attributes:
        errors: the exception of each rank that raised one that can be pickled.
        reports: what the message says of each failed rank.
    """

    def __init__(self, message: str, errors: dict[int, BaseException], reports: dict[int, str]) -> None:
        super().__init__(message)
        self.errors, self.reports = errors, reports


def free_port() -> int:
    """A TCP port that was free on loopback a moment ago.

    It is outside the range from which Linux serves outgoing connections, and drawn at random without regard to any
    seed: two tests at the same time do not get the same one, nor does another connection take it meanwhile.
    """
    while True:
        port = 15000 + secrets.randbelow(17000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def run_ranks(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout_s: float = 60.0,
    env: Mapping[str, str] | None = None,
) -> list[Any]:
    """Call `fn(*args)` in `world_size` new processes whose environment is torchrun's; their results, in rank order.

    `fn` makes the process group itself, with `samestep.Run` or torch's init_process_group("gloo"). The processes have
    the caller's warning filters, one thread for torch, and fixed seeds.

    Args:
        fn: a module-level function.
        world_size: number of ranks.
        args: picklable.
        timeout_s: seconds until all ranks are killed.
        env: further environment variables.

    Raises:
        RanksFailed: unless every rank returned, and its process ended.
    """
    common = {
        **os.environ,
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "GROUP_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "OMP_NUM_THREADS": "1",
    }
    filters = list(warnings.filters)
    method = multiprocessing.get_start_method()
    deadline = time.monotonic() + timeout_s
    ranks: list[_Rank] = []
    with tempfile.TemporaryDirectory(prefix="samestep_ranks_") as stacks:
        try:
            for number in range(world_size):
                environment = {**common, "RANK": str(number), "LOCAL_RANK": str(number), **(env or {})}
                ranks.append(_start(number, stacks, (fn, args, environment, filters, method)))
            _collect(ranks, deadline)
        finally:
            for rank in ranks:
                _end(rank)
    reports = {rank.number: rank.report for rank in ranks if rank.report}
    if reports:
        errors = {rank.number: rank.error for rank in ranks if rank.error is not None}
        text = f"{len(reports)} of {world_size} ranks failed\n" + "\n".join(reports.values())
        raise RanksFailed(text, errors, reports)
    return [rank.result for rank in ranks]


@dataclasses.dataclass(eq=False)
class _Rank:
    number: int
    process: Any
    receiver: Any
    stack: Path
    result: Any = None
    error: BaseException | None = None
    report: str = ""


def _start(number: int, stacks: str, what: tuple[Any, ...]) -> _Rank:
    receiver, sender = _CONTEXT.Pipe(duplex=False)
    stack = Path(stacks, str(number))
    process = _CONTEXT.Process(target=_child, args=(*what, sender, str(stack)))
    process.start()
    sender.close()
    return _Rank(number, process, receiver, stack)


def _child(
    fn: Callable[..., Any],
    args: Any,
    environment: dict[str, str],
    filters: list[Any],
    method: str,
    sender: Any,
    stack: str,
) -> None:
    import numpy as np
    import torch

    os.setsid()  # a group of its own, so that a rank's loader workers can be ended with it
    # forkserver has made itself the default here; loader workers are to start as they would in the caller.
    multiprocessing.set_start_method(method, force=True)
    os.environ.clear()
    os.environ.update(environment)
    warnings.filters[:] = filters  # type: ignore[index]
    warnings.filterwarnings("ignore", message="^$", append=True)  # matches nothing, but makes Python see the others
    torch.set_num_threads(1)
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    # Never closed, so that a process that does not end after its function can still be asked.
    faulthandler.register(_STACK_SIGNAL, file=open(stack, "w"), all_threads=True)  # noqa: PTH123, SIM115
    try:
        outcome = ("result", fn(*args), "")
    except BaseException as e:
        outcome = ("error", e, traceback.format_exc())
    sender.send_bytes(_pickled(*outcome))
    sender.close()


def _pickled(kind: str, value: Any, text: str) -> bytes:
    """Plain pickle: multiprocessing's own would share tensors' memory with a process that is about to end."""
    try:
        data = pickle.dumps((kind, value, text))
        pickle.loads(data)  # noqa: S301 - our own bytes; some exceptions can be written but not read
        return data
    except Exception:
        if kind == "error":
            return pickle.dumps((kind, None, text))
        return pickle.dumps(("error", None, f"the result cannot be pickled\n{traceback.format_exc()}"))


def _collect(ranks: list[_Rank], deadline: float) -> None:
    """Wait for each rank's answer, then for its end."""
    waiting: dict[Any, _Rank] = {rank.receiver: rank for rank in ranks}
    failed_first = False
    while waiting and (left := deadline - time.monotonic()) > 0:
        for receiver in multiprocessing.connection.wait(list(waiting), left):
            rank = waiting.pop(receiver)
            _receive(rank)
            if rank.report and not failed_first:
                failed_first, deadline = True, min(deadline, time.monotonic() + _AFTER_FAILURE_S)
    for rank in waiting.values():
        _ask_for_stack(rank, "had not ended in time" + (" after another failed" if failed_first else ""))
    end = max(deadline, time.monotonic()) if failed_first else time.monotonic() + _EXIT_S
    for rank in ranks:
        rank.process.join(0 if rank in waiting.values() else min(_EXIT_S, max(0.1, end - time.monotonic())))
        if rank.process.is_alive() and not rank.report:
            _ask_for_stack(rank, "returned, but its process had not ended (a thread or process that it started?)")


def _receive(rank: _Rank) -> None:
    try:
        kind, value, text = pickle.loads(rank.receiver.recv_bytes())  # noqa: S301 - from our own child
    except EOFError:
        rank.process.join(_EXIT_S)
        code = rank.process.exitcode
        how = f"by signal {signal.Signals(-code).name}" if code is not None and code < 0 else f"with exit code {code}"
        rank.report = f"--- rank {rank.number} died {how}"
        return
    if kind == "result":
        rank.result = value
    else:
        rank.error, rank.report = value, f"--- rank {rank.number} raised:\n{text}"


def _ask_for_stack(rank: _Rank, what: str) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(rank.process.pid, _STACK_SIGNAL)  # answered in C, also where Python waits for a collective
    end = time.monotonic() + 2.0
    text = ""
    while time.monotonic() < end and not (text and text == _read(rank.stack)):
        text = _read(rank.stack)
        time.sleep(0.05)
    rank.report = f"--- rank {rank.number} {what}; its stack:\n{text}"


def _read(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""


def _end(rank: _Rank) -> None:
    """Nothing of this rank stays: neither its process nor those that it started."""
    for kill in (os.killpg, os.kill):  # the first fails while the process has not made its group yet
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if kill is os.killpg or rank.process.is_alive():
                kill(rank.process.pid, signal.SIGKILL)
    rank.process.join()
    rank.receiver.close()
    rank.process.close()
