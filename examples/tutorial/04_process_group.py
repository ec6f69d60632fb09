"""Step 4: the process group, set up and cleaned up: by a run, and by hand around `train_one_epoch`.

A process learns its place from the launcher's variables (RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT).
`samestep.Run` reads them, makes the groups, and destroys them at the end of the block, also after an error. Alone there
is no group, and the same code runs. A script that makes the group itself keeps doing so: Samestep uses what it finds.

    python examples/tutorial/04_process_group.py
    samestep launch -n 2 examples/tutorial/04_process_group.py
    torchrun --nproc-per-node 2 examples/tutorial/04_process_group.py
"""

import os

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import samestep


def by_a_run() -> None:
    """Nothing to do but to open the block."""
    with samestep.Run(precision="fp32", progress=False) as run:
        mean = run.mean(float(run.rank))  # a collective; alone it is the value itself
        run.print(f"run: {run.world_size} rank(s) on {run.device.type}, mean of the ranks' numbers {mean:g}")
    state = "still there" if dist.is_initialized() else "gone"
    run.print(f"run: after the block its group is {state}")


def by_hand() -> None:
    """A group of the script's own, and train_one_epoch inside it."""
    if "RANK" in os.environ:
        dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        torch.manual_seed(0)
        images, labels = load_digits(return_X_y=True)
        dataset = TensorDataset(torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels))
        sampler = DistributedSampler(dataset, shuffle=True)  # each rank brings its own part of the data
        loader = DataLoader(dataset, batch_size=64 // dist.get_world_size(), sampler=sampler)
        model = nn.Linear(64, 10)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        sampler.set_epoch(0)
        loss = samestep.train_one_epoch(model, loader, optimizer, nn.CrossEntropyLoss(), log_every=0)
        if dist.get_rank() == 0:  # the loss is that of all ranks' samples, the same on each rank
            print(f"by hand: {dist.get_world_size()} rank(s), mean loss of the epoch {loss:.4f}", flush=True)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    by_a_run()
    by_hand()
