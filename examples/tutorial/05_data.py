"""Step 5: data on several ranks. One order for all, new in each epoch, with loader processes and pinned memory.

`batch_size` is the global one. Which samples window w of epoch e holds is a function of (seed, e, w): not of the number
of ranks or loader processes. The script prints the samples of each window, gathered from the ranks, so that the lines
are the same under both commands. Each sample is used once: nothing is padded, the last window is short.

    python examples/tutorial/05_data.py
    samestep launch -n 2 examples/tutorial/05_data.py
"""

import torch
from sklearn.datasets import load_digits
from torch.utils.data import Dataset

import samestep


class Numbered(Dataset):
    """Digits with their number, one at a time, as most datasets are."""

    def __init__(self, size: int) -> None:
        images, labels = load_digits(return_X_y=True)
        self.images = torch.tensor(images[:size], dtype=torch.float32) / 16
        self.labels = torch.tensor(labels[:size])

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor, int]:
        image = self.images[index] + 0.01 * torch.randn(64)  # augmentation is keyed by (seed, epoch, position)
        return image, self.labels[index], index


def main() -> None:
    """Read two epochs of 30 samples."""
    with samestep.Run(precision="fp32", seed=7, progress=False) as run:
        weight = torch.nn.Linear(64, 10)
        model, _ = run.prepare(weight, torch.optim.SGD(weight.parameters(), lr=0.0))
        train = run.loader(Numbered(30), batch_size=12, micro_batch_size=3, shuffle=True, num_workers=2)
        run.print(f"memory is pinned: {run.device.type == 'cuda'} (on a GPU, unless pin_memory says otherwise)")
        for epoch in run.epochs(2):
            used = torch.zeros(30)
            for window in train:
                mine, noise = torch.zeros(30), samestep.Mean()
                for x, y, index in window:
                    mine[index.cpu()] += 1
                    noise.add(x.sum())
                    window.backward(torch.nn.functional.cross_entropy(model(x), y), weight=len(y))
                window.step()
                # run.mean is a mean over the ranks; times their number it is the sum
                whole = torch.tensor([run.mean(float(n)) * run.world_size for n in mine])
                used += whole
                indices = " ".join(str(i) for i in whole.nonzero().flatten().tolist())
                run.print(f"epoch {epoch} window {window.number}: samples {indices}; pixels {run.mean(noise):.4f}")
            run.print(f"epoch {epoch}: each sample once: {bool((used == 1).all())}")


if __name__ == "__main__":
    main()
