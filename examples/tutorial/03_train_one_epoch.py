"""Step 3: `train_one_epoch`, for a script that has a model, a DataLoader and an optimizer and wants no new structure.

It moves model and batches to the device, trains in bf16 (with `use_bf16=False` in fp16 with a loss scale that is kept
between the calls), clips at 1.0 unless told otherwise, and returns the mean loss over all samples as a Python float.

    python examples/tutorial/03_train_one_epoch.py
"""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from samestep import train_one_epoch


def main() -> None:
    """Two epochs in bf16, one in fp16."""
    torch.manual_seed(0)
    images, labels = load_digits(return_X_y=True)
    dataset = TensorDataset(torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels))
    loader = DataLoader(dataset, batch_size=32, shuffle=True)
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    criterion = nn.CrossEntropyLoss()
    device = "cuda" if torch.cuda.is_available() else "cpu"

    for epoch in range(2):
        loss = train_one_epoch(model, loader, optimizer, criterion, device, use_bf16=True, log_every=0)
        print(f"epoch {epoch} bf16 mean loss {loss:.4f}")
    loss = train_one_epoch(model, loader, optimizer, criterion, device, use_bf16=False, log_every=0)
    print(f"epoch 2 fp16 mean loss {loss:.4f} ({type(loss).__name__})")


if __name__ == "__main__":
    main()
