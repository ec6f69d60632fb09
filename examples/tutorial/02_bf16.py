"""Step 2: bf16. The same loop with one word changed, and nothing to scale.

bf16 has fp32's 8 exponent bits, so that no gradient of ordinary size is lost: no loss scale, no skipped steps. What it
lacks are fraction bits (8 against fp32's 24), so weights and optimizer states stay in fp32 and autocast casts copies
of them for matrix products and convolutions only. Training in fp32 beside it shows what the difference comes to.

    python examples/tutorial/02_bf16.py
    python examples/tutorial/02_bf16.py fp16          (or any other precision in its place)
"""

import sys

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn

import samestep


def train(precision: str) -> str:
    """A line about a training in `precision`."""
    images, labels = load_digits(return_X_y=True)
    data = torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels)
    with samestep.Run(precision=precision, seed=0, progress=False) as run:
        net = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 10))  # the run has seeded its weights
        model, _ = run.prepare(net, torch.optim.AdamW(net.parameters(), lr=3e-3, fused=True))
        windows = run.loader(data, batch_size=64, shuffle=True)
        for _ in run.epochs(4):
            for window in windows:
                for x, y in window:
                    window.backward(F.cross_entropy(model(x), y), weight=len(y))
                window.step(clip_norm=1.0)
        weights = {str(param.dtype) for param in net.parameters()}
        return (
            f"{run.policy.name}: loss {window.loss:.4f}, loss scale {run.loss_scale}, skipped {run.skips}, "
            f"weights are {', '.join(weights)}"
        )


if __name__ == "__main__":
    print(train("fp32"))
    print(train(sys.argv[1] if len(sys.argv) > 1 else "bf16"))
