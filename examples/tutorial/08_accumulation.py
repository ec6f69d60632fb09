"""Step 8: gradient accumulation with mixed precision: the same update from smaller pieces.

`micro_batch_size` says how many samples one forward sees; `batch_size` stays what the optimizer sees. On several ranks
gradients meet once a window, with the last micro-batch. The last window of the epoch is short: its gradient is divided
by its own number of samples, with no special case in the loop. Run it with several sizes: the losses and the norm of the
weights agree to rounding.

    python examples/tutorial/08_accumulation.py --micro-batch-size 32
    python examples/tutorial/08_accumulation.py --micro-batch-size 8
    samestep launch -n 2 examples/tutorial/08_accumulation.py --micro-batch-size 8 --precision fp16
"""

import argparse

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn

import samestep


def main(precision: str, micro_batch_size: int) -> None:
    """One epoch of 28 windows of 64 samples and one of 5."""
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
                        f"window {window.number}: {window.num_micro_batches} micro-batches, main's have {sizes} samples, "
                        f"loss {window.loss:.4f}"
                    )
        norm = torch.cat([param.detach().flatten() for param in net.parameters()]).norm()
        run.print(f"{run.world_size} rank(s), {precision}: {run.updates} updates, norm of the weights {norm:.4f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--micro-batch-size", type=int, default=16)
    parser.add_argument("--precision", default="bf16")
    arguments = parser.parse_args()
    main(arguments.precision, arguments.micro_batch_size)
