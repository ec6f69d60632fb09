"""Running a function on several ranks in a test: one helper, a time limit, and every rank's traceback."""

from __future__ import annotations

import faulthandler
import multiprocessing
import multiprocessing.connection
import os
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from typing import Any, cast

__all__ = ["RanksFailed", "free_port", "run_ranks"]

_CONTEXT = multiprocessing.get_context("forkserver")
# The server imports torch once (single-threaded, so forking it is safe); a rank then starts in milliseconds.
# torch imports its compiler when the first optimizer is made, which costs a second.
_PRELOAD = ["torch", "torch._dynamo", "samestep.train.run", "samestep.train.fit", "samestep.train.plain"]
_CONTEXT.set_forkserver_preload(_PRELOAD + [name for name in ("pytest", "hypothesis") if name in sys.modules])


class RanksFailed(AssertionError):  # noqa: N818 - says what happened, like pytest's Failed
    """A rank raised, died, or did not end in time; the message has every such rank's traceback or stack."""


def free_port() -> int:
    """A TCP port that was free on loopback a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def run_ranks(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout_s: float = 60.0,
    env: Mapping[str, str] | None = None,
) -> list[Any]:
    """Call `fn(*args)` in `world_size` new processes whose environment is torchrun's; their results, in rank order.

    `fn` makes the process group itself, with `samestep.Run` or torch's init_process_group("gloo").

    Args:
        fn: a module-level function.
        world_size: number of ranks.
        args: picklable.
        timeout_s: seconds until all ranks are killed.
        env: further environment variables.

    Raises:
        RanksFailed: unless every rank returned.
    """
    port, method = free_port(), multiprocessing.get_start_method()
    with tempfile.TemporaryDirectory() as stacks:
        ranks = []
        for rank in range(world_size):
            environment = {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(world_size),
                "LOCAL_WORLD_SIZE": str(world_size),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "OMP_NUM_THREADS": "1",
                **(env or {}),
            }
            receiver, sender = _CONTEXT.Pipe(duplex=False)
            stack = os.path.join(stacks, str(rank))  # noqa: PTH118
            process = _CONTEXT.Process(target=_child, args=(fn, args, environment, sender, stack, timeout_s, method))
            process.start()
            sender.close()
            ranks.append((process, receiver))
        outcomes = _collect(ranks, time.monotonic() + timeout_s)
        failures = [_describe(rank, outcome, stacks) for rank, outcome in enumerate(outcomes) if outcome[0] != "result"]
    if failures:
        raise RanksFailed(f"{len(failures)} of {world_size} ranks failed\n" + "\n".join(failures))
    return [outcome[1] for outcome in outcomes]


def _child(
    fn: Callable[..., Any],
    args: Any,
    environment: dict[str, str],
    sender: Any,
    stack: str,
    timeout_s: float,
    method: str,
) -> None:
    import torch

    # forkserver has made itself the default here; loader workers are to start as they would in the caller.
    multiprocessing.set_start_method(method, force=True)
    os.environ.update(environment)
    torch.set_num_threads(1)
    with open(stack, "w") as file:  # noqa: PTH123
        faulthandler.dump_traceback_later(max(timeout_s - 1.0, 0.5 * timeout_s), file=file)
        try:
            outcome = ("result", fn(*args))
        except BaseException:
            outcome = ("error", traceback.format_exc())
        faulthandler.cancel_dump_traceback_later()
        sender.send(outcome)
        sender.close()


def _collect(ranks: list[tuple[Any, Any]], deadline: float) -> list[tuple[str, Any]]:
    outcomes: list[tuple[str, Any]] = [("unfinished", None)] * len(ranks)
    waiting: dict[Any, int] = {receiver: rank for rank, (_, receiver) in enumerate(ranks)}
    while waiting and (left := deadline - time.monotonic()) > 0:
        for receiver in multiprocessing.connection.wait(list(waiting), left):
            rank = waiting.pop(receiver)
            try:
                outcomes[rank] = cast(Any, receiver).recv()
            except EOFError:
                ranks[rank][0].join(5)
                outcomes[rank] = ("died", ranks[rank][0].exitcode)
    for process, receiver in ranks:
        process.join(max(0.0, min(5.0, deadline - time.monotonic())))
        if process.is_alive():
            process.kill()
            process.join()
        receiver.close()
        process.close()
    return outcomes


def _describe(rank: int, outcome: tuple[str, Any], stacks: str) -> str:
    kind, detail = outcome
    if kind == "error":
        return f"--- rank {rank} raised:\n{detail}"
    if kind == "died":
        return f"--- rank {rank} died with exit code {detail}"
    with open(os.path.join(stacks, str(rank))) as file:  # noqa: PTH118, PTH123
        return f"--- rank {rank} had not ended in time; its stack:\n{file.read()}"
