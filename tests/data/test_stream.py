"""Streams: logical shards that ranks and workers read whole."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import IterableDataset, get_worker_info

import samestep
from samestep.data.stream import StreamSource


class Numbers(IterableDataset):
    """0 .. length-1 with a draw; splits itself by worker as torch's documentation has it."""

    def __init__(self, length: int) -> None:
        self.length, self.epoch = length, -1

    def __iter__(self) -> Any:
        info = get_worker_info()
        step, start = (1, 0) if info is None else (info.num_workers, info.id)
        for i in range(start, self.length, step):
            yield i, torch.randint(10**6, ()).item(), self.epoch


class Sharded(Numbers):
    """In parts."""

    def shard(self, num_shards: int, index: int) -> Any:
        return ((i, torch.randint(10**6, ()).item(), self.epoch) for i in range(index, self.length, num_shards))


def together(
    dataset: Any, micro: int, size: int, ranks: int, epoch: int = 0, first: int = 0, workers: int = 0
) -> list[Any]:
    """All ranks' windows, read in lockstep in one process."""
    options = {"num_workers": workers}
    agreed: list[float] = []
    sources = [
        StreamSource(dataset, micro, size, 3, list, options, lambda sizes: agreed or sizes) for _ in range(ranks)
    ]
    # The ranks agree by adding: here each is asked in turn, so they are told the sum that one rank alone would find.
    whole = StreamSource(dataset, micro, size, 3, list, options, lambda sizes: sizes)
    windows = []
    passes = [source.windows(epoch, first, rank, ranks) for rank, source in enumerate(sources)]
    for plan, batches in whole.windows(epoch, first, 0, 1):
        present = list(batches)
        windows.append(present)
        agreed[:] = sizes_of(present, micro, size, dataset, plan.window)
        parts = [next(each) for each in passes]
        assert [batch for _, own in parts for batch in own] == present
        assert [n for other, _ in parts for n in other.share] == list(range(len(present)))
        assert {tuple(other.bounds) for other, _ in parts} == {tuple(parts[0][0].bounds)}
    return windows


def sizes_of(present: list[Any], micro: int, size: int, dataset: Any, window: int) -> list[float]:
    """Which shards have samples in this window: shard s holds the positions s, s + M, ..."""
    held = [max(0, -(-(dataset.length - shard) // micro)) for shard in range(micro)]
    sizes = [float(min(size, max(0, count - window * size))) for count in held]
    assert [int(value) for value in sizes if value] == [len(batch) for batch in present]
    return sizes


@given(st.integers(0, 40), st.integers(1, 5), st.integers(1, 4), st.integers(1, 4), st.sampled_from([Numbers, Sharded]))
@settings(deadline=None, max_examples=60)
def test_any_number_of_ranks_reads_the_same_windows_and_each_sample_once(
    length: int, micro: int, size: int, ranks: int, kind: Any
) -> None:
    windows = together(kind(length), micro, size, ranks)
    seen = [sample[0] for window in windows for batch in window for sample in batch]
    assert sorted(seen) == list(range(length))


@pytest.mark.parametrize("kind", [Numbers, Sharded])
def test_a_pass_can_begin_at_any_window(kind: Any) -> None:
    whole = together(kind(31), 3, 2, 2, epoch=1)
    for first in range(len(whole) + 2):
        assert together(kind(31), 3, 2, 1, epoch=1, first=first) == whole[first:]


@pytest.mark.parametrize("kind", [Numbers, Sharded])
def test_workers_change_neither_samples_nor_their_random_numbers(kind: Any) -> None:
    assert together(kind(23), 3, 2, 1, workers=2) == together(kind(23), 3, 2, 1)


def test_random_numbers_and_the_epoch_differ_by_epoch() -> None:
    one, two = (together(Sharded(8), 2, 2, 1, epoch=epoch) for epoch in (0, 1))
    assert {sample[2] for window in two for batch in window for sample in batch} == {1}
    assert not {s[1] for w in one for b in w for s in b} & {s[1] for w in two for b in w for s in b}


@pytest.mark.parametrize(("micro", "size"), [(0, 1), (1, 0)])
def test_a_stream_has_at_least_one_shard_and_sample(micro: int, size: int) -> None:
    with pytest.raises(samestep.ConfigError):
        StreamSource(Numbers(3), micro, size, 0, None, {}, lambda sizes: sizes)
