"""Numbers that mean what they say: weighted means over ranks, throughput over the time really spent, memory."""

from __future__ import annotations

import resource
import sys
import time
from typing import Any

import torch

from samestep.errors import ConfigError

__all__ = ["Mean", "Throughput", "memory_report"]


class Mean:
    """A weighted mean that is exact over batches and ranks: it keeps sum(weight * value) and sum(weight) in fp64.

    `run.log(accuracy=mean)` and `run.mean(mean)` add the ranks' sums before dividing.
    """

    def __init__(self) -> None:
        self._total: torch.Tensor | float = 0.0
        self._weight: torch.Tensor | float = 0.0

    def add(self, value: float | torch.Tensor, weight: float | torch.Tensor = 1.0) -> None:
        """Add the mean `value` of `weight` terms. Tensors stay on their device until the mean is read.

        A term of weight 0 is left out, whatever its value.
        """
        if not isinstance(weight, torch.Tensor) and weight == 0:
            return
        value = value.detach().double() if isinstance(value, torch.Tensor) else float(value)
        if isinstance(weight, torch.Tensor):
            weight = weight.detach().double()
            value = torch.where(weight > 0, value, 0.0)  # 0 x NaN is NaN
        self._total = self._total + value * weight
        self._weight = self._weight + weight

    def sums(self) -> tuple[float, float]:
        """(sum of weight * value, sum of weights) on this rank. Waits for the device."""
        return float(self._total), float(self._weight)


class Throughput:
    """Samples a second over the time really spent: `with throughput: ...` or `start` and `stop(samples)`.

    The device is synchronised at both ends, so that work still queued on a GPU is counted with its time.

    Args:
        device: where the work runs.
    """

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self._device = torch.device(device)
        self.samples = 0
        self.seconds = 0.0
        self._begin: float | None = None

    def start(self) -> None:
        """Begin an interval."""
        self._synchronise()
        self._begin = time.perf_counter()

    def stop(self, samples: int) -> float:
        """End the interval in which `samples` samples (over all ranks, accumulation included) were used.

        Returns:
            Samples a second since the first start.
        """
        if self._begin is None:
            raise ConfigError("got stop() before start()", "an interval has a start", "call start() first")
        self._synchronise()
        self.seconds += time.perf_counter() - self._begin
        self.samples += samples
        self._begin = None
        return self.per_second

    @property
    def per_second(self) -> float:
        """All samples over all seconds: the mean rate, not the mean of the rates."""
        return self.samples / self.seconds if self.seconds else float("nan")

    def _synchronise(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def memory_report(device: torch.device | str | None = None) -> dict[str, Any]:
    """Memory in bytes. Unknown figures are None.

    Returns:
        allocated, reserved, peak_allocated, peak_reserved of the CUDA device (None on a CPU), process (resident now)
        and process_peak (resident at most) of this process.
    """
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(device)
    cuda = device.type == "cuda"
    now = _resident_bytes()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return {
        "device": str(device),
        "allocated": torch.cuda.memory_allocated(device) if cuda else None,
        "reserved": torch.cuda.memory_reserved(device) if cuda else None,
        "peak_allocated": torch.cuda.max_memory_allocated(device) if cuda else None,
        "peak_reserved": torch.cuda.max_memory_reserved(device) if cuda else None,
        "process": now,
        "process_peak": max(peak, now or 0),  # the kernel notes the peak a little late
    }


def _resident_bytes() -> int | None:
    try:
        with open("/proc/self/statm") as file:  # noqa: PTH123 - a pseudo file, read whole
            return int(file.read().split()[1]) * resource.getpagesize()
    except OSError:
        return None
