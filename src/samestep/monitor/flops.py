"""Model FLOPs utilisation: floating-point operations counted by torch, against the device's dense peak."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

__all__ = ["PEAKS", "FlopCount", "mfu", "mfu_text", "peak_flops"]

_T = 1e12
PEAKS: dict[str, dict[str, float]] = {
    "B200": {"fp32": 75 * _T, "tf32": 1125 * _T, "bf16": 2250 * _T, "fp16": 2250 * _T},
    "H200": {"fp32": 67 * _T, "tf32": 494.7 * _T, "bf16": 989.4 * _T, "fp16": 989.4 * _T},
    "H100 NVL": {"fp32": 60 * _T, "tf32": 417.5 * _T, "bf16": 835.5 * _T, "fp16": 835.5 * _T},
    "H100 PCIe": {"fp32": 51 * _T, "tf32": 378 * _T, "bf16": 756 * _T, "fp16": 756 * _T},
    "H100": {"fp32": 67 * _T, "tf32": 494.7 * _T, "bf16": 989.4 * _T, "fp16": 989.4 * _T},
    "A100": {"fp32": 19.5 * _T, "tf32": 156 * _T, "bf16": 312 * _T, "fp16": 312 * _T},
    "A40": {"fp32": 37.4 * _T, "tf32": 74.8 * _T, "bf16": 149.7 * _T, "fp16": 149.7 * _T},
    "A30": {"fp32": 10.3 * _T, "tf32": 82 * _T, "bf16": 165 * _T, "fp16": 165 * _T},
    "A10": {"fp32": 31.2 * _T, "tf32": 62.5 * _T, "bf16": 125 * _T, "fp16": 125 * _T},
    "L40S": {"fp32": 91.6 * _T, "tf32": 183 * _T, "bf16": 362 * _T, "fp16": 362 * _T},
    "L4": {"fp32": 30.3 * _T, "tf32": 60 * _T, "bf16": 121 * _T, "fp16": 121 * _T},
    "V100": {"fp32": 15.7 * _T, "fp16": 125 * _T},
    "T4": {"fp32": 8.1 * _T, "fp16": 65 * _T},
    "RTX 4090": {"fp32": 82.6 * _T, "tf32": 82.6 * _T, "bf16": 165.2 * _T, "fp16": 165.2 * _T},
    "RTX 3090": {"fp32": 35.6 * _T, "tf32": 35.6 * _T, "bf16": 71 * _T, "fp16": 71 * _T},
    "MI300X": {"fp32": 163.4 * _T, "tf32": 653.7 * _T, "bf16": 1307.4 * _T, "fp16": 1307.4 * _T},
}
"""FLOP a second, dense (without sparsity), with accumulation in fp32, from the vendors' data sheets and architecture
papers (NVIDIA: Blackwell, Hopper, Ampere, Ada and Turing papers, V100, T4, L4, L40S, A10, A30, A40 data sheets; AMD:
MI300X data sheet). A100 and H100 without a suffix are the SXM ones; names are looked for in this order."""


def peak_flops(device_name: str, precision: str) -> float | None:
    """The dense peak of one device in FLOP a second; None when it is not in the table."""
    words = device_name.replace("-", " ").replace("_", " ").split()
    for name, peaks in PEAKS.items():
        wanted = name.split()
        if any(words[i : i + len(wanted)] == wanted for i in range(len(words))):
            return peaks.get(precision)
    if "A10G" in words:
        return {"fp32": 31.2 * _T, "tf32": 35 * _T, "bf16": 70 * _T, "fp16": 70 * _T}.get(precision)
    return None


def mfu(flops_per_sample: float | None, samples_per_s: float, peak: float | None, num_devices: int) -> float | None:
    """Counted operations over what the devices could do, 0 to 1; None when something is unknown."""
    if flops_per_sample is None or peak is None or not math.isfinite(samples_per_s):
        return None
    return flops_per_sample * samples_per_s / (peak * num_devices)


def mfu_text(share: float | None) -> str:
    """For a person. More than the peak is no feat, it is an error in the count or in the table."""
    if share is None:
        return "n/a"
    if share > 1.0:
        return f"{share:.0%}: wrong, above the peak (count or table)"
    return f"{share:.1%}"


class FlopCount:
    """Counts the forwards and backwards of the first window on this rank; a watcher of the run's clock.

    Matrix products, convolutions and attention are counted, as is usual for MFU. The counted window is slower; its
    results are those of any other.

    Args:
        samples: how many samples this rank has of the open window.
        done: is given the FLOPs of one sample, forward and backward.
    """

    def __init__(self, samples: Callable[[], int], done: Callable[[float], None]) -> None:
        self._samples, self._done = samples, done
        self._mode: Any = None
        self._counted = False

    def opened(self) -> None:
        """Count from here."""
        if not self._counted:
            from torch.utils.flop_counter import FlopCounterMode

            self._mode = FlopCounterMode(display=False)
            self._mode.__enter__()

    def enter(self, stage: str) -> None:
        """Stop where the last backward has ended."""
        if stage == "exchange" and self._mode is not None:
            mode, self._mode, self._counted = self._mode, None, True
            mode.__exit__(None, None, None)
            samples, total = self._samples(), mode.get_total_flops()
            if samples and total:
                self._done(total / samples)

    def leave(self) -> None:
        """Nothing."""

    def closed(self) -> None:
        """A window that was left without a step is not counted."""
        if self._mode is not None:
            self._mode.__exit__(None, None, None)
            self._mode = None


def device_name(device: torch.device) -> str:
    """The device's own name; "cpu" for a CPU."""
    import torch

    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
