"""Train a task: a built-in one (digits, bytes_lm), or your own class as file.py:Name.

The same seed and batch size give the same global batches on any number of ranks. A run directory that holds a
checkpoint is continued."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from samestep.config import RunConfig

if TYPE_CHECKING:
    from samestep.tasks.base import Task
    from samestep.train.fit import Fitted
    from samestep.train.run import Run

EXAMPLES = """\
examples:
  samestep train digits --nproc 2 --precision bf16
  samestep train bytes_lm --epochs 1 --batch-size 128 --micro-batch-size 16
  samestep train my_task.py:MyTask --run-dir runs/mine --resume must
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's flags."""
    defaults = {field.name: field.default for field in RunConfig.__dataclass_fields__.values()}
    parser.add_argument("task", metavar="TASK", help="digits, bytes_lm, or file.py:Name")
    where = parser.add_argument_group("where")
    where.add_argument("--nproc", default="1", help="ranks on this machine, or auto, gpu, cpu (default: 1)")
    where.add_argument("--device", help="cpu, cuda or cuda:INDEX (default: CUDA if there is any)")
    where.add_argument("--run-dir", type=Path, help="checkpoints and ledger (default: runs/TASK)")
    where.add_argument("--resume", choices=("auto", "must", "never"), default="auto", help="default: auto")
    how = parser.add_argument_group("how")
    how.add_argument("--precision", choices=("auto", "fp32", "tf32", "bf16", "fp16"), default="auto")
    how.add_argument(
        "--exchange", choices=("fast", "exact"), default="fast", help="exact: bitwise the same on any number of ranks"
    )
    how.add_argument("--seed", type=int, default=0, help="of order, dropout, augmentation and initial weights")
    how.add_argument("--epochs", type=int, help="in all (default: the task's)")
    how.add_argument("--batch-size", type=int, help="samples of one optimizer step, over all ranks")
    how.add_argument("--micro-batch-size", type=int, help="samples of one forward and backward")
    how.add_argument("--learning-rate", type=float, help="the schedule's peak")
    how.add_argument("--workers", type=int, default=0, help="loader processes a rank (default: 0)")
    how.add_argument("--drop-last", action="store_true", help="leave the short last window out")
    how.add_argument("--nonfinite", choices=("auto", "raise", "skip"), default="auto")
    how.add_argument("--find-nan", action="store_true", help="name the module that makes a window non-finite")
    how.add_argument(
        "--save-every", type=int, metavar="WINDOWS", help="checkpoint this often, besides each epoch's end"
    )
    how.add_argument("--keep-last", type=int, default=defaults["keep_last"], help="checkpoints kept (default: 3)")
    seen = parser.add_argument_group("seen")
    seen.add_argument("--log-every", type=int, default=100, metavar="WINDOWS", help="lines where there is no terminal")
    seen.add_argument("--quiet", action="store_true", help="no progress; only the summary")


def run(arguments: argparse.Namespace) -> int:
    """Train; start the ranks first when there are to be several and this is not one of them."""
    if arguments.nproc != "1" and "RANK" not in os.environ:
        from samestep.distributed.launcher import launch

        return launch(["samestep", *sys.argv[1:]], nproc=arguments.nproc, module=True)
    import samestep
    from samestep.tasks.base import load_task
    from samestep.train.fit import fit

    task = load_task(arguments.task)
    name = arguments.task.rpartition(":")[2].lower()
    directory = arguments.run_dir or Path("runs") / name
    settings = {
        "precision": arguments.precision,
        "exchange": arguments.exchange,
        "seed": arguments.seed,
        "device": arguments.device,
        "resume": arguments.resume,
        "nonfinite": arguments.nonfinite,
        "find_nonfinite": arguments.find_nan,
        "save_every": arguments.save_every,
        "keep_last": arguments.keep_last,
        "log_every": arguments.log_every,
        "progress": not arguments.quiet,
    }
    batch_size = task.batch_size if arguments.batch_size is None else arguments.batch_size
    with samestep.Run(directory, **settings) as run:
        size = arguments.micro_batch_size or task.micro_batch_size
        if arguments.micro_batch_size is None and size is not None and size * (run.world_size - 1) >= batch_size:
            size = None  # the task's own size would leave ranks without work; its default gives way to one a rank
        fitted = fit(
            task,
            run,
            epochs=task.epochs if arguments.epochs is None else arguments.epochs,
            learning_rate=arguments.learning_rate or task.learning_rate,
            num_workers=arguments.workers,
            batch_size=batch_size,
            micro_batch_size=size,
            drop_last=arguments.drop_last,
        )
        if run.is_main:
            _summary(task, run, fitted, directory)
    return 0


def _summary(task: Task, run: Run, fitted: Fitted, directory: Path) -> None:
    rows = [
        ("ranks", f"{run.world_size} on {run.device.type}, precision {run.policy.name}"),
        ("epochs", f"{fitted.epochs}, {fitted.updates} updates, {fitted.skips} skipped"),
        ("train loss", f"{fitted.train_loss:.4f}"),
    ]
    for name, value in fitted.metrics.items():
        goal = ""
        if task.goal is not None and task.goal[0] == name:
            goal = f"  (goal {task.goal[1]:g}: {'reached' if value >= task.goal[1] else 'missed'})"
        rows.append((name, f"{value:.4f}{goal}"))
    rows += [
        ("throughput", f"{fitted.samples_per_s:,.0f} samples/s over all ranks, evaluation and checkpoints included"),
        ("time", f"{fitted.seconds:.1f} s"),
        ("ledger", str(directory / "ledger.jsonl")),
        ("checkpoints", str(directory / "checkpoints")),
    ]
    run.files.display.table(f"samestep train {type(task).__name__}", rows)
