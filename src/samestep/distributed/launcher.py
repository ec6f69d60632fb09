"""Starting a script on several ranks: torch.distributed.run's own engine, with defaults for one machine."""

from __future__ import annotations

import dataclasses
import logging
import os
import sys
import uuid
import warnings
from typing import Any

from samestep.errors import ConfigError

__all__ = ["launch"]

_SHUTDOWN_S = 5  # seconds between asking a rank to end and killing it


def launch(
    command: list[str],
    *,
    nproc: int,
    module: bool = False,
    nnodes: str = "1",
    rdzv_endpoint: str | None = None,
    rdzv_id: str | None = None,
    max_restarts: int = 0,
) -> int:
    """Run `command` (a script or module, and its arguments) on `nproc` ranks here; the exit code.

    On one machine a free port is chosen, so launches at the same time do not meet. The ranks end with the launcher,
    however it ends, and with each other when one fails.

    Args:
        command: script or module name first.
        nproc: ranks on this machine.
        module: `command[0]` is a module name, as in `python -m`.
        nnodes: number of machines, or "min:max".
        rdzv_endpoint: host:port where several machines meet; needed for more than one.
        rdzv_id: name of the job where several machines meet.
        max_restarts: how often failed ranks are started again.

    Returns:
        0; or the exit code of the first rank that failed, 128 + n for a rank or launcher ended by signal n.

    Raises:
        ConfigError: for numbers that make no sense, or several machines without a place to meet.
    """
    low, high = _nnodes(nnodes)
    if nproc < 1 or max_restarts < 0:
        raise ConfigError(f"got nproc={nproc}, max_restarts={max_restarts}", "at least 1 rank and 0 restarts")
    if high > 1 and rdzv_endpoint is None:
        raise ConfigError(
            f"got nnodes={nnodes} without an endpoint",
            "several machines meet at one address",
            "pass --rdzv-endpoint HOST:PORT, the same on each",
        )
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // nproc)))
    options: dict[str, Any] = {
        "min_nodes": low,
        "max_nodes": high,
        "nproc_per_node": nproc,
        "run_id": rdzv_id or uuid.uuid4().hex,
        "rdzv_backend": "c10d",
        "rdzv_endpoint": rdzv_endpoint or "localhost:0",
        "max_restarts": max_restarts,
        "monitor_interval": 0.1,
        "start_method": "spawn",
        "local_addr": "127.0.0.1" if high == 1 else None,
        "shutdown_timeout": _SHUTDOWN_S,
    }
    entry = ["-u", "-m", "samestep.distributed._child", *(["-m"] if module else []), *command]
    return _run(options, entry)


def _run(options: dict[str, Any], entry: list[str]) -> int:
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch")
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    logging.getLogger("torch.distributed").setLevel(logging.CRITICAL)  # its banners repeat what a rank has said
    known = {field.name for field in dataclasses.fields(LaunchConfig)}
    options["logs_specs"] = DefaultLogsSpecs()
    config = LaunchConfig(**{name: value for name, value in options.items() if name in known})
    try:
        elastic_launch(config, sys.executable)(*entry)
    except ChildFailedError as e:
        rank, failure = e.get_first_failure()
        code = failure.exitcode
        how = f"was ended by signal {-code}" if code < 0 else f"exited with code {code}"
        print(f"samestep: rank {rank} {how}; the other ranks were ended", file=sys.stderr, flush=True)
        return 128 - code if code < 0 else code
    except SignalException as e:
        print(f"samestep: ended by {e.sigval.name}, and all ranks with it", file=sys.stderr, flush=True)
        return 128 + int(e.sigval)
    except KeyboardInterrupt:
        return 130
    return 0


def _nnodes(text: str) -> tuple[int, int]:
    try:
        numbers = [int(part) for part in str(text).split(":")]
    except ValueError:
        numbers = []
    if len(numbers) not in (1, 2) or numbers[0] < 1 or numbers[-1] < numbers[0]:
        raise ConfigError(f"got nnodes={text!r}", "it is a number of machines, or min:max", "pass 1, or 1:4")
    return numbers[0], numbers[-1]
