"""Step 1: fp16. Autocast, a loss scale, unscaling before clipping at 1.0, and a skipped step after an overflow.

The same training twice: by hand with torch.amp, and with Samestep, where the four things are `precision="fp16"` and
`window.step(clip_norm=1.0)`. Both print the loss scale, which must agree. The first scale is chosen far too high, so
that the first steps overflow: they are skipped, and the scale is halved until the gradients fit.

    python examples/tutorial/01_fp16.py
"""

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn

import samestep

INIT_SCALE = 2.0**24


def digits() -> tuple[torch.Tensor, torch.Tensor]:
    """28 whole batches of 64 images of 8 x 8, as rows of 64 numbers in [0, 1], and their labels."""
    images, labels = load_digits(return_X_y=True)
    return torch.tensor(images[:1792], dtype=torch.float32) / 16, torch.tensor(labels[:1792])


def network() -> nn.Module:
    """The same initial weights at each call."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 10))


def by_hand(images: torch.Tensor, labels: torch.Tensor, device: torch.device) -> tuple[nn.Module, float]:
    """What a careful loop has to write."""
    model = network().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    scaler = torch.amp.GradScaler(device.type, init_scale=INIT_SCALE)
    for _ in range(3):
        for x, y in zip(images.split(64), labels.split(64), strict=True):
            optimizer.zero_grad()
            with torch.autocast(device.type, dtype=torch.float16):
                output = model(x.to(device))
            loss = F.cross_entropy(output.float(), y.to(device))
            scaler.scale(loss).backward()  # small gradients would be zero in fp16, so the loss is made larger
            scaler.unscale_(optimizer)  # before clipping: the limit is meant for the true gradients
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)  # skipped if a gradient is infinite or NaN
            scaler.update()
    return model, scaler.get_scale()


def with_samestep(images: torch.Tensor, labels: torch.Tensor) -> tuple[nn.Module, float, int]:
    """The same with a run."""
    model = network()
    with samestep.Run(precision="fp16", init_scale=INIT_SCALE, progress=False) as run:
        prepared, _ = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.2))
        train = run.loader((images, labels), batch_size=64)
        for _ in run.epochs(3):
            for window in train:
                for x, y in window:
                    window.backward(F.cross_entropy(prepared(x), y), weight=len(y))
                window.step(clip_norm=1.0)
        return model, run.loss_scale, run.skips


def main() -> None:
    """Train twice and compare."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    images, labels = digits()
    hand, hand_scale = by_hand(images, labels, device)
    ours, our_scale, skips = with_samestep(images, labels)
    with torch.no_grad():
        far = max(float((a - b).abs().max()) for a, b in zip(hand.parameters(), ours.parameters(), strict=True))
        right = (ours(images.to(device)).argmax(1).cpu() == labels).double().mean()
    print(f"loss scale by hand {hand_scale:g}, with samestep {our_scale:g}")
    print(f"skipped steps {skips}")
    print(f"largest difference of a weight {far:.1e}")
    print(f"accuracy {right:.4f}")


if __name__ == "__main__":
    main()
