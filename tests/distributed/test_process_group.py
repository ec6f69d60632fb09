"""The process group: made when there are several ranks, adopted when there is one, and gone afterwards."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

import samestep
from samestep.distributed.process_group import World, choose_device
from samestep.testing import RanksFailed, run_ranks


@pytest.mark.parametrize("device", [None, "auto", "cpu", torch.device("cpu")])
def test_the_cpu_is_chosen_where_there_is_nothing_else(device: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose_device(device, 0) == torch.device("cpu")


@pytest.mark.parametrize("device", ["gpu", "cuda:99", "mps", "", 3.5])
def test_a_device_that_is_not_there_is_refused(device: Any) -> None:
    with pytest.raises(samestep.ConfigError, match="device"):
        choose_device(device, 0)


def test_cuda_is_the_local_ranks_and_more_ranks_than_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert choose_device(None, 1) == torch.device("cuda", 1)
    assert choose_device("cuda:0", 1) == torch.device("cuda", 0)
    with pytest.raises(samestep.ConfigError, match="local_rank 2; this machine shows 2 CUDA"):
        choose_device("cuda", 2)


@pytest.mark.parametrize("timeout", [0, -1.0, float("nan")])
def test_a_time_out_is_positive(timeout: float) -> None:
    with pytest.raises(samestep.ConfigError, match="timeout_s"):
        World("cpu", timeout)


def test_alone_there_is_no_group_and_closing_twice_is_safe() -> None:
    world = World("cpu")
    assert (world.rank, world.size, world.is_main, world.gradients, world.waiting) == (0, 1, True, None, None)
    world.announce("x")
    world.wait_for("x", "nothing")
    world.close()
    world.close()
    assert not dist.is_initialized()


def made_and_gone() -> Any:
    world = World("cpu", 20.0)
    here = world.rank, world.size, world.is_main, dist.is_initialized()
    again = World("cpu", 20.0)  # in the group that the first one made
    again.close()
    still = dist.is_initialized()
    world.close()
    world.close()
    return here, still, dist.is_initialized()


def test_a_world_ends_the_group_that_it_made_and_no_other() -> None:
    assert run_ranks(made_and_gone, 2) == [((rank, 2, rank == 0, True), True, False) for rank in (0, 1)]


def adopted() -> Any:
    dist.init_process_group("gloo")
    with samestep.Run(precision="fp32", progress=False, timeout_s=20) as run:
        total = run.mean(float(run.rank))
    alive = dist.is_initialized()
    tensor = torch.ones(1)
    dist.all_reduce(tensor)
    dist.destroy_process_group()
    return total, alive, tensor.item()


def test_a_group_of_the_callers_is_used_and_left_to_him() -> None:
    assert run_ranks(adopted, 2) == [(0.5, True, 2.0)] * 2


def several_runs() -> list[float]:
    means = []
    for number in range(3):
        with samestep.Run(precision="fp32", progress=False, timeout_s=20) as run:
            means.append(run.mean(float(run.rank + number)))
    return means


def test_several_runs_follow_each_other_in_one_process() -> None:
    assert run_ranks(several_runs, 2) == [[0.5, 1.5, 2.5]] * 2


def one_is_late() -> float:
    world = World("cpu", 2.0)
    try:
        if not world.is_main:
            start = time.monotonic()
            with pytest.raises(samestep.RankError, match="rank 1 waited 2 s for the bus; it did not happen"):
                world.wait_for("bus", "the bus")
            return time.monotonic() - start
        time.sleep(3)
        return 0.0
    finally:
        world.close()


def test_waiting_in_vain_ends_with_a_name() -> None:
    _, seconds = run_ranks(one_is_late, 2)
    assert 1.5 < seconds < 5


def announced() -> list[str]:
    world = World("cpu", 20.0)
    try:
        first = world.announce_first("who", f"rank {world.rank}")
        world.announce(f"here {world.rank}")
        world.wait_for(f"here {1 - world.rank}", "the other")
        return [first, world.announce_first("who", "late")]
    finally:
        world.wait_for(f"here {1 - world.rank}", "the other")
        time.sleep(0.2)  # the store lives with main
        world.close()


def test_the_first_word_stands() -> None:
    one, two = run_ranks(announced, 2)
    assert set(one + two) == {one[0]}


def one_never_comes() -> None:
    import os

    if os.environ["RANK"] == "1":
        return
    World("cpu", 2.0)


def test_a_rank_that_never_comes_ends_the_others_in_time() -> None:
    start = time.monotonic()
    with pytest.raises(RanksFailed, match="rank 0 raised"):
        run_ranks(one_never_comes, 2, timeout_s=30)
    assert time.monotonic() - start < 15
