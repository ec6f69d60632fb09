"""Step 7: checkpoints. Written by main, read by all ranks, continued on another number of ranks; and foreign files.

A run with a directory saves at the end of each epoch, every `save_every` windows, and at `run.save()`. Started again in
the same directory it continues, in the middle of an epoch if need be. The number of ranks may change: the micro-batches
belong to the run, so the training goes on as it would have. Start the first command, then the second:

    python examples/tutorial/07_checkpoint.py --run-dir runs/tutorial --stop-at 30
    samestep launch -n 2 examples/tutorial/07_checkpoint.py --run-dir runs/tutorial

Files of torch.save with {"epoch", "model_state_dict", "optimizer_state_dict"} are read without running any code from
them, on any device, and with the prefixes of DDP ("module.") and torch.compile ("_orig_mod.") understood.
"""

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn

import samestep
from samestep.checkpoint.foreign import read_torch_file
from samestep.checkpoint.names import match


def network() -> nn.Module:
    """64 -> 32 -> 10."""
    return nn.Sequential(nn.Linear(64, 32), nn.GELU(), nn.Linear(32, 10))


def train(directory: Path, stop_at: int | None) -> nn.Module:
    """Two epochs in all; `stop_at` ends this start after so many windows, as a pulled plug would."""
    images, labels = load_digits(return_X_y=True)
    data = torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels)
    with samestep.Run(directory, precision="fp32", save_every=10, progress=False) as run:
        net = network()
        model, _ = run.prepare(net, torch.optim.AdamW(net.parameters(), lr=3e-3, fused=True))
        windows = run.loader(data, batch_size=64, micro_batch_size=16, shuffle=True)
        run.print(f"{run.world_size} rank(s), " + (f"continues from step {run.step}" if run.resumed else "starts anew"))
        for _ in run.epochs(2):
            for window in windows:
                for x, y in window:
                    window.backward(F.cross_entropy(model(x), y), weight=len(y))
                window.step(clip_norm=1.0)
                if run.step == stop_at:
                    run.print(f"stopped at step {run.step}; the last checkpoint is of step {run.step // 10 * 10}")
                    return net
        sums = sum(float(param.detach().double().sum()) for param in net.parameters())
        run.print(f"finished at step {run.step}, sum of the weights {sums:.4f}")
        if run.is_main:
            foreign(directory / "foreign.pt", net)
        return net


def foreign(path: Path, trained: nn.Module) -> None:
    """Write such a file as other programs do, from under a wrapper, and read it."""
    state = {f"module.{name}": value for name, value in trained.state_dict().items()}
    torch.save({"epoch": 2, "model_state_dict": state, "optimizer_state_dict": None}, path)

    content = read_torch_file(path)
    model = network()
    model.load_state_dict(match(content["model"], model.state_dict()))
    same = all(torch.equal(a.cpu(), b.cpu()) for a, b in zip(model.parameters(), trained.parameters(), strict=True))
    print(f"foreign file: epoch {content['epoch']}, {len(content['model'])} tensors, weights are the same: {same}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--run-dir", type=Path, default=Path("runs/tutorial"))
    parser.add_argument("--stop-at", type=int)
    arguments = parser.parse_args()
    train(arguments.run_dir, arguments.stop_at)
