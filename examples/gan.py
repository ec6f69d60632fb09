"""A GAN on digits: two models, two optimizers, two phases of the same window, with accumulation and any precision.

`window.phase(optimizer)` gives the window's micro-batches once more for that optimizer; each phase ends with its own
`window.step()`. The two phases see the same samples and draw different noise. Both optimizers share one loss scale,
which is updated once a window.

    python examples/gan.py
    samestep launch -n 2 examples/gan.py --precision fp16 --epochs 4
"""

import argparse

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn

import samestep

NOISE = 16


def main(precision: str, epochs: int) -> None:
    """Train both; print their losses after each epoch."""
    images, _ = load_digits(return_X_y=True)
    data = torch.tensor(images, dtype=torch.float32) / 8 - 1  # [-1, 1], as tanh gives
    with samestep.Run(precision=precision, seed=0, progress=False) as run:
        generator = nn.Sequential(nn.Linear(NOISE, 64), nn.GELU(), nn.Linear(64, 64), nn.Tanh())
        critic = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 1))
        opt_g = torch.optim.AdamW(generator.parameters(), lr=1e-3, betas=(0.5, 0.99))
        opt_c = torch.optim.AdamW(critic.parameters(), lr=1e-3, betas=(0.5, 0.99))
        generator, critic, opt_g, opt_c = run.prepare(generator, critic, opt_g, opt_c)
        train = run.loader(data, batch_size=64, micro_batch_size=16, shuffle=True)
        for epoch in run.epochs(epochs):
            for window in train:
                for (real,) in window.phase(opt_c):
                    with torch.no_grad():
                        fake = generator(torch.randn(len(real), NOISE, device=run.device))
                    scores = critic(torch.cat([real, fake])).squeeze(1)
                    truth = torch.cat([torch.ones(len(real)), torch.zeros(len(real))]).to(run.device)
                    window.backward(F.binary_cross_entropy_with_logits(scores, truth), weight=len(real))
                window.step(clip_norm=1.0)
                loss_c = window.loss

                for (real,) in window.phase(opt_g):
                    scores = critic(generator(torch.randn(len(real), NOISE, device=run.device))).squeeze(1)
                    window.backward(F.softplus(-scores).mean(), weight=len(real))
                window.step(clip_norm=1.0)
            run.print(f"epoch {epoch}: critic {loss_c:.3f}, generator {window.loss:.3f}")
        with torch.no_grad():
            drawn = generator(torch.randn(256, NOISE, generator=torch.Generator().manual_seed(0)).to(run.device))
        far = float((drawn.mean(0).cpu() - data.mean(0)).abs().mean())
        run.print(
            f"mean image of the generator is {far:.3f} from the data's, of a blank one {(data.mean(0) + 1).mean():.3f}"
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--precision", default="bf16")
    parser.add_argument("--epochs", type=int, default=12)
    arguments = parser.parse_args()
    main(arguments.precision, arguments.epochs)
