"""Say what works on this machine: each line is tried, not looked up.

A line says yes, no or unknown, and what to do where that helps. The exit code is 1 if something essential is broken:
fp32, or talking between processes.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib.metadata
import importlib.util
import json
import os
import platform
import shutil
import socket
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import samestep

EXAMPLES = """\
examples:
  samestep doctor
  samestep doctor --json | python -m json.tool
"""

_GIB = 2**30
_EXTRAS = (("tensorboard", "tensorboard"), ("torchmetrics", "metrics"), ("sklearn", "examples"))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Check:
    """One line of the report."""

    name: str
    state: str
    """yes, no or unknown."""
    detail: str = ""
    fix: str = ""
    """What to do about it."""
    essential: bool = False
    """Training is impossible, or impossible on several ranks, when the state is no."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's flags."""
    parser.add_argument("--json", action="store_true", help="one JSON object instead of lines")


def run(arguments: argparse.Namespace) -> int:
    """Try everything; 1 if something essential is broken."""
    checks = []
    for check in _all_checks():
        checks.append(check)
        if not arguments.json:
            detail = "; ".join(part for part in (check.detail, check.fix) if part)
            print(f"{check.state:<8}{check.name:<24}{detail}", flush=True)
    broken = [check.name for check in checks if check.essential and check.state == "no"]
    if arguments.json:
        print(json.dumps({"ok": not broken, "checks": [dataclasses.asdict(check) for check in checks]}, indent=2))
    elif broken:
        print(f"broken: {', '.join(broken)}")
    return 1 if broken else 0


def _all_checks() -> Iterator[Check]:
    yield Check(name="python", state="yes", detail=f"{platform.python_version()} at {sys.executable}")
    yield Check(name="samestep", state="yes", detail=samestep.__version__)
    try:
        import torch
    except (ImportError, OSError) as e:
        yield Check(name="torch", state="no", detail=_line(e), fix="pip install torch", essential=True)
    else:
        yield Check(name="torch", state="yes", detail=torch.__version__)
        yield from _devices()
        yield from _groups()
    yield from _machine()
    yield from _extras()


def _line(error: BaseException) -> str:
    """An error in one short line."""
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return text if len(text) <= 300 else text[:297] + "..."


def _attempt(name: str, attempt: Callable[[], str], *, essential: bool = False, fix: str = "") -> Check:
    """The check that runs `attempt`, which returns the detail or raises."""
    try:
        return Check(name=name, state="yes", detail=attempt(), essential=essential)
    except Exception as e:  # whatever it is, it is the answer
        return Check(name=name, state="no", detail=_line(e), fix=fix, essential=essential)


def _devices() -> Iterator[Check]:
    import torch

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 0
    yield Check(name="cpu", state="yes", detail=f"{cores} cores, {_memory()}")
    yield from _precisions("cpu")
    if not torch.cuda.is_available():
        built = torch.version.cuda or torch.version.hip
        why = f"torch is built for {built} but finds no usable GPU" if built else "this torch is built for the CPU only"
        yield Check(name="cuda", state="no", detail=why)
        return
    for index in range(torch.cuda.device_count()):
        p = torch.cuda.get_device_properties(index)
        detail = f"{p.name}, {p.total_memory / _GIB:.1f} GiB, capability {p.major}.{p.minor}"
        yield Check(name=f"cuda:{index}", state="yes", detail=detail)
        yield from _precisions(f"cuda:{index}")


def _memory() -> str:
    sizes = []
    with contextlib.suppress(ValueError, OSError, AttributeError):
        sizes.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    with contextlib.suppress(ValueError, OSError):  # a container's own limit; "max" where there is none
        sizes.append(int(Path("/sys/fs/cgroup/memory.max").read_text()))
    return f"{min(sizes) / _GIB:.1f} GiB memory" if sizes else "memory unknown"


def _precisions(device: str) -> Iterator[Check]:
    import torch

    cuda = device != "cpu"
    baseline = [0.0]

    def fp32() -> str:
        baseline[0] = _matmul_seconds(device, None)
        return ""

    def half(dtype: torch.dtype) -> str:
        if cuda and dtype == torch.bfloat16 and not torch.cuda.is_bf16_supported(including_emulation=False):
            raise RuntimeError("emulated, and slow: this GPU has no bf16 units")
        seconds = _matmul_seconds(device, dtype)
        if dtype == torch.float16:
            _scaler_step(device)
        ratio = seconds / baseline[0] if baseline[0] else 0.0
        if not ratio:
            return "speed unknown"
        speed = f"{ratio:.1f} x the time of fp32" if ratio >= 1 else f"{1 / ratio:.1f} x as fast as fp32"
        return f"{speed} in a 512 x 512 product"

    yield _attempt(f"  {device} fp32", fp32, essential=True)
    if cuda and torch.cuda.get_device_capability(device) >= (8, 0):
        yield Check(name=f"  {device} tf32", state="yes")
    else:
        yield Check(name=f"  {device} tf32", state="no", detail="needs an NVIDIA GPU of capability 8.0 or more")
    yield _attempt(f"  {device} bf16", lambda: half(torch.bfloat16))
    yield _attempt(f"  {device} fp16", lambda: half(torch.float16))


def _matmul_seconds(device: str, dtype: Any) -> float:
    """The shortest of some autocast products, checked against what it must give."""
    import torch

    x = torch.ones(512, 512, device=device)
    best = float("inf")
    for _ in range(5):
        start = time.perf_counter()
        with torch.autocast(torch.device(device).type, dtype=dtype, enabled=dtype is not None):
            y = x @ x
        corner = y[0, 0].item()  # also waits for a GPU
        best = min(best, time.perf_counter() - start)
    if corner != 512.0 or (dtype is not None and y.dtype != dtype):
        raise ArithmeticError(f"the product is {corner} in {y.dtype}, and must be 512.0 in {dtype or torch.float32}")
    return best


def _scaler_step(device: str) -> None:
    import torch

    weight = torch.nn.Parameter(torch.ones(4, device=device))
    optimizer = torch.optim.SGD([weight], lr=0.5)
    scaler = torch.amp.GradScaler(torch.device(device).type, init_scale=1024.0)
    scaler.scale((weight * 2).sum()).backward()  # type: ignore[no-untyped-call]
    scaler.step(optimizer)
    scaler.update()
    if weight.tolist() != [0.0] * 4:
        raise ArithmeticError(f"a scaled step gave {weight.tolist()}, and must give zeros")


def _reduce(backend: str) -> float:
    """On each rank of a check: the sum of rank + 1 over the ranks."""
    import torch
    import torch.distributed as dist

    device = "cuda" if backend == "nccl" else "cpu"
    dist.init_process_group(backend)
    x = torch.tensor([float(dist.get_rank() + 1)], device=device)
    dist.all_reduce(x)
    value = x.item()
    dist.destroy_process_group()
    return value


def _sum_over(backend: str, ranks: int, timeout_s: float) -> str:
    from samestep.testing import run_ranks

    start = time.perf_counter()
    results = run_ranks(_reduce, ranks, backend, timeout_s=timeout_s)
    right = ranks * (ranks + 1) / 2
    if results != [right] * ranks:
        raise ArithmeticError(f"all_reduce gave {results}, and must give {right}")
    return f"all_reduce right in {time.perf_counter() - start:.1f} s, start of the processes included"


def _groups() -> Iterator[Check]:
    import torch
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_gloo_available():
        yield Check(
            name="gloo", state="no", detail="not in this build of torch", fix="pip install torch", essential=True
        )
    else:
        fix = (
            "check that loopback (127.0.0.1) works and that GLOO_SOCKET_IFNAME, if set, names an interface of this host"
        )
        yield _attempt("gloo, 1 process", lambda: _sum_over("gloo", 1, 20.0), essential=True, fix=fix)
        yield _attempt("gloo, 2 processes", lambda: _sum_over("gloo", 2, 6.0), essential=True, fix=fix)
    if not dist.is_available() or not dist.is_nccl_available():
        yield Check(name="nccl", state="no", detail="not in this build of torch; ranks on the CPU use gloo")
    elif not torch.cuda.is_available():
        yield Check(name="nccl", state="unknown", detail="in this build of torch, but there is no GPU to try it on")
    else:
        yield _attempt("nccl, 1 process", lambda: _sum_over("nccl", 1, 20.0), essential=True, fix="set NCCL_DEBUG=INFO")


def _machine() -> Iterator[Check]:
    def port() -> str:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            probe.listen()
            return ""

    yield _attempt("free port on loopback", port, essential=True)
    try:
        import resource

        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    except (ImportError, OSError, ValueError):
        yield Check(name="open files", state="unknown")
    else:
        low = soft != resource.RLIM_INFINITY and soft < 4096
        fix = f"loader workers may need more than 4096: ulimit -n {hard}" if low else ""
        yield Check(name="open files", state="no" if low else "yes", detail=f"limit {soft}", fix=fix)
    try:
        size = shutil.disk_usage("/dev/shm").free
    except OSError:
        yield Check(name="shared memory", state="unknown", detail="there is no /dev/shm")
    else:
        fix = "loader workers pass batches through it: start the container with --shm-size=8g" if size < _GIB else ""
        state = "no" if size < _GIB else "yes"
        yield Check(name="shared memory", state=state, detail=f"{size / _GIB:.1f} GiB free in /dev/shm", fix=fix)


def _extras() -> Iterator[Check]:
    for module, extra in _EXTRAS:
        if importlib.util.find_spec(module) is None:
            fix = f"{sys.executable} -m pip install 'samestep[{extra}]'"
            yield Check(name=module, state="no", detail="optional, not installed", fix=fix)
            continue
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            distribution = "scikit-learn" if module == "sklearn" else module
            yield Check(name=module, state="yes", detail=importlib.metadata.version(distribution))
