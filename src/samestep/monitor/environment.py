"""What a run runs on, for its ledger and report."""

from __future__ import annotations

import os
import platform
import time
from pathlib import Path
from typing import Any

import torch

from samestep.monitor.flops import device_name

__all__ = ["describe", "process_start"]


def describe(device: torch.device) -> dict[str, Any]:
    """Versions, device and machine, as JSON values; what is unknown is None."""
    cuda = device.type == "cuda"
    return {
        "process_start": process_start(),
        "pid": os.getpid(),
        "host": platform.node(),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "device_name": device_name(device),
        "device_memory": torch.cuda.get_device_properties(device).total_memory if cuda else None,
        "cuda": torch.version.cuda,
        "cpus": os.cpu_count(),
        "compute_threads": torch.get_num_threads(),
    }


def process_start() -> float | None:
    """When this process started, in seconds since 1970; None where the system does not tell (it is not Linux)."""
    try:
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        up = float(Path("/proc/uptime").read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return None
    return round(time.time() - (up - ticks / os.sysconf("SC_CLK_TCK")), 2)
