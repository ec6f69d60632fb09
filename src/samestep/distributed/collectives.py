"""The small collectives of a run. Alone, each is the identity. Only this folder calls torch.distributed."""

from __future__ import annotations

import json
import math
from typing import Any

import torch
import torch.distributed as dist

from samestep.distributed.process_group import World
from samestep.errors import RankError

__all__ = [
    "broadcast_json",
    "broadcast_tensors",
    "gather_json",
    "gather_tensors",
    "start_sum",
    "sum_in_place",
    "sum_numbers",
]


def start_sum(world: World, tensor: torch.Tensor) -> Any:
    """Begin adding `tensor` over the ranks in place, on the statistics group; returns a work with `.wait()`, or None."""
    if world.size == 1:
        return None
    return dist.all_reduce(tensor, group=world.statistics, async_op=True)


def sum_in_place(world: World, tensor: torch.Tensor) -> torch.Tensor:
    """Add `tensor` (on the run's device) over the ranks in place, on the statistics group, and return it."""
    work = start_sum(world, tensor)
    if work is not None:
        work.wait()
    return tensor


def sum_numbers(world: World, numbers: list[float]) -> list[float]:
    """Add a list of host numbers over the ranks, slot by slot, in fp64, on the control group."""
    if world.size == 1:
        return numbers
    tensor = torch.tensor(numbers, dtype=torch.float64)
    dist.all_reduce(tensor, group=world.control)
    return list(tensor.tolist())


def gather_json(world: World, topic: str, value: Any, group: Any = None) -> list[Any]:
    """The values of all ranks, in rank order, on all ranks.

    Values travel as JSON text, never pickled. `topic` names the meeting: ranks that meet in different ones get an error
    that says which rank is where, instead of each other's data.

    Raises:
        RankError: when the ranks came for different topics.
    """
    if world.size == 1:
        return [value]
    group = world.control if group is None else group
    text = json.dumps({"topic": topic, "value": value}).encode()
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(world.size)]
    dist.all_gather(sizes, torch.tensor([len(text)]), group=group)
    longest = int(max(size.item() for size in sizes))
    mine = torch.zeros(longest, dtype=torch.uint8)
    mine[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    rows = [torch.empty(longest, dtype=torch.uint8) for _ in range(world.size)]
    dist.all_gather(rows, mine, group=group)
    messages = [json.loads(bytes(row[: int(size)].numpy().tobytes())) for row, size in zip(rows, sizes, strict=True)]
    topics = [message["topic"] for message in messages]
    if len(set(topics)) > 1:
        places = ", ".join(f"rank {rank} in {topic!r}" for rank, topic in enumerate(topics))
        raise RankError(f"the ranks are at different calls: {places}", "all ranks make the same collective calls")
    return [message["value"] for message in messages]


def gather_tensors(world: World, tensor: torch.Tensor) -> list[torch.Tensor]:
    """Every rank's tensor, without gradients, in rank order, on all ranks and on its device.

    Shapes may differ. CPU tensors travel on the control group, others on the statistics group.

    Raises:
        RankError: when tensors that hold something differ in dtype.
    """
    tensor = tensor.detach().contiguous()
    if world.size == 1:
        return [tensor]
    headers = gather_json(world, "gather tensors", [list(tensor.shape), str(tensor.dtype)])
    dtypes = {dtype for shape, dtype in headers if math.prod(shape)} or {str(tensor.dtype)}
    if len(dtypes) > 1:
        raise RankError(f"the ranks gather tensors of {', '.join(sorted(dtypes))}", "they have one dtype", "cast them")
    kind: torch.dtype = getattr(torch, dtypes.pop().removeprefix("torch."))
    lengths = [math.prod(shape) * kind.itemsize for shape, _ in headers]
    row = torch.zeros(max(lengths), dtype=torch.uint8, device=tensor.device)
    row[: lengths[world.rank]] = tensor.to(kind).reshape(-1).view(torch.uint8)
    rows = [torch.empty_like(row) for _ in range(world.size)]
    dist.all_gather(rows, row, group=world.control if tensor.device.type == "cpu" else world.statistics)
    return [
        received[:length].view(kind).reshape(shape)
        for received, length, (shape, _) in zip(rows, lengths, headers, strict=True)
    ]


def broadcast_json(world: World, topic: str, value: Any) -> Any:
    """Main's value, on all ranks."""
    return gather_json(world, topic, value if world.is_main else None)[0]


def broadcast_tensors(world: World, tensors: list[torch.Tensor]) -> None:
    """Overwrite `tensors` with main's, in place."""
    if world.size == 1:
        return
    for tensor in tensors:
        dist.broadcast(tensor, src=0, group=world.gradients)
