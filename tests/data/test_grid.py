"""The grid: windows and micro-batches are cuts of the epoch, and shares are cuts of a window."""

from __future__ import annotations

import dataclasses
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from samestep.data.grid import Grid, split
from samestep.errors import CheckpointError, ConfigError, DataError


@st.composite
def grids(draw: st.DrawFn) -> Grid:
    batch_size = draw(st.integers(1, 40))
    drop_last = draw(st.booleans())
    return Grid(
        num_samples=draw(st.integers(batch_size if drop_last else 1, 400)),
        batch_size=batch_size,
        micro_batch_size=draw(st.integers(1, batch_size)),
        drop_last=drop_last,
    )


@given(grids())
def test_windows_partition_the_positions_that_an_epoch_uses(grid: Grid) -> None:
    positions = [position for window in range(grid.num_windows) for position in grid.window(window)]
    assert positions == list(range(grid.num_used))
    assert grid.num_used + grid.num_dropped == grid.num_samples
    assert grid.num_dropped < grid.batch_size
    assert grid.drop_last or grid.num_dropped == 0


@given(grids())
def test_all_windows_are_full_but_a_tail(grid: Grid) -> None:
    sizes = [len(grid.window(window)) for window in range(grid.num_windows)]
    assert sizes[:-1] == [grid.batch_size] * (len(sizes) - 1)
    assert sizes[-1] == (grid.tail or grid.batch_size)
    assert not (grid.drop_last and grid.tail)


@given(grids())
def test_micro_batches_partition_a_window(grid: Grid) -> None:
    for window in range(grid.num_windows):
        pieces = [grid.micro_batch(window, number) for number in range(grid.num_micro_batches(window))]
        assert [position for piece in pieces for position in piece] == list(grid.window(window))
        assert all(len(piece) == grid.micro_batch_size for piece in pieces[:-1])
        assert 1 <= len(pieces[-1]) <= grid.micro_batch_size
        assert len(pieces) == grid.micro_batches or window == grid.num_windows - 1


@given(grids(), st.integers(1, 20))
def test_shares_partition_the_micro_batches_and_low_ranks_have_the_larger_ones(grid: Grid, world_size: int) -> None:
    for window in range(grid.num_windows):
        shares = [grid.share(window, rank, world_size) for rank in range(world_size)]
        assert [number for share in shares for number in share] == list(range(grid.num_micro_batches(window)))
        sizes = [len(share) for share in shares]
        assert sizes == sorted(sizes, reverse=True)
        assert sizes[0] - sizes[-1] <= 1


def test_equal_shares_are_aligned_and_the_rest_goes_to_low_ranks() -> None:
    assert [split(8, part, 4) for part in range(4)] == [range(2), range(2, 4), range(4, 6), range(6, 8)]
    assert [split(6, part, 4) for part in range(4)] == [range(2), range(2, 4), range(4, 5), range(5, 6)]
    assert [len(split(2, part, 4)) for part in range(4)] == [1, 1, 0, 0]
    assert [len(split(0, part, 2)) for part in range(2)] == [0, 0]


def test_the_last_window_of_an_epoch_stops_at_the_epochs_end() -> None:
    """Case C07: 63 micro-batches an epoch, windows of 8; the last 7 do not leak into the next epoch."""
    grid = Grid(num_samples=63, batch_size=8, micro_batch_size=1)
    assert [grid.num_micro_batches(window) for window in range(grid.num_windows)] == [8] * 7 + [7]
    assert grid.tail == 7
    assert Grid(num_samples=63, batch_size=8, micro_batch_size=1, drop_last=True).num_windows == 7


def test_a_position_past_the_epoch_belongs_to_no_window() -> None:
    grid = Grid(num_samples=9, batch_size=4, micro_batch_size=2, drop_last=True)
    assert grid.num_windows == 2
    assert len(grid.window(2)) == 0
    assert grid.num_micro_batches(2) == 0


def test_a_dataset_smaller_than_the_ranks_is_one_window_of_one_share() -> None:
    """Case C21, first part."""
    grid = Grid.make(num_samples=1, batch_size=2, world_size=2)
    assert grid.num_windows == grid.tail == 1
    assert [len(grid.share(0, rank, 2)) for rank in range(2)] == [1, 0]


@pytest.mark.parametrize("micro_batch_size", [None, 1])
def test_an_epoch_without_a_window_is_refused_with_both_numbers_and_the_ranks(micro_batch_size: int | None) -> None:
    """Case C21, second part."""
    with pytest.raises(DataError, match=r"1 sample\(s\) < batch_size=2 on 2 ranks with drop_last=True.*0 windows"):
        Grid.make(num_samples=1, batch_size=2, micro_batch_size=micro_batch_size, drop_last=True, world_size=2)
    with pytest.raises(DataError, match=r"1 sample\(s\) < batch_size=2 with drop_last=True"):
        Grid(num_samples=1, batch_size=2, micro_batch_size=1, drop_last=True)


def test_an_empty_dataset_is_refused() -> None:
    with pytest.raises(DataError, match="empty dataset"):
        Grid.make(num_samples=0, batch_size=2)


@pytest.mark.parametrize("size", [0, -1, True, False, 2.0, "2", None])
def test_a_batch_size_that_is_no_positive_int_is_refused(size: object) -> None:
    with pytest.raises(ConfigError, match=r"got batch_size=.*1 or more"):
        Grid.make(num_samples=8, batch_size=size)  # type: ignore[arg-type]


@pytest.mark.parametrize("size", [0, -1, True, 2.0, "2"])
def test_a_micro_batch_size_that_is_no_positive_int_is_refused(size: object) -> None:
    with pytest.raises(ConfigError, match=r"got micro_batch_size=.*1 or more"):
        Grid.make(num_samples=8, batch_size=8, micro_batch_size=size)  # type: ignore[arg-type]


def test_a_micro_batch_larger_than_the_batch_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"micro_batch_size=9 with batch_size=8.*pass micro_batch_size=8 or less"):
        Grid.make(num_samples=8, batch_size=8, micro_batch_size=9)


@pytest.mark.parametrize("value", [{"num_samples": 9.0}, {"num_samples": True}, {"num_samples": -1}])
def test_a_number_of_samples_that_is_no_int_is_refused(value: dict[str, object]) -> None:
    with pytest.raises(DataError, match="got num_samples="):
        Grid(**{"num_samples": 9, "batch_size": 2, "micro_batch_size": 1, **value})  # type: ignore[arg-type]


def test_without_a_micro_batch_size_each_rank_has_one_micro_batch() -> None:
    grid = Grid.make(num_samples=100, batch_size=10, world_size=4)
    assert (grid.micro_batch_size, grid.micro_batches) == (3, 4)
    assert Grid.make(num_samples=100, batch_size=10).micro_batch_size == 10


@given(st.integers(1, 64), st.integers(1, 64), st.integers(1, 16))
def test_a_grid_gives_every_rank_work_or_says_what_would(batch_size: int, size: int, world_size: int) -> None:
    grid = Grid(num_samples=1000, batch_size=batch_size, micro_batch_size=min(size, batch_size))
    if grid.micro_batches >= world_size:
        grid.check_world_size(world_size)
        assert all(len(grid.share(0, rank, world_size)) for rank in range(world_size))
        return
    with pytest.raises(ConfigError) as caught:
        grid.check_world_size(world_size)
    assert f"got {world_size} ranks for windows of {grid.micro_batches} micro-batch(es)" in caught.value.got
    advice = caught.value.fix
    grid.check_world_size(int(advice.split("at most ")[1].split()[0]))
    name, number = advice.rpartition("with ")[2].split()[0].split("=")
    if name == "micro_batch_size":
        changed = dataclasses.replace(grid, micro_batch_size=int(number))
    else:
        changed = dataclasses.replace(grid, batch_size=int(number), micro_batch_size=1)
    changed.check_world_size(world_size)


def test_more_ranks_than_micro_batches_are_refused_at_a_first_start() -> None:
    with pytest.raises(ConfigError, match=r"3 ranks for windows of 2 .*at most 2 rank.*micro_batch_size=2 or less"):
        Grid.make(num_samples=80, batch_size=8, micro_batch_size=4, world_size=3)
    with pytest.raises(ConfigError, match=r"4 ranks for windows of 3 .*at most 3 rank.*batch_size=4 or more"):
        Grid.make(num_samples=90, batch_size=3, world_size=4)


def test_without_a_size_every_rank_gets_a_micro_batch_where_there_are_samples_for_all() -> None:
    for batch_size in range(1, 40):
        for world_size in range(1, batch_size + 1):
            grid = Grid.make(num_samples=100, batch_size=batch_size, world_size=world_size)
            assert world_size <= grid.micro_batches < 2 * world_size


@pytest.mark.parametrize(
    ("num_samples", "drop_last", "words"),
    [
        (9, False, "9 samples = 1 window of 8 + a tail of 1; 2 micro-batches of 4 a window"),
        (16, False, "16 samples = 2 windows of 8; 2 micro-batches of 4 a window"),
        (9, True, "9 samples = 1 window of 8 (1 of 9 samples dropped); 2 micro-batches of 4 a window"),
    ],
)
def test_a_grid_says_in_words_what_an_epoch_is(num_samples: int, drop_last: bool, words: str) -> None:
    assert Grid(num_samples=num_samples, batch_size=8, micro_batch_size=4, drop_last=drop_last).describe() == words


@given(grids())
def test_a_grid_survives_json(grid: Grid) -> None:
    assert Grid.from_json(json.loads(json.dumps(grid.to_json()))) == grid


GOOD = {"num_samples": 9, "batch_size": 4, "micro_batch_size": 2, "drop_last": False}


@pytest.mark.parametrize(
    "value",
    [
        None,
        7,
        [9, 4, 2],
        {},
        {**GOOD, "more": 1},
        {**GOOD, "num_samples": "9"},
        {**GOOD, "batch_size": 4.0},
        {**GOOD, "batch_size": 0},
        {**GOOD, "drop_last": 1},
        {**GOOD, "micro_batch_size": None},
    ],
)
def test_a_recorded_grid_that_is_none_is_refused_as_a_checkpoint_fault(value: object) -> None:
    with pytest.raises(CheckpointError, match="the recorded grid"):
        Grid.from_json(value)


def test_a_huge_epoch_costs_nothing() -> None:
    grid = Grid.make(num_samples=2**62 - 1, batch_size=4096, micro_batch_size=32, world_size=64)
    last = grid.num_windows - 1
    assert grid.window(last) == range(2**62 - 4096, 2**62 - 1)
    assert grid.share(last, 63, 64) == range(126, 128)
    assert grid.micro_batch(last, 127) == range(2**62 - 32, 2**62 - 1)
