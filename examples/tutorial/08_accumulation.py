"""Step 8: gradient accumulation with mixed precision: the same update from smaller pieces.

`micro_batch_size` says how many samples one forward sees; `batch_size` stays what the optimizer sees. On several ranks
gradients meet once a window, with the last micro-batch. The last window of the epoch is short: its gradient is divided
by its own number of samples, with no special case in the loop. The script trains with two sizes of micro-batch and prints
how far apart the weights end: rounding of bf16, or of fp32 if that is asked for.

    python examples/tutorial/08_accumulation.py
    samestep launch -n 2 examples/tutorial/08_accumulation.py fp32
"""

import sys

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn

import samestep


def train(precision: str, micro_batch_size: int) -> torch.Tensor:
    """One epoch; all weights as one vector."""
    images, labels = load_digits(return_X_y=True)
    data = torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels)
    with samestep.Run(precision=precision, seed=0, progress=False) as run:
        net = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 10))
        model, _ = run.prepare(net, torch.optim.SGD(net.parameters(), lr=0.2))
        windows = run.loader(data, batch_size=64, micro_batch_size=micro_batch_size, shuffle=True)
        for _ in run.epochs(1):
            for window in windows:
                sizes = []
                for x, y in window:
                    sizes.append(len(y))
                    window.backward(F.cross_entropy(model(x), y), weight=len(y))
                window.step(clip_norm=1.0)
                if window.number in (0, len(windows) - 1):
                    run.print(
                        f"micro-batches of {micro_batch_size}, window {window.number}: {window.num_micro_batches} in all, "
                        f"main's have {sizes} samples, loss {window.loss:.5f}"
                    )
        return torch.cat([param.detach().flatten() for param in net.parameters()])


def main() -> None:
    """Train with micro-batches of 32 and of 8."""
    precision = sys.argv[1] if len(sys.argv) > 1 else "bf16"
    large, small = train(precision, 32), train(precision, 8)
    with samestep.Run(precision="fp32", progress=False) as run:
        run.print(f"{precision}: largest difference of a weight {float((large - small).abs().max()):.1e}")


if __name__ == "__main__":
    main()
