"""Say what a training will do before it does it: windows, micro-batches, who computes what, the tail, and memory.

Nothing is trained; the task's data is loaded for its length and its model is made for its size."""

from __future__ import annotations

import argparse
from typing import Any

EXAMPLES = """\
examples:
  samestep plan digits --nproc 2
  samestep plan bytes_lm --nproc 4 --batch-size 128 --micro-batch-size 16 --exchange exact
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's flags."""
    parser.add_argument("task", metavar="TASK", help="digits, bytes_lm, or file.py:Name")
    parser.add_argument("--nproc", type=int, default=1, help="ranks (default: 1)")
    parser.add_argument("--batch-size", type=int, help="samples of one optimizer step, over all ranks")
    parser.add_argument("--micro-batch-size", type=int, help="samples of one forward and backward")
    parser.add_argument("--epochs", type=int, help="in all (default: the task's)")
    parser.add_argument("--drop-last", action="store_true", help="leave the short last window out")
    parser.add_argument("--exchange", choices=("fast", "exact"), default="fast", help="default: fast")


def run(arguments: argparse.Namespace) -> int:
    """Print the plan."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"samestep plan {arguments.task}", show_header=False, title_justify="left")
    table.add_column(style="bold")
    table.add_column()
    for name, value in _rows(arguments):
        table.add_row(name, value)
    Console(highlight=False).print(table)
    return 0


def _rows(arguments: argparse.Namespace) -> list[tuple[str, str]]:
    from samestep.data.fetch import as_dataset
    from samestep.data.grid import Grid
    from samestep.tasks.base import load_task

    task = load_task(arguments.task)
    grid = Grid.make(
        num_samples=len(as_dataset(task.data()[0])),
        batch_size=task.batch_size if arguments.batch_size is None else arguments.batch_size,
        micro_batch_size=arguments.micro_batch_size or task.micro_batch_size,
        drop_last=arguments.drop_last,
        world_size=arguments.nproc,
    )
    epochs = task.epochs if arguments.epochs is None else arguments.epochs
    rows = [
        ("grid", grid.describe()),
        (
            "training",
            f"{epochs} epochs of {grid.num_windows} windows: {epochs * grid.num_windows} updates if none is skipped",
        ),
        ("a full window", _shares(grid, 0, arguments.nproc)),
    ]
    if grid.tail:
        rows.append(("the tail", _shares(grid, grid.num_windows - 1, arguments.nproc)))
    model = task.model()
    if warning := _lone_sample(grid, model):
        rows.append(("warning", warning))
    return rows + _memory(grid, task, model, arguments.nproc, arguments.exchange)


def _shares(grid: Any, window: int, ranks: int) -> str:
    shares = [grid.share(window, rank, ranks) for rank in range(ranks)]
    parts = [
        f"rank {rank}: {len(share)} micro-batch{'es' * (len(share) != 1)}, "
        f"{sum(len(grid.micro_batch(window, number)) for number in share)} samples"
        for rank, share in enumerate(shares)
    ]
    return "\n".join(parts if ranks <= 8 else [*parts[:4], "...", parts[-1]])


def _lone_sample(grid: Any, model: Any) -> str | None:
    from torch import nn

    last = grid.num_windows - 1
    alone = len(grid.micro_batch(last, grid.num_micro_batches(last) - 1)) == 1
    if not alone or not any(isinstance(module, nn.BatchNorm1d) for module in model.modules()):
        return None
    return "the last micro-batch has one sample, over which BatchNorm cannot compute a variance; pass --drop-last"


def _memory(grid: Any, task: Any, model: Any, ranks: int, exchange: str) -> list[tuple[str, str]]:
    """Bytes a rank holds besides activations, which depend on the model's forward."""
    from samestep.distributed.tree import added_copies

    weights = sum(param.numel() * param.element_size() for param in model.parameters())
    gradient = sum(param.numel() * 4 for param in model.parameters() if param.requires_grad)
    optimizer = type(task.optimizer(model, task.learning_rate)).__name__
    states = {"Adam": 2, "AdamW": 2, "SGD": 1, "Adagrad": 1}.get(optimizer)
    rows = [
        ("weights", f"{_size(weights)} ({sum(param.numel() for param in model.parameters()):,} parameters)"),
        ("gradient", _size(gradient)),
        (f"{optimizer} state", "unknown" if states is None else f"{_size(states * gradient)} at most"),
    ]
    if exchange == "exact":
        copies = added_copies([grid.share(0, rank, ranks) for rank in range(ranks)])
        staged = "" if ranks == 1 else ", and what the backend stages (gloo: up to one gradient)"
        rows.append(("exact exchange", f"{_size(copies * gradient)} more ({copies:.3g} gradients){staged}"))
    return rows


def _size(count: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024 or unit == "GiB":
            return f"{count:.4g} {unit}"
        count /= 1024
    raise AssertionError
