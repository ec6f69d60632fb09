"""The exact exchange: each rank's nodes of the tree are dealt out in shards, each rank finishes its shard, all gather.

DDP's hook sends a bucket as soon as its last gradient is there (all_to_all_single, asynchronous), so sending overlaps
backward; the buckets are finished in order afterwards. The second collective is never issued from the first one's
completion: with several buckets the ranks' orders of collectives would differ. Traffic is that of a ring all-reduce
when shares are whole nodes of the tree.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import torch.distributed as dist

from samestep.distributed.collectives import sum_in_place
from samestep.distributed.process_group import World
from samestep.distributed.tree import Node, Stack, are_siblings, cover, parent, root
from samestep.errors import ModelError

__all__ = ["ExactExchange"]

# torch 2.13 gave it a new name and warns about the old one
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


@dataclasses.dataclass(slots=True)
class _Sent:
    """One bucket on its way."""

    work: Any
    buffer: torch.Tensor
    received: torch.Tensor
    sending: torch.Tensor
    """Kept alive until the work is done."""
    params: list[torch.Tensor]
    views: list[torch.Tensor]
    """Of the buffer, in the shapes of `params`."""


class ExactExchange:
    """Gradients of one model, added in the tree's order.

    Args:
        world: the ranks.
        group: the model's process group; None when alone.
        keeps_last: also set the share's last gradient aside before anything is sent. Needed with unused parameters,
            whose absence cannot be seen in DDP's buckets; costs the overlap.
    """

    def __init__(self, world: World, group: Any, keeps_last: bool) -> None:
        self._world, self._group, self.keeps_last = world, group, keeps_last or world.size == 1
        self._params: list[torch.Tensor] = []
        self._sent: list[_Sent] = []
        self._pool: torch.Tensor | None = None
        self._taken = 0
        self.bytes_sent = 0
        """By this rank to the others, so far."""

    def open(self, params: list[torch.Tensor], bounds: list[int]) -> None:
        """A window begins.

        Args:
            params: those that train.
            bounds: rank r has the micro-batches [bounds[r], bounds[r + 1]).
        """
        self._params, self._bounds = params, bounds
        self._place = {id(param): number for number, param in enumerate(params)}
        self._stack = Stack()
        self._used = [False] * len(params)
        self._sent = []
        if params and self._taken > (0 if self._pool is None else len(self._pool)):
            self._pool = params[0].new_empty(self._taken, requires_grad=False)
        self._taken = 0

    def set_aside(self, micro_batch: int) -> None:
        """Take a micro-batch's gradients out of .grad, as a leaf."""
        grads = []
        for number, param in enumerate(self._params):
            if param.grad is not None and param.grad.is_sparse:
                raise ModelError(
                    f"got a sparse gradient for a parameter of shape {tuple(param.shape)}",
                    "the exact exchange adds dense gradients",
                    "make the embedding with sparse=False, or use exchange='fast'",
                )
            self._used[number] = self._used[number] or param.grad is not None
            grads.append(_like(param, param.grad))
            param.grad = None
        self._stack.push(micro_batch, grads)

    def stand_in(self) -> None:
        """Give each used parameter a zero .grad: DDP remembers that it was used, and expects to find one."""
        if self.keeps_last:
            for param, used in zip(self._params, self._used, strict=True):
                if used:
                    param.grad = torch.zeros_like(param, requires_grad=False)

    def send(self, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        """DDP communication hook: begin the exchange of a bucket, and give it back at once as it is."""
        world, rank, buffer = self._world, self._world.rank, bucket.buffer()
        views, params = bucket.gradients(), bucket.parameters()
        values = self._nodes(buffer, params, views)
        spans = _shards(buffer.numel(), world.size)
        if len(values) == 1:
            sending = values[0]
        else:
            pieces = [value[span.start : span.stop] for span in spans for value in values]
            sending = torch.cat(pieces) if pieces else buffer.new_empty(0)
        self.bytes_sent += len(values) * (buffer.numel() - len(spans[rank])) * buffer.element_size()
        counts = [len(self._cover(other)) for other in range(world.size)]
        received = self._workspace(sum(counts) * len(spans[rank]), buffer)
        work = dist.all_to_all_single(
            received,
            sending,
            output_split_sizes=[count * len(spans[rank]) for count in counts],
            input_split_sizes=[len(values) * len(span) for span in spans],
            group=self._group,
            async_op=True,
        )
        self._sent.append(_Sent(work, buffer, received, sending, params, views))
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future(
            devices=[buffer.device] if buffer.device.type == "cuda" else []
        )
        future.set_result(buffer)
        return future

    def _workspace(self, length: int, like: torch.Tensor) -> torch.Tensor:
        """Memory that stays from window to window: fresh pages cost more than what is done with them."""
        start, self._taken = self._taken, self._taken + length
        if self._pool is None or self._taken > len(self._pool):
            return like.new_empty(length)  # the first window; the next one has a pool of the whole size
        return self._pool[start : self._taken]

    def _nodes(self, buffer: torch.Tensor, params: list[torch.Tensor], views: list[torch.Tensor]) -> list[torch.Tensor]:
        """This rank's nodes for one bucket, flat in the bucket's layout; the last leaf stands in the bucket itself."""
        nodes, kept = self._stack.nodes, len(self._stack.nodes)
        places = [self._place[id(param)] for param in params if id(param) in self._place]
        own = [view for view, param in zip(views, params, strict=True) if id(param) in self._place]
        flat = []
        share = range(self._bounds[self._world.rank], self._bounds[self._world.rank + 1])
        if share and not self.keeps_last:
            last: Node = (0, share[-1])
            while kept and are_siblings(nodes[kept - 1], last):
                kept -= 1
                torch._foreach_add_(own, [self._stack.values[kept][place] for place in places])
                last = parent(last)
            flat.append(buffer)
        for values in reversed(self._stack.values[:kept]):
            copy = torch.zeros_like(buffer)
            for place, view in zip(places, own, strict=True):
                offset = view.storage_offset() - buffer.storage_offset()
                copy.as_strided(view.shape, view.stride(), offset).copy_(values[place])
            flat.append(copy)
        return flat[::-1]

    def _cover(self, rank: int) -> list[Node]:
        return cover(range(self._bounds[rank], self._bounds[rank + 1]))

    def finish(self) -> None:
        """Wait for the buckets, finish the tree, and leave the same gradient in .grad on all ranks."""
        if self._world.size == 1:
            self._finish_alone()
            return
        num_leaves, size, rank = self._bounds[-1], self._world.size, self._world.rank
        nodes = [node for other in range(size) for node in self._cover(other)]
        gathering = []
        for sent in self._sent:
            sent.work.wait()
            buffer, length = sent.buffer, len(_shards(sent.buffer.numel(), size)[rank])
            parts = dict(zip(nodes, torch.split(sent.received, length), strict=True)) if length else {}
            if buffer.numel() % size == 0:
                shard, whole = root(parts, num_leaves), buffer
            else:  # the last shards are shorter, and a gather takes equal ones
                shard = buffer.new_zeros(-(-buffer.numel() // size))
                if parts:
                    shard[:length] = root(parts, num_leaves)
                whole = buffer.new_empty(len(shard) * size)
            self.bytes_sent += length * (size - 1) * shard.element_size()
            gathering.append((buffer, shard, whole, _all_gather(whole, shard, group=self._group, async_op=True)))
        for buffer, _, whole, work in gathering:
            work.wait()
            if whole is not buffer:
                buffer.copy_(whole[: buffer.numel()])
        self._set_gradients()
        self._sent, self._stack = [], Stack()

    def _finish_alone(self) -> None:
        nodes, values = self._stack.nodes, self._stack.values
        for number, param in enumerate(self._params):
            if self._used[number]:
                parts = {node: tensors[number] for node, tensors in zip(nodes, values, strict=True)}
                param.grad = root(parts, self._bounds[-1])
        self._stack = Stack()

    def _set_gradients(self) -> None:
        """Make .grad the reduced value, or None for a parameter that no rank used: alike on all ranks."""
        if not self.keeps_last:
            return  # DDP made every .grad a view of its bucket
        used = torch.tensor(self._used, dtype=torch.float32, device=self._world.device)
        anyone = sum_in_place(self._world, used).tolist()
        for sent in self._sent:
            for param, view in zip(sent.params, sent.views, strict=True):
                place = self._place.get(id(param))
                if place is not None:
                    param.grad = view if anyone[place] else None


def _like(param: torch.Tensor, grad: torch.Tensor | None) -> torch.Tensor:
    """The gradient in its parameter's memory layout, zero if there is none: what stands in a bucket, bit for bit."""
    if grad is None:
        return torch.zeros_like(param, requires_grad=False)
    if grad.stride() == param.stride():
        return grad
    return torch.empty_like(param, requires_grad=False).copy_(grad)


def _shards(length: int, parts: int) -> list[range]:
    """range(length) in `parts` pieces of equal size, the last ones shorter."""
    size = -(-length // parts)
    return [range(min(part * size, length), min((part + 1) * size, length)) for part in range(parts)]
