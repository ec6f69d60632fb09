"""Where the bits of a result come from besides its dtype: threads, and kernels that add in no fixed order."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import torch

from samestep.errors import ConfigError

__all__ = ["compute_mode"]


@contextlib.contextmanager
def compute_mode(device: torch.device, exact: bool, num_threads: int | None) -> Iterator[None]:
    """While the run lasts: its threads and, for the exact exchange, deterministic kernels only.

    An operation that has no deterministic kernel raises torch's own error, which names it.
    Source: "Reproducibility" note of the PyTorch documentation.

    Raises:
        ConfigError: when cuBLAS has been set to work in an order of its own.
    """
    threads = torch.get_num_threads()
    wanted = num_threads or (1 if exact else threads)
    deterministic, benchmark = torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.benchmark
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    if wanted != threads:
        torch.set_num_threads(wanted)
    if exact and device.type == "cuda":
        workspace = os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        if workspace not in (":4096:8", ":16:8"):
            raise ConfigError(
                f"got CUBLAS_WORKSPACE_CONFIG={workspace}", "exact results need :4096:8 or :16:8", "set one of them"
            )
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.benchmark = False
    try:
        yield
    finally:
        if wanted != threads:
            torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(deterministic, warn_only=warn_only)
        torch.backends.cudnn.benchmark = benchmark
