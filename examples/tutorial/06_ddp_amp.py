"""Step 6: DDP and mixed precision in one loop, with one line of output for each 100 steps, from main only.

Gradients meet by torch's DistributedDataParallel while the last micro-batch's backward runs. `window.loss` is the mean
over the whole global batch, not main's part of it; reading it waits for the device, so it is read when it is printed.

    python examples/tutorial/06_ddp_amp.py
    samestep launch -n 2 examples/tutorial/06_ddp_amp.py
"""

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn

import samestep


def main() -> None:
    """Three epochs of digits in bf16."""
    images, labels = load_digits(return_X_y=True)
    images, labels = torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels)
    held_out = torch.arange(len(labels)) % 5 == 0
    with samestep.Run(precision="bf16", seed=0, progress=False) as run:
        net = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 10))
        model, _ = run.prepare(net, torch.optim.AdamW(net.parameters(), lr=3e-3, fused=True))
        train = run.loader((images[~held_out], labels[~held_out]), batch_size=16, micro_batch_size=4, shuffle=True)
        valid = run.loader((images[held_out], labels[held_out]), batch_size=128)
        for _ in run.epochs(3):
            for window in train:
                for x, y in window:
                    window.backward(F.cross_entropy(model(x), y), weight=len(y))
                window.step(clip_norm=1.0)
                if run.step % 100 == 0:
                    run.print(f"step {run.step} loss {window.loss:.3f}")
        accuracy = samestep.Mean()
        for x, y in run.evaluate(valid):  # each sample on one rank
            accuracy.add((model(x).argmax(1) == y).double().mean(), len(y))
        run.print(f"{run.world_size} rank(s), {run.updates} updates, accuracy {run.mean(accuracy):.3f}")


if __name__ == "__main__":
    main()
