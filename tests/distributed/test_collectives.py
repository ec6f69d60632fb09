"""The small collectives: the identity when alone, and an error that says who is where when ranks part."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import samestep
from samestep.distributed.collectives import (
    broadcast_json,
    broadcast_tensors,
    gather_json,
    gather_tensors,
    start_sum,
    sum_in_place,
    sum_numbers,
)
from samestep.distributed.process_group import World
from samestep.testing import RanksFailed, run_ranks


def with_world(what: Any, *args: Any) -> Any:
    world = World("cpu", 20.0)
    try:
        return what(world, *args)
    finally:
        world.close()


def test_alone_each_is_the_identity_without_any_process_group() -> None:
    world = World("cpu")
    tensor, value = torch.ones(2), {"a": [1, None]}
    assert sum_in_place(world, tensor) is tensor
    assert start_sum(world, tensor) is None
    assert sum_numbers(world, [1.5]) == [1.5]
    assert gather_json(world, "x", value) == [value]
    assert broadcast_json(world, "x", value) is value
    assert torch.equal(gather_tensors(world, tensor)[0], tensor)
    broadcast_tensors(world, [tensor])
    assert not torch.distributed.is_initialized()


def values(world: World) -> Any:
    mine = {"rank": world.rank, "text": "é" * (1 + 1000 * world.rank), "none": None, "nan": float("nan")}
    everyone = gather_json(world, "values", mine)
    assert [len(each["text"]) for each in everyone] == [1 + 1000 * rank for rank in range(world.size)]
    assert [each["rank"] for each in everyone] == list(range(world.size))
    assert all(each["nan"] != each["nan"] for each in everyone)
    return broadcast_json(world, "main's", world.rank if world.is_main else object()), sum_numbers(
        world, [0.1, world.rank]
    )


@pytest.mark.parametrize("ranks", [2, 3])
def test_values_of_any_length_come_in_rank_order(ranks: int) -> None:
    for main, numbers in run_ranks(with_world, ranks, values):
        assert main == 0
        assert numbers == pytest.approx([0.1 * ranks, sum(range(ranks))])


def topics(world: World) -> None:
    gather_json(world, "log" if world.is_main else "run directory", 1)


def test_ranks_at_different_calls_learn_where_the_others_are() -> None:
    with pytest.raises(RanksFailed, match=r"rank 0 in 'log', rank 1 in 'run directory'") as failed:
        run_ranks(with_world, 2, topics)
    assert {type(error) for error in failed.value.errors.values()} == {samestep.RankError}


def shapes(world: World, dtype: torch.dtype) -> Any:
    mine = torch.full((world.rank, 2), world.rank, dtype=dtype)  # main has no row
    mine = mine.requires_grad_() if dtype.is_floating_point else mine
    gathered = gather_tensors(world, mine)
    assert [part.dtype for part in gathered] == [dtype] * world.size
    assert not any(part.requires_grad for part in gathered)
    return [part.tolist() for part in gathered]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_tensors_of_different_lengths_meet(dtype: torch.dtype) -> None:
    right = [torch.full((rank, 2), rank, dtype=dtype).tolist() for rank in range(3)]
    assert run_ranks(with_world, 3, shapes, dtype) == [right] * 3


def dtypes(world: World) -> None:
    gather_tensors(world, torch.ones(2, dtype=torch.float32 if world.is_main else torch.float64))


def empty_of_another_dtype(world: World) -> list[str]:
    mine = torch.empty(0) if world.is_main else torch.ones(2, dtype=torch.int64)
    return [str(part.dtype) for part in gather_tensors(world, mine)]


def test_tensors_that_hold_something_have_one_dtype() -> None:
    with pytest.raises(RanksFailed, match=r"the ranks gather tensors of torch\.float32, torch\.float64"):
        run_ranks(with_world, 2, dtypes)
    assert run_ranks(with_world, 2, empty_of_another_dtype) == [["torch.int64"] * 2] * 2


def scalars_and_odd_strides(world: World) -> Any:
    columns = torch.arange(6).reshape(2, 3).t() + 10 * world.rank
    return [part.tolist() for part in gather_tensors(world, columns)], gather_tensors(world, torch.tensor(world.rank))


def test_scalars_and_transposed_tensors_keep_their_shape() -> None:
    for parts, numbers in run_ranks(with_world, 2, scalars_and_odd_strides):
        assert parts == [[[0, 3], [1, 4], [2, 5]], [[10, 13], [11, 14], [12, 15]]]
        assert [int(number) for number in numbers] == [0, 1]


def overwritten(world: World) -> list[float]:
    tensors = [torch.full((2,), float(world.rank)), torch.tensor(world.rank)]
    broadcast_tensors(world, tensors)
    total = torch.tensor([1.0, world.rank], dtype=torch.float64)
    work = start_sum(world, total)
    work.wait()
    return [tensors[0].sum().item(), tensors[1].item(), *total.tolist()]


def test_main_overwrites_and_sums_add() -> None:
    assert run_ranks(with_world, 3, overwritten) == [[0.0, 0, 3.0, 3.0]] * 3
