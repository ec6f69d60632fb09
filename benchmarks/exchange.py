"""What the exact exchange costs beside the fast one: time a window and bytes sent, for a 2M-parameter MLP.

The two run in the same ranks, interleaved window by window in chunks; the figure is the median of the chunks' ratios,
with its quartiles. Bytes are those one rank sends in a window, beside a ring all-reduce's 2 (R - 1) / R of the gradient.

    python benchmarks/exchange.py --ranks 2,4
    python benchmarks/exchange.py --memory
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import sys
import time
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import samestep
from samestep.data.grid import split
from samestep.distributed.tree import added_copies
from samestep.testing import run_ranks


def mlp() -> nn.Module:
    """1.98M parameters."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 400))


def one_rank(micro_batches: int, micro_batch_size: int, chunks: int, windows: int) -> dict[str, Any]:
    """Seconds a window of each chunk, by exchange; both in one process group."""
    runs: dict[str, tuple[Any, Any, Any]] = {}
    size = micro_batches * micro_batch_size
    data = torch.randn(size * windows, 512), torch.randint(0, 400, (size * windows,))
    seconds: dict[str, list[float]] = {"fast": [], "exact": []}
    with samestep.Run(precision="fp32", progress=False, exchange="fast", num_threads=1) as fast:
        with samestep.Run(precision="fp32", progress=False, exchange="exact") as exact:
            for name, run in (("fast", fast), ("exact", exact)):
                net = mlp()
                model, _ = run.prepare(net, torch.optim.AdamW(net.parameters(), lr=1e-3, fused=True))
                runs[name] = run, model, run.loader(data, batch_size=size, micro_batch_size=micro_batch_size)
            for chunk in range(chunks + 1):
                for name in ("fast", "exact") if chunk % 2 else ("exact", "fast"):
                    run, model, loader = runs[name]
                    run.mean(0.0)  # start together
                    begin = time.perf_counter()
                    for window in loader:
                        for x, y in window:
                            window.backward(F.cross_entropy(model(x), y))
                        window.step(clip_norm=1.0)
                    if chunk:  # the first warms up
                        seconds[name].append((time.perf_counter() - begin) / windows)
            sent = runs["exact"][1].replica.exact.bytes_sent / ((chunks + 1) * windows)
            gradient = sum(p.numel() for p in runs["exact"][1].parameters()) * 4
    return {"seconds": seconds, "sent": sent, "gradient": gradient}


def peak_memory(exchange: str, micro_batches: int) -> tuple[int, int]:
    """(peak resident bytes after a few windows, bytes of the gradient) of one rank with a 25M-parameter MLP."""
    with samestep.Run(precision="fp32", progress=False, exchange=exchange, num_threads=1) as run:
        net = nn.Sequential(*(nn.Linear(2048, 2048) for _ in range(6)))
        model, _ = run.prepare(net, torch.optim.SGD(net.parameters(), lr=1e-3))
        data = torch.randn(3 * micro_batches, 2048)
        for window in run.loader(data, batch_size=micro_batches, micro_batch_size=1):
            for (x,) in window:
                window.backward(model(x).square().mean())
            window.step()
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, sum(p.numel() for p in net.parameters()) * 4


def print_memory() -> None:
    """Gradient copies that the exact exchange adds to a rank's peak, beside what `samestep plan` says."""
    wanted = {"MALLOC_MMAP_THRESHOLD_": "1000000", "MALLOC_TRIM_THRESHOLD_": "0"}
    if any(os.environ.get(name) != value for name, value in wanted.items()):
        # glibc keeps freed memory otherwise, and the resident size would show its habits
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **wanted})
    print(f"{'ranks':>5} {'M':>3} {'added copies':>13} {'plan':>6}   (gloo stages up to one more)")
    for ranks, micro_batches in ((1, 4), (1, 8), (2, 2), (2, 4), (2, 8)):
        fast = max(peak for peak, _ in run_ranks(peak_memory, ranks, "fast", micro_batches, timeout_s=300))
        exact, gradient = max(run_ranks(peak_memory, ranks, "exact", micro_batches, timeout_s=300))
        planned = added_copies([split(micro_batches, rank, ranks) for rank in range(ranks)])
        print(f"{ranks:5} {micro_batches:3} {(exact - fast) / gradient:13.2f} {planned:6.2f}")


def main() -> None:
    """Print one line for each number of ranks and micro-batches."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default="2,4", help="comma-separated (default: 2,4)")
    parser.add_argument("--chunks", type=int, default=10, help="interleaved chunks (default: 10)")
    parser.add_argument("--memory", action="store_true", help="measure memory instead of time")
    arguments = parser.parse_args()
    if arguments.memory:
        print_memory()
        return
    print(f"torch {torch.__version__}, 1 thread a rank, gloo on loopback")
    print(f"{'ranks':>5} {'M':>3} {'fast ms':>8} {'exact ms':>9} {'ratio':>6}  {'quartiles':10} {'sent / ring':>11}")
    for ranks in (int(text) for text in arguments.ranks.split(",")):
        for micro_batches in (4, 8):
            result = run_ranks(one_rank, ranks, micro_batches, 16, arguments.chunks, 5, timeout_s=600)[0]
            seconds = result["seconds"]
            ratios = [exact / fast for fast, exact in zip(seconds["fast"], seconds["exact"], strict=True)]
            low, middle, high = statistics.quantiles(ratios, n=4)
            ring = 2 * (ranks - 1) / ranks * result["gradient"]
            print(
                f"{ranks:5} {micro_batches:3} {statistics.median(seconds['fast']) * 1e3:8.1f} "
                f"{statistics.median(seconds['exact']) * 1e3:9.1f} {middle:6.2f}  {low:.2f}-{high:.2f}  "
                f"{result['sent'] / ring:11.2f}"
            )


if __name__ == "__main__":
    main()
