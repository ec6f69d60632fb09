"""An epoch as windows: shares make the window, digests tell which samples stood where, any window is the first."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import samestep
from samestep.data.fetch import as_dataset
from samestep.data.grid import Grid
from samestep.data.order import Sequential, Shuffled
from samestep.data.source import BatchList, GridCut, MapSource, bounds_of

GRIDS = st.tuples(st.integers(1, 60), st.integers(1, 12), st.integers(1, 12), st.booleans()).filter(
    lambda g: g[2] <= g[1] and not (g[3] and g[0] < g[1])
)


def cut_of(grid: tuple[int, int, int, bool], seed: int = 1) -> GridCut:
    samples, batch, micro, drop_last = grid
    made = Grid.make(num_samples=samples, batch_size=batch, micro_batch_size=micro, drop_last=drop_last)
    return GridCut(Shuffled(samples, seed), made)


def epoch_of(cut: Any, epoch: int, first: int, size: int) -> list[list[Any]]:
    """Per window: (bounds, micro-batches as lists of indices, sizes, digests) of all ranks together."""
    ranks = [list(cut.shares(epoch, first, rank, size)) for rank in range(size)]
    windows = []
    for parts in zip(*ranks, strict=True):
        assert len({plan.window for plan, _ in parts}) == 1
        assert [n for plan, _ in parts for n in plan.share] == list(range(parts[0][0].bounds[-1]))
        for rank, (plan, requests) in enumerate(parts):
            assert range(plan.bounds[rank], plan.bounds[rank + 1]) == plan.share
            assert [len(request.indices) for request in requests] == plan.sizes
        windows.append(
            [
                [request.indices.tolist() for _, requests in parts for request in requests],
                [request.start for _, requests in parts for request in requests],
                [digest for plan, _ in parts for digest in plan.digests],
            ]
        )
    return windows


@given(GRIDS, st.integers(1, 5), st.integers(0, 3))
@settings(deadline=None, max_examples=60)
def test_the_windows_are_the_same_for_any_number_of_ranks_and_hold_each_sample_once(
    grid: Any, size: int, epoch: int
) -> None:
    cut = cut_of(grid)
    alone = epoch_of(cut, epoch, 0, 1)
    assert epoch_of(cut, epoch, 0, size) == alone
    seen = [index for micro, _, _ in alone for part in micro for index in part]
    assert len(seen) == len(set(seen)) == cut.grid.num_used


@given(GRIDS, st.data())
@settings(deadline=None, max_examples=40)
def test_an_epoch_can_begin_at_any_window(grid: Any, data: Any) -> None:
    cut = cut_of(grid)
    first = data.draw(st.integers(0, cut.num_windows))
    assert epoch_of(cut, 1, first, 2) == epoch_of(cut, 1, 0, 2)[first:]


def test_a_digest_tells_a_swap_from_the_original() -> None:
    same = [
        [digest for *_, digests in epoch_of(cut_of((12, 4, 2, False), seed), 0, 0, 1) for digest in digests]
        for seed in (1, 1, 2)
    ]
    assert same[0] == same[1]
    assert not set(same[0]) & set(same[2])
    assert all(0 <= digest < 2**52 for digest in same[0])


def test_a_huge_epoch_is_reached_anywhere_at_once() -> None:
    grid = Grid.make(num_samples=10**12, batch_size=4096, micro_batch_size=64)
    cut = GridCut(Shuffled(10**12, 0), grid)
    plan, requests = next(iter(cut.shares(5, 200_000_000, 3, 8)))
    assert plan.window == 200_000_000
    assert [len(request.indices) for request in requests] == [64] * 8


@given(st.integers(0, 40), st.integers(1, 9))
def test_bounds_are_where_the_shares_begin_and_end(count: int, parts: int) -> None:
    bounds = bounds_of(count, parts)
    assert bounds[0] == 0
    assert bounds[-1] == count
    assert len(bounds) == parts + 1
    sizes = np.diff(bounds)
    assert max(sizes) - min(sizes) <= 1
    assert sorted(sizes, reverse=True) == list(sizes)


def test_a_batch_list_follows_its_sampler_and_the_number_may_change_by_epoch() -> None:
    class Growing:
        epoch = 0

        def set_epoch(self, epoch: int) -> None:
            self.epoch = epoch

        def __iter__(self) -> Any:
            return iter([[i] for i in range(3 + self.epoch)])

    cut = BatchList(Growing(), 2, 10, 0)
    assert [len(micro) for micro, _, _ in epoch_of(cut, 0, 0, 2)] == [2, 1]
    assert [len(micro) for micro, _, _ in epoch_of(cut, 3, 0, 2)] == [2, 2, 2]
    with pytest.raises(samestep.ConfigError, match="micro_batches=0"):
        BatchList(Growing(), 0, 10, 0)


def test_a_lone_sample_in_the_tail_is_announced() -> None:
    def warning(*grid: Any) -> str | None:
        return GridCut(
            Sequential(grid[0]), Grid.make(num_samples=grid[0], batch_size=grid[1], micro_batch_size=grid[2])
        ).warning

    assert "one sample" in (warning(9, 8, 4) or "")
    assert "one sample" in (warning(13, 8, 4) or "")
    assert warning(8, 8, 4) is None
    assert warning(9, 8, 1) is None


@pytest.mark.parametrize("workers", [0, 2])
def test_two_passes_at_the_same_time_do_not_mix(workers: int) -> None:
    source = MapSource(
        as_dataset(torch.arange(24)),
        cut_of((24, 4, 2, False)),
        0,
        None,
        {"num_workers": workers, **({"persistent_workers": True} if workers else {})},
    )
    try:

        def read(epoch: int) -> Any:
            return [[next(batches)[0].tolist() for _ in plan.share] for plan, batches in source.windows(epoch, 0, 0, 1)]

        right = [read(0), read(1)]
        assert right[0] != right[1]
        mixed: list[Any] = []
        for number, (plan, batches) in enumerate(source.windows(0, 0, 0, 1)):
            mixed.append([next(batches)[0].tolist() for _ in plan.share])
            if number == 2:
                assert read(1) == right[1]
        assert mixed == right[0]
        assert read(0) == right[0]
    finally:
        source.close()


@pytest.mark.parametrize("workers", [0, 2])
def test_a_pass_that_is_left_early_does_not_spoil_the_next(workers: int) -> None:
    options = {"num_workers": workers, **({"persistent_workers": True} if workers else {})}
    source = MapSource(as_dataset(torch.arange(24)), cut_of((24, 4, 2, False)), 0, None, options)
    try:
        passes = []
        for stop in (1, 3, None):
            seen = []
            for number, (plan, batches) in enumerate(source.windows(0, 0, 0, 1)):
                seen += [next(batches)[0].tolist() for _ in plan.share]
                if number == stop:
                    break
            passes.append(seen)
        assert passes[0] == passes[2][:4]
        assert passes[1] == passes[2][:8]
        assert len(passes[2]) == 12
    finally:
        source.close()
