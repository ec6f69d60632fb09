"""Cases C18-C21, C24, C41, C42: which samples a step sees, and what a batch may be."""

from __future__ import annotations

import collections
import dataclasses
import random
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, WeightedRandomSampler

import samestep
from samestep.testing import run_ranks
from tests.cases.helpers import Weight, quiet_run, train_weight


class Draws(Dataset):
    """Item i is (i, a draw from torch, numpy and random)."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        draws = int(torch.randint(10**6, ())), int(np.random.randint(10**6)), random.randrange(10**6)
        return torch.tensor([index, *draws])


def batches(run: samestep.Run, loader: Any, epochs: int = 1) -> list[tuple[int, int, list[Any]]]:
    """(epoch, window, rows) of this rank, from a loop that trains on nothing."""
    net = Weight()
    model, _ = run.prepare(net, torch.optim.SGD(net.parameters(), lr=0.0))
    seen = []
    for epoch in run.epochs(epochs):
        for window in loader:
            rows: list[Any] = []
            for batch in window:
                rows += (batch[0] if isinstance(batch, list) else batch).tolist()
                window.backward(model(torch.zeros(1)).mean())
            window.step()
            seen.append((epoch, window.number, rows))
    return seen


def c18(workers: int) -> list[Any]:
    with quiet_run() as run:
        loader = run.loader(Draws(8), batch_size=4, micro_batch_size=2, shuffle=True, num_workers=workers)
        return [row for _, _, rows in batches(run, loader, 2) for row in rows]


def test_c18_augmentation_depends_on_the_sample_and_not_on_rank_or_worker() -> None:
    (alone,) = run_ranks(c18, 1, 0)
    assert len({tuple(row[1:]) for row in alone}) == 16, "every draw differs, also between epochs"
    for ranks, workers in ((1, 2), (2, 0), (2, 2)):
        together = [row for rows in run_ranks(c18, ranks, workers) for row in rows]
        assert sorted(together) == sorted(alone), (ranks, workers)


class Epochs(Dataset):
    """Two items, each the dataset's `epoch` attribute."""

    epoch = -1

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> int:
        return self.epoch


def c19(workers: int) -> list[Any]:
    with quiet_run() as run:
        return [rows for _, _, rows in batches(run, run.loader(Epochs(), batch_size=2, num_workers=workers), 3)]


@pytest.mark.parametrize("workers", [0, 1])
def test_c19_the_epoch_reaches_persistent_workers(workers: int) -> None:
    assert run_ranks(c19, 1, workers) == [[[0, 0], [1, 1], [2, 2]]]


def c20(as_dataloader: bool) -> list[Any]:
    weights = [0.0] * 6 + [1.0, 1.0]
    with quiet_run() as run:
        if as_dataloader:
            sampler = WeightedRandomSampler(weights, 8)
            loader = run.loader(DataLoader(torch.utils.data.TensorDataset(torch.arange(8)), 2, sampler=sampler))
        else:
            loader = run.loader(torch.arange(8), batch_size=2, weights=weights)
        return [rows[0] if len(rows) == 1 else rows for _, _, rows in batches(run, loader)]


@pytest.mark.parametrize("as_dataloader", [True, False])
def test_c20_weights_hold_on_several_ranks(as_dataloader: bool) -> None:
    (alone,) = run_ranks(c20, 1, as_dataloader)
    draws = [item for pair in alone for item in pair]
    assert len(draws) == 8
    assert set(draws) == {6, 7}
    assert run_ranks(c20, 2, as_dataloader) == [draws[0::2], draws[1::2]]


def c21() -> tuple[float, int, float]:
    out = train_weight([4.0], 2, 1)
    return out["w"], out["records"][0].samples, out["records"][0].loss


def test_c21_a_dataset_smaller_than_the_ranks_trains_each_sample_once() -> None:
    assert run_ranks(c21, 2) == [(pytest.approx(0.6), 1, 4.0)] * 2


def test_c21_an_epoch_without_a_complete_window_is_refused_before_training() -> None:
    with quiet_run() as run, pytest.raises(samestep.DataError, match=r"1 sample\(s\) < batch_size=2"):
        run.loader(torch.ones(1), batch_size=2, micro_batch_size=1, drop_last=True)


def c24(directory: str, stop_after: int | None) -> list[Any]:
    seen = []
    with quiet_run(directory) as run:
        torch.rand(7), np.random.rand(3), random.random()  # other code draws before the restart
        net = Weight()
        model, _ = run.prepare(net, torch.optim.SGD(net.parameters(), lr=0.0))
        loader = run.loader(torch.arange(64), batch_size=4, micro_batch_size=2, shuffle=True, name="train")
        for _ in run.epochs(1):
            for window in loader:
                for (rows,) in window:
                    seen += rows.tolist()
                    window.backward(model(torch.zeros(1)).mean())
                window.step()
                if window.number + 1 == stop_after:
                    run.save()
                    return seen
    return seen


@pytest.mark.parametrize(("before", "after"), [(1, 1), (2, 2), (2, 1), (1, 2)])
def test_c24_a_restart_in_mid_epoch_continues_the_same_permutation(tmp_path, before: int, after: int) -> None:
    def in_order(shares: list[list[int]]) -> list[int]:
        if len(shares) == 1:
            return shares[0]
        pairs = zip(*[[share[i : i + 2] for i in range(0, len(share), 2)] for share in shares], strict=True)
        return [item for pair in pairs for half in pair for item in half]

    whole = in_order(run_ranks(c24, before, str(tmp_path / "whole"), None))
    assert sorted(whole) == list(range(64))
    first = in_order(run_ranks(c24, before, str(tmp_path / "parts"), 5))
    second = in_order(run_ranks(c24, after, str(tmp_path / "parts"), None))
    assert len(first) == 20
    assert first + second == whole


class Point(NamedTuple):
    """A named pair."""

    x: torch.Tensor
    name: str


@dataclasses.dataclass
class Sample:
    """A dataclass with a tensor."""

    x: torch.Tensor
    note: str | None


def test_c42_every_tensor_in_nested_and_custom_containers_is_moved() -> None:
    made = torch.ones(2, dtype=torch.int64)
    batch = collections.UserDict(
        a=made, b=[made, made], c=Point(made, "name"), d=Sample(made, None), e="text", f=None, g={"h": (made, 3)}
    )
    moved = samestep.move(batch, torch.device("meta"))
    tensors = [moved["a"], *moved["b"], moved["c"].x, moved["d"].x, moved["g"]["h"][0]]
    assert {t.device.type for t in tensors} == {"meta"}
    assert {t.dtype for t in tensors} == {torch.int64}, "integers are never cast"
    assert (moved["e"], moved["f"], moved["c"].name, moved["d"].note, moved["g"]["h"][1]) == (
        "text",
        None,
        "name",
        None,
        3,
    )
    assert [type(moved), type(moved["c"]), type(moved["d"])] == [collections.UserDict, Point, Sample]
    assert batch["a"].device.type == batch["d"].x.device.type == batch["c"].x.device.type == "cpu"


def test_c42_an_object_with_its_own_to_is_asked() -> None:
    class Own:
        device = "cpu"

        def to(self, device: Any) -> Own:
            twin = Own()
            twin.device = str(device)
            return twin

    assert samestep.move([Own()], torch.device("meta"))[0].device == "meta"
