"""From what a loader was asked for to a source; a checkpoint's grid is kept, and what differs is named."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

import samestep
from samestep.data.build import LoaderSpec, make_source
from samestep.data.order import Listed, Sequential, Shuffled, Weighted


def source(data: Any = None, world_size: int = 1, recorded: Any = None, **spec: Any) -> Any:
    data = torch.arange(10) if data is None else data
    return make_source(
        LoaderSpec(data=data, **spec),
        seed=0,
        world_size=world_size,
        device=torch.device("cpu"),
        recorded=recorded,
        agree=lambda numbers: numbers,
    )


@pytest.mark.parametrize(
    ("spec", "ranks", "micro", "size"),
    [
        ({"batch_size": 8}, 1, 1, 8),
        ({"batch_size": 8}, 2, 2, 4),
        ({"batch_size": 8}, 3, 3, 3),
        ({"batch_size": 9}, 4, 5, 2),
        ({"batch_size": 8, "micro_batch_size": 2}, 1, 4, 2),
        ({"batch_size": 8, "micro_batch_size": 3}, 2, 3, 3),
        ({"batch_size": 8, "micro_batches": 4}, 2, 4, 2),
        ({"batch_size": 2}, 5, 2, 1),
    ],
)
def test_the_grid_is_as_said_or_one_micro_batch_a_rank(spec: dict, ranks: int, micro: int, size: int) -> None:
    grid = source(world_size=ranks, **spec).cut.grid
    assert (grid.micro_batches, grid.micro_batch_size) == (micro, size)


def test_a_recorded_grid_is_kept_on_another_number_of_ranks() -> None:
    recorded = source(world_size=4, batch_size=8).describe()
    for ranks in (1, 2, 3):
        assert source(world_size=ranks, batch_size=8, recorded=recorded).describe() == recorded


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"batch_size": 4}, "batch_size was 8, is 4"),
        ({"micro_batch_size": 2}, "micro_batch_size was 4, is 2"),
        ({"drop_last": True}, "drop_last was False, is True"),
        ({"shuffle": True}, "kind was 'Sequential', is 'Shuffled'"),
        ({"weights": [1.0] * 10}, "kind was 'Sequential', is 'Weighted'"),
        ({"data": torch.arange(12)}, "num_samples was 10, is 12"),
    ],
)
def test_what_differs_from_the_record_is_named(change: dict[str, Any], named: str) -> None:
    recorded = source(world_size=2, batch_size=8).describe()
    with pytest.raises(samestep.CheckpointError, match=named):
        source(**{"world_size": 2, "batch_size": 8, "recorded": recorded, **change})


def test_other_weights_are_another_order() -> None:
    recorded = source(batch_size=5, weights=[1.0] * 10).describe()
    with pytest.raises(samestep.CheckpointError, match=r"order\.weights was"):
        source(batch_size=5, weights=[1.0] * 9 + [2.0], recorded=recorded)


DATA = TensorDataset(torch.arange(10))


@pytest.mark.parametrize(
    ("loader", "order"),
    [
        (DataLoader(DATA, 4), Sequential),
        (DataLoader(DATA, 4, shuffle=True), Shuffled),
        (DataLoader(DATA, sampler=RandomSampler(DATA), batch_size=4), Shuffled),
        (DataLoader(DATA, sampler=RandomSampler(DATA, num_samples=5), batch_size=4), Listed),
        (DataLoader(DATA, sampler=WeightedRandomSampler([1.0] * 10, 20), batch_size=4), Weighted),
        (DataLoader(DATA, sampler=[1, 2, 3], batch_size=4), Listed),
        (DataLoader(DATA, batch_sampler=BatchSampler(RandomSampler(DATA), 4, True)), Shuffled),
    ],
)
def test_a_dataloaders_sampler_says_the_order_and_its_batch_size_is_the_global_one(loader: Any, order: type) -> None:
    made = source(loader, world_size=2)
    assert type(made.cut.order) is order
    assert made.cut.grid.batch_size == 4
    assert made.cut.grid.drop_last is loader.batch_sampler.drop_last


def test_what_is_said_goes_before_what_the_dataloader_says() -> None:
    made = source(
        DataLoader(DATA, 4, num_workers=2), batch_size=6, shuffle=True, drop_last=True, options={"num_workers": 0}
    )
    assert (made.cut.grid.batch_size, made.cut.grid.drop_last, type(made.cut.order)) == (6, True, Shuffled)
    assert made._engine is None


def test_a_dataloader_without_batches_is_refused() -> None:
    with pytest.raises(samestep.ConfigError, match="batch_size=None"):
        source(DataLoader(DATA, batch_size=None))


def test_a_callers_dataloader_is_left_as_it_was() -> None:
    loader = DataLoader(DATA, 4, shuffle=True, num_workers=1)
    before = {name: value for name, value in vars(loader).items() if not name.startswith("_")}
    source(loader, micro_batch_size=2).close()
    assert {name: value for name, value in vars(loader).items() if not name.startswith("_")} == before


class Stream(IterableDataset):
    """Two numbers."""

    def __iter__(self) -> Any:
        return iter([1, 2])


@pytest.mark.parametrize(
    ("spec", "shards", "size"),
    [
        ({"batch_size": 8}, 2, 4),
        ({"batch_size": 8, "micro_batch_size": 2}, 4, 2),
        ({"batch_size": 8, "micro_batches": 8}, 8, 1),
    ],
)
def test_a_streams_shards_are_the_micro_batches(spec: dict[str, int], shards: int, size: int) -> None:
    assert source(Stream(), 2, **spec).describe() == {"shards": shards, "micro_batch_size": size}


@pytest.mark.parametrize("spec", [{"micro_batch_size": 3}, {"micro_batches": 3}, {"micro_batches": 16}])
def test_a_stream_is_cut_evenly_or_not_at_all(spec: dict[str, int]) -> None:
    with pytest.raises(samestep.ConfigError, match="one whole micro-batch"):
        source(Stream(), batch_size=8, **spec)


def test_a_streams_recorded_shards_are_kept() -> None:
    recorded = source(Stream(), 4, batch_size=8).describe()
    assert source(Stream(), 2, recorded, batch_size=8).describe() == recorded
    with pytest.raises(samestep.CheckpointError, match="shards was 4, is 2"):
        source(Stream(), 2, recorded, batch_size=8, micro_batch_size=4)
