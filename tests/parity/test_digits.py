"""The main job on 1, 2 and 3 ranks in fp32: the same global batches exactly, the same losses to rounding, each step."""

from __future__ import annotations

import pytest

import samestep
from samestep.tasks.digits import Digits
from samestep.testing import run_ranks
from samestep.train.fit import fit


def digits(epochs: int) -> list[tuple[str, float]]:
    """(sample digest, global loss) of each window."""
    records: list[tuple[str, float]] = []
    task = Digits()
    with samestep.Run(precision="fp32", progress=False) as run:
        run._engine.on_record.append(lambda record: records.append((record.digest, record.loss)))
        sizes = {"batch_size": task.batch_size, "micro_batch_size": task.micro_batch_size}
        fit(task, run, epochs=epochs, learning_rate=task.learning_rate, **sizes)
    return records


def compare(epochs: int) -> None:
    (alone,) = run_ranks(digits, 1, epochs, timeout_s=300)
    assert len({digest for digest, _ in alone}) == len(alone) == 23 * epochs
    for ranks in (2, 3):
        for together in run_ranks(digits, ranks, epochs, timeout_s=300):
            assert [digest for digest, _ in together] == [digest for digest, _ in alone]
            assert [loss for _, loss in together] == pytest.approx([loss for _, loss in alone], rel=1e-4)


def test_digits_is_the_same_training_on_one_two_and_three_ranks() -> None:
    compare(epochs=5)


@pytest.mark.slow
def test_digits_is_the_same_training_to_the_last_of_its_twenty_epochs() -> None:
    compare(epochs=20)
