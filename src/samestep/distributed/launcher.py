"""Starting a script on several ranks: torch.distributed.run's own engine, with an end that leaves no process behind."""

from __future__ import annotations

import contextlib
import ctypes
import importlib.machinery
import logging
import os
import signal
import sys
import time
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from samestep.errors import ConfigError, RankError

__all__ = ["launch"]

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
_POLL_S = 0.03  # so short that of two ranks that fail one after the other, the first is seen first
_PR_SET_CHILD_SUBREAPER = 36


def launch(
    script_args: Sequence[str],
    *,
    nproc: int | str,
    module: bool = False,
    nnodes: int | str = "1",
    node_rank: int | None = None,
    rdzv_endpoint: str | None = None,
    rdzv_id: str | None = None,
    max_restarts: int = 0,
    grace_s: int = 6,
) -> int:
    """Run a Python script on several ranks; its exit code.

    On one machine the ranks meet at a free port, so launches at the same time do not meet each other. The ranks and
    their loader workers end with the launcher, however it ends, and with each other when one fails.

    Args:
        script_args: the script (or module) first, then its own arguments, which reach it untouched.
        nproc: ranks on this machine, or "gpu" (one a GPU), "cpu" (one a core), "auto" ("gpu" if there is any).
        module: the first of `script_args` is a module's name, as in `python -m`.
        nnodes: number of machines, or "min:max" for a run that machines may join and leave.
        node_rank: this machine's number; None leaves the numbering to the order of arrival.
        rdzv_endpoint: HOST:PORT where several machines meet; the same on each of them.
        rdzv_id: name of the run where several machines meet; the same on each of them.
        max_restarts: how often all ranks are started again after one failed.
        grace_s: seconds between asking a rank to end and killing it.

    Returns:
        0; or the exit code of the first rank that failed; 128 + n where a rank, or the launcher, met signal n.

    Raises:
        ConfigError: for settings that cannot be obeyed; no process has been started.
        RankError: when the machines did not find each other.
    """
    _check_script(script_args, module)
    ranks = _count_ranks(nproc)
    if max_restarts < 0 or grace_s < 0:
        raise ConfigError(
            f"got max_restarts={max_restarts}, grace_s={grace_s}", "neither is negative", "pass 0 or more"
        )
    options = _meeting(nnodes, node_rank, rdzv_endpoint, rdzv_id)
    options |= {"nproc_per_node": ranks, "max_restarts": max_restarts, "shutdown_timeout": grace_s}
    interpreter = [sys.executable, "-u", *(["-m"] if module else []), *script_args]
    bootstrap = ["-I", "-S", str(Path(__file__).with_name("_child.py")), str(os.getpid()), *interpreter]
    with _own_environment(ranks), _no_process_left() as outcome:
        outcome.append(_run(options, bootstrap))
    return outcome[0]


def _check_script(script_args: Sequence[str], module: bool) -> None:
    if not script_args or not script_args[0]:
        raise ConfigError("got no script", "launch runs a Python script", "name it: samestep launch -n 2 train.py")
    name = script_args[0]
    if module:
        path = [str(Path.cwd()), *sys.path]
        if importlib.machinery.PathFinder.find_spec(name.split(".")[0], path) is None:
            raise ConfigError(f"there is no module {name!r}", "-m takes the name of a module", "check the name")
    elif not Path(name).exists():
        raise ConfigError(f"there is no file {name!r} in {Path.cwd()}", "launch runs a Python script", "check the path")


def _count_ranks(nproc: int | str) -> int:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    limit = max(64, 8 * cores)  # far over any use: a slip of the keyboard, which would take the machine down
    if nproc in ("auto", "gpu"):
        import torch

        gpus = torch.cuda.device_count()
        if gpus == 0 and nproc == "gpu":
            raise ConfigError("got nproc='gpu'", "torch sees no GPU here", "pass a number, or 'cpu'")
        return gpus or cores
    if nproc == "cpu":
        return cores
    try:
        ranks = int(nproc)
    except ValueError:
        ranks = 0
    if not 1 <= ranks <= limit:
        raise ConfigError(
            f"got nproc={nproc}",
            f"it is a number of ranks from 1 to {limit} (this machine has {cores} cores), or auto, gpu or cpu",
            "pass the number of GPUs, or of CPU cores to use",
        )
    return ranks


def _meeting(
    nnodes: int | str, node_rank: int | None, rdzv_endpoint: str | None, rdzv_id: str | None
) -> dict[str, Any]:
    """Where and under which name the machines meet, in torch's words."""
    low, high = _machines(nnodes)
    if high == 1 and rdzv_endpoint is None:
        if node_rank:
            raise ConfigError(f"got node_rank={node_rank}", "there is one machine, number 0", "pass nnodes too")
        return {
            "min_nodes": 1,
            "max_nodes": 1,
            "run_id": rdzv_id or uuid.uuid4().hex,
            "rdzv_backend": "c10d",
            "rdzv_endpoint": "127.0.0.1:0",  # port 0: the system picks a free one
            "rdzv_configs": {"is_host": True},
            "local_addr": "127.0.0.1",
        }
    host, _, port = (rdzv_endpoint or "").rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ConfigError(
            f"got rdzv_endpoint={rdzv_endpoint!r} with nnodes={nnodes}",
            "several machines meet at one HOST:PORT",
            "pass --rdzv-endpoint HOST:PORT, the same on each machine",
        )
    if rdzv_id is None:
        raise ConfigError(
            f"got rdzv_endpoint={rdzv_endpoint!r} without an id",
            "the id keeps two runs that meet at one place apart",
            "pass --rdzv-id NAME, the same on each machine",
        )
    meeting = {"min_nodes": low, "max_nodes": high, "run_id": rdzv_id, "rdzv_endpoint": rdzv_endpoint}
    if node_rank is None:
        return meeting | {"rdzv_backend": "c10d", "rdzv_configs": {}}
    if low != high or not 0 <= node_rank < high:
        raise ConfigError(
            f"got node_rank={node_rank} with nnodes={nnodes}",
            "numbered machines are a fixed number, counted from 0",
            "leave node_rank out, or pass nnodes as one number",
        )
    return meeting | {"rdzv_backend": "static", "rdzv_configs": {"rank": node_rank}}


def _machines(nnodes: int | str) -> tuple[int, int]:
    try:
        numbers = [int(part) for part in str(nnodes).split(":")]
    except ValueError:
        numbers = []
    if len(numbers) not in (1, 2) or numbers[0] < 1 or numbers[-1] < numbers[0]:
        raise ConfigError(f"got nnodes={nnodes!r}", "it is a number of machines, or min:max", "pass 2, or 1:4")
    return numbers[0], numbers[-1]


def _run(options: dict[str, Any], bootstrap: list[str]) -> int:
    """Hand over to torch's agent and turn its answer into an exit code and at most one line."""
    from torch.distributed import DistError
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, PContext, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    if "LOGLEVEL" not in os.environ:  # torch's own switch; its lines repeat what the rank, or the line below, says
        for name in list(logging.root.manager.loggerDict):
            if name.startswith("torch.distributed.elastic"):
                logging.getLogger(name).setLevel(logging.CRITICAL)
    if PContext.close.__defaults__ == (None, 30):  # what torch grants the ranks that outlive a failed one
        PContext.close.__defaults__ = (None, options["shutdown_timeout"])
    # torch reads "$" in arguments as a macro; a doubled one is a plain one.
    entry = [word.replace("$", "$$") for word in bootstrap]
    config = LaunchConfig(**options, monitor_interval=_POLL_S, logs_specs=DefaultLogsSpecs(log_dir=os.devnull))
    try:
        elastic_launch(config, sys.executable)(*entry)
    except ChildFailedError as e:
        rank, failure = e.get_first_failure()
        code = int(failure.exitcode)
        how = f"was killed by {_signal_name(-code)}" if code < 0 else f"failed with exit code {code}"
        _say(f"rank {rank} {how}; the other ranks were ended")
        return 128 - code if code < 0 else code
    except SignalException as e:
        _say(f"got {e.sigval.name}; all ranks were ended")
        return 128 + int(e.sigval)
    except (RendezvousError, DistError) as e:
        raise RankError(
            f"the machines did not meet at {options['rdzv_endpoint']}: {e}",
            "each needs to reach it, and to name the same id and number of machines",
            "check the address, the firewall, and that the run has not ended already",
        ) from e
    return 0


def _say(text: str) -> None:
    print(f"samestep: {text}", file=sys.stderr, flush=True)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


@contextlib.contextmanager
def _own_environment(ranks: int) -> Iterator[None]:
    """The variables that this launch sets for its ranks, taken back afterwards."""
    before = dict(os.environ)
    if ranks > 1:
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # as torchrun does; cores times ranks threads would fight
        # When a rank fails, the others' store clients print long C++ traces about a lost connection.
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@contextlib.contextmanager
def _no_process_left() -> Iterator[list[int]]:
    """Adopt what a dead rank leaves behind (its loader workers), and kill that unless all went well."""
    handlers = {number: signal.getsignal(number) for number in _SIGNALS} if _on_main_thread() else {}
    before = set(_children())
    _adopt_orphans(True)
    outcome: list[int] = []
    try:
        yield outcome
    finally:
        for number in handlers:  # a second Ctrl-C must not cut this short; it takes two seconds at the most
            signal.signal(number, signal.SIG_IGN)
        if outcome != [0]:
            _kill_orphans(before)
        _adopt_orphans(False)
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _on_main_thread() -> bool:
    import threading

    return threading.current_thread() is threading.main_thread()


def _adopt_orphans(yes: bool) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, int(yes), 0, 0, 0)


def _children() -> dict[int, int]:
    """The process group of each child of this process, by process id."""
    found = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it ended meanwhile
            parent, group = stat.read_text().rpartition(")")[2].split()[1:3]
            if int(parent) == os.getpid():
                found[int(stat.parent.name)] = int(group)
    return found


def _kill_orphans(before: set[int]) -> None:
    """Kill adopted members of the ranks' process groups. One that leads its own group left its rank on purpose."""
    end = time.monotonic() + 2.0
    while time.monotonic() < end:
        orphans = [pid for pid, group in _children().items() if pid not in before and pid != group]
        if not orphans:
            return
        for pid in orphans:
            with contextlib.suppress(ProcessLookupError, ChildProcessError):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, os.WNOHANG)
        time.sleep(0.02)
