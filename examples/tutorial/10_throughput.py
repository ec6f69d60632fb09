"""Step 10: throughput: all samples of all ranks over all the time, with the device synchronised at both ends.

A GPU works behind the program: a clock read without synchronising measures how fast work is queued. The first windows
(kernels are chosen, memory is reserved, loader processes start) are left out.

    python examples/tutorial/10_throughput.py
    samestep launch -n 2 examples/tutorial/10_throughput.py
"""

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn

import samestep

WARM_UP = 5


def main() -> None:
    """An epoch, timed from its sixth window on."""
    images, labels = load_digits(return_X_y=True)
    data = torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels)
    with samestep.Run(precision="bf16", progress=False) as run:
        net = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 10))
        model, _ = run.prepare(net, torch.optim.AdamW(net.parameters(), lr=1e-3, fused=True))
        windows = run.loader(data, batch_size=64, micro_batch_size=16, shuffle=True)
        throughput = samestep.Throughput(run.device)
        for _ in run.epochs(1):
            for window in windows:
                if window.number == WARM_UP:
                    before = run.samples
                    throughput.start()
                for x, y in window:
                    window.backward(F.cross_entropy(model(x), y), weight=len(y))
                window.step()
        rate = throughput.stop(run.samples - before)  # run.samples counts all ranks and micro-batches
        run.print(f"{run.world_size} rank(s): {throughput.samples} samples in {throughput.seconds:.3f} s")
        run.print(f"{rate:.0f} samples/s over all ranks")


if __name__ == "__main__":
    main()
