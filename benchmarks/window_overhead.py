"""What a window costs beside a hand-tuned PyTorch loop: a tiny MLP, so that overhead is most of what is seen.

Both loops do the same work (64 -> 64 -> 10, batch 64 in memory, AdamW, clip 1.0), interleaved in one process, chunk by
chunk; the figure is the median of the chunks' ratios, with its quartiles. Run on a quiet machine:

    make bench
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

import samestep

CHUNK = 100


def net_and_optimizer(fused: bool) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The same start for both loops."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    return net, torch.optim.AdamW(net.parameters(), lr=1e-3, fused=fused)


def raw_loop(x: torch.Tensor, y: torch.Tensor, precision: str, fused: bool) -> Callable[[], None]:
    """A chunk of a loop as an expert would write it."""
    net, optimizer = net_and_optimizer(fused)
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision)
    scaler = torch.amp.GradScaler("cpu", enabled=precision == "fp16")
    order = torch.arange(len(x)).split(64)

    def chunk() -> None:
        for rows in order:
            optimizer.zero_grad(set_to_none=True)
            with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
                loss = F.cross_entropy(net(x[rows]), y[rows])
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()

    return chunk


def samestep_loop(run: samestep.Run, x: torch.Tensor, y: torch.Tensor, fused: bool) -> Callable[[], None]:
    """The same with Samestep: ledger off, everything else as in the README."""
    net, optimizer = net_and_optimizer(fused)
    model, _ = run.prepare(net, optimizer)
    loader = run.loader((x, y), batch_size=64, micro_batch_size=64)

    def chunk() -> None:
        for window in loader:
            for inputs, targets in window:
                window.backward(F.cross_entropy(model(inputs), targets), weight=len(targets))
            window.step(clip_norm=1.0)

    return chunk


def main() -> None:
    """Print one line for each precision and optimizer."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chunks", type=int, default=20, help="interleaved chunks of 100 windows (default: 20)")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    x, y = torch.randn(64 * CHUNK, 64), torch.randint(0, 10, (64 * CHUNK,))
    print(f"torch {torch.__version__}, 1 thread, {arguments.chunks} chunks of {CHUNK} windows, interleaved")
    print(f"{'precision':10} {'AdamW':8} {'raw us':>8} {'samestep us':>12} {'ratio':>6}   quartiles")
    for precision in ("fp32", "bf16", "fp16"):
        for fused in (False, True):
            with samestep.Run(precision=precision, progress=False) as run:
                loops = [raw_loop(x, y, precision, fused), samestep_loop(run, x, y, fused)]
                for loop in loops:
                    loop()
                times: list[list[float]] = [[], []]
                for number in range(arguments.chunks):
                    for which in (0, 1) if number % 2 else (1, 0):
                        start = time.perf_counter()
                        loops[which]()
                        times[which].append((time.perf_counter() - start) / CHUNK * 1e6)
            ratios = [ours / raw for raw, ours in zip(*times, strict=True)]
            low, middle, high = statistics.quantiles(ratios, n=4)
            name = "fused" if fused else "default"
            print(
                f"{precision:10} {name:8} {statistics.median(times[0]):8.0f} {statistics.median(times[1]):12.0f} "
                f"{middle:6.2f}   {low:.2f}-{high:.2f}"
            )


if __name__ == "__main__":
    main()
