"""From indices to a batch: keyed random numbers, whole batches, epochs told through wrappers."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import Dataset, Subset, TensorDataset

import samestep
from samestep.data.fetch import Collate, Fetcher, Request, as_dataset, seed_everything, tell_epoch


class Draws(Dataset):
    """Item i is (i, one draw of each generator)."""

    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> tuple[int, float, float, float]:
        return index, torch.rand(()).item(), float(np.random.rand()), random.random()


def fetch(dataset: Any, epoch: int, start: int, indices: list[int], seed: int = 0) -> Any:
    return Fetcher(dataset, seed, whole=True).__getitems__(Request(epoch, start, np.array(indices, dtype=np.int64)))


@given(st.lists(st.integers(0, 99), min_size=1, max_size=8), st.integers(0, 2**40), st.data())
@settings(deadline=None, max_examples=40)
def test_a_samples_draws_depend_on_its_position_and_not_on_its_batch(indices: list[int], start: int, data: Any) -> None:
    cut = data.draw(st.integers(0, len(indices)))
    whole = fetch(Draws(), 3, start, indices)
    assert whole == fetch(Draws(), 3, start, indices[:cut]) + fetch(Draws(), 3, start + cut, indices[cut:])


def test_draws_differ_by_seed_epoch_and_position() -> None:
    draws = [fetch(Draws(), epoch, start, [7], seed)[0][1:] for seed in (0, 1) for epoch in (0, 1) for start in (0, 1)]
    assert len({value for each in draws for value in each}) == 24


def test_all_generators_are_seeded() -> None:
    def draws(seed: int) -> tuple[float, float, float]:
        seed_everything(seed)
        return torch.rand(()).item(), float(np.random.rand()), random.random()

    assert draws(2**64 - 1) == draws(2**64 - 1)
    assert all(a != b for a, b in zip(draws(0), draws(1), strict=True))
    # torch's and numpy's generators on a CPU take 32 bits of it, Python's all.
    assert draws(0)[2] != draws(2**63)[2]


def test_tensors_are_gathered_whole_and_copied() -> None:
    rows = torch.arange(10)
    batch = Collate(None)(fetch(TensorDataset(rows, rows * 2), 0, 0, [3, 3, 1]))
    assert [part.tolist() for part in batch] == [[3, 3, 1], [6, 6, 2]]
    batch[0].zero_()
    assert rows.tolist() == list(range(10))


def test_a_dataset_that_adds_to_a_tensor_dataset_is_asked_itself() -> None:
    class Adding(TensorDataset):
        def __getitem__(self, index: int) -> Any:
            return super().__getitem__(index)[0] + 100

    assert [int(value) for value in fetch(Adding(torch.arange(5)), 0, 0, [2, 4])] == [102, 104]


class Whole(Dataset):
    """Fetches batches."""

    epoch = 0

    def __getitems__(self, indices: list[int]) -> list[float]:
        assert all(type(index) is int for index in indices)
        return [self.epoch + torch.rand(()).item() for _ in indices]


def test_a_dataset_that_fetches_batches_has_its_draws_keyed_a_micro_batch() -> None:
    assert fetch(Whole(), 0, 8, [1, 2]) == fetch(Whole(), 0, 8, [5, 6])
    assert fetch(Whole(), 0, 8, [1, 2]) != fetch(Whole(), 0, 10, [1, 2])
    assert fetch(Subset(Whole(), [3, 4]), 1, 8, [0, 1]) == fetch(Whole(), 1, 8, [3, 4])


def test_a_subset_of_a_dataset_without_batches_is_asked_sample_by_sample() -> None:
    assert fetch(Subset(Draws(), [9, 8]), 0, 5, [1, 0]) == fetch(Draws(), 0, 5, [8, 9])


def test_the_epoch_is_told_through_wrappers_and_once() -> None:
    class Told(Dataset):
        def __init__(self) -> None:
            self.told: list[int] = []

        def set_epoch(self, epoch: int) -> None:
            self.told.append(epoch)

        def __getitem__(self, index: int) -> int:
            return index

    told = Told()
    fetcher = Fetcher(Subset(told, [0, 1]), 0, whole=True)
    for epoch in (0, 0, 2, 2):
        fetcher.__getitems__(Request(epoch, 0, np.array([0, 1])))
    assert told.told == [0, 2]
    tell_epoch(Subset(Whole(), [0]), 4)
    tell_epoch([1, 2], 4)


def test_the_users_collate_sees_samples_and_steps_aside_for_whole_batches() -> None:
    assert Collate(sum)([1, 2, 3]) == 6
    assert Collate(None)([1, 2, 3]).tolist() == [1, 2, 3]


@pytest.mark.parametrize("data", [np.arange(3), torch.arange(3), (torch.arange(3),), (np.arange(3), torch.arange(3))])
def test_tensors_and_arrays_become_a_tensor_dataset(data: Any) -> None:
    assert isinstance(as_dataset(data), TensorDataset)
    assert len(as_dataset(data)) == 3


@pytest.mark.parametrize("data", [[1, 2], range(4), Draws()])
def test_what_has_a_length_and_items_is_taken_as_it_is(data: Any) -> None:
    assert as_dataset(data) is data


def test_what_is_missing_is_named() -> None:
    with pytest.raises(samestep.DataError, match="generator as a dataset, without __len__ and __getitem__"):
        as_dataset(i for i in range(3))
    with pytest.raises(samestep.DataError, match=r"lengths \[2, 3\]"):
        as_dataset((torch.ones(2), torch.ones(3)))
