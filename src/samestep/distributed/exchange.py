"""How the gradients of a window meet: summed over the ranks by torch's DistributedDataParallel, once a window.

Every rank takes part in exactly one exchange a window for each model, whatever its share: a rank with no micro-batch (or
whose last one had no backward) runs a forward and backward over zero-length slices of the parameters THROUGH the DDP
module, so that DDP itself keeps buckets, their re-forming and unused parameters in step. docs/decisions/0001 has why.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from samestep.distributed.collectives import broadcast_tensors, gather_json
from samestep.distributed.exact import ExactExchange
from samestep.distributed.process_group import World
from samestep.errors import ModelError, RankError

__all__ = ["Replica"]


class Replica:
    """One model whose gradients are exchanged.

    Args:
        world: the ranks.
        module: the model, on this rank's device. Main's values overwrite the other ranks'.
        find_unused_parameters: as in DistributedDataParallel.
        static_graph: as in DistributedDataParallel.
        bucket_cap_mb: size of an exchange bucket in MiB; None for torch's default.
        group: the process group of this model's exchange; one a model, so that two models' traffic cannot be mixed up.
        exact: add gradients in the tree's fixed order instead of by all-reduce.
    """

    def __init__(
        self,
        world: World,
        module: nn.Module,
        *,
        find_unused_parameters: bool = False,
        static_graph: bool = False,
        bucket_cap_mb: float | None = None,
        group: Any = None,
        exact: bool = False,
    ) -> None:
        self.exact = ExactExchange(world, group, keeps_last=find_unused_parameters) if exact else None
        self._world, self.module, self._group = world, module, group
        self._options: dict[str, Any] = {
            "find_unused_parameters": find_unused_parameters,
            "static_graph": static_graph,
            "bucket_cap_mb": bucket_cap_mb,
        }
        self.static_graph = static_graph
        self.fired = False
        """This window's exchange has happened."""
        self.live = False
        """A window is open: forwards with gradients take part in its exchange."""
        self.forwards = 0
        """How many such forwards there were so far."""
        self._ddp: DistributedDataParallel | None = None
        if world.size > 1:
            _check_same_structure(world, module)
            tensors = [*module.parameters(), *module.buffers()]
            broadcast_tensors(world, [tensor.detach() for tensor in tensors])
        self.wrap()

    def wrap(self) -> None:
        """(Re)build the DDP wrapper, for the parameters that require a gradient now. All ranks call it together."""
        self.params = list(self.module.parameters())
        self._trainable = [param.requires_grad for param in self.params]
        self._ddp = None
        if self._world.size == 1 or not any(self._trainable):
            return
        options = {name: value for name, value in self._options.items() if value is not None} | _NO_BUFFERS
        joined = _Joined(self.module, anchored=bool(options["find_unused_parameters"]))
        self._ddp = DistributedDataParallel(joined, process_group=self._group, gradient_as_bucket_view=True, **options)
        self._ddp.register_comm_hook(self, _exchange_bucket)

    def rewrap_if_unfrozen(self) -> None:
        """Wrap anew when a parameter was frozen or unfrozen since: DDP would leave it out of the exchange, silently."""
        if [param.requires_grad for param in self.params] != self._trainable:
            self.wrap()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """A forward that takes part in the exchange."""
        self.forwards += 1
        return self.module(*args, **kwargs) if self._ddp is None else self._through_ddp(*args, **kwargs)

    def _through_ddp(self, *args: Any, **kwargs: Any) -> Any:
        assert self._ddp is not None
        try:
            return self._ddp(*args, **kwargs)
        except RuntimeError as e:
            if "Expected to have finished reduction" not in str(e):
                raise
            raise ModelError(
                "a parameter got no gradient in the last window on this rank",
                "each parameter that requires a gradient takes part in each window's last micro-batch",
                "freeze it (requires_grad_(False)) or call prepare(..., find_unused_parameters=True); DDP says: "
                + str(e).split("\n")[-1].strip(),
            ) from e

    def open(self, bounds: list[int]) -> None:
        """A window begins: forget the last one's gradients.

        Args:
            bounds: rank r has the micro-batches [bounds[r], bounds[r + 1]).
        """
        self.rewrap_if_unfrozen()
        self.drop_gradients()
        self.live = True
        if self.exact is not None:
            self.exact.open([param for param in self.params if param.requires_grad], bounds)

    def sync(self, last: bool) -> None:
        """Say whether the coming forward and backward are the share's last, the ones that exchange."""
        if self._ddp is not None:
            # what no_sync() sets, without a context on the stack
            self._ddp.require_backward_grad_sync = last and not (self.exact is not None and self.exact.keeps_last)

    def leave(self, micro_batch: int, last: bool) -> None:
        """A micro-batch's backward is over. The exact exchange keeps each one's gradient apart."""
        if self.exact is not None and (not last or self.exact.keeps_last):
            self.exact.set_aside(micro_batch)

    def finish(self) -> None:
        """All ranks have exchanged: have the window's sum in .grad."""
        if self.exact is not None:
            self.exact.finish()

    def contribute_nothing(self) -> bool:
        """Take part in the exchange without a gradient of this micro-batch; False when it has already happened."""
        if self._ddp is None or self.fired:
            return False
        self._ddp.require_backward_grad_sync = True
        if self.exact is not None:
            self.exact.stand_in()
        self._through_ddp(zero_pass=True).backward()
        return True

    def drop_gradients(self) -> None:
        """Set each .grad to None, and forget that an exchange happened."""
        for param in self.params:
            param.grad = None
        self.fired = False


class _Joined(nn.Module):
    """What DDP wraps: the model, with a second way through that touches every parameter and adds zero to each."""

    def __init__(self, module: nn.Module, anchored: bool) -> None:
        super().__init__()
        self.module = module
        # With find_unused_parameters a zero pass must not claim to have used the model's parameters: one that no rank
        # used keeps grad None (weight decay must not move it). The anchor is a parameter of ours that it can use.
        device = next(module.parameters()).device
        self.anchor = nn.Parameter(torch.zeros((), device=device)) if anchored else None

    def forward(self, *args: Any, zero_pass: bool = False, **kwargs: Any) -> Any:
        if not zero_pass:
            return self.module(*args, **kwargs)
        if self.anchor is not None:
            return self.anchor * 0
        sparse = {id(m.weight) for m in self.module.modules() if getattr(m, "sparse", False) and hasattr(m, "weight")}
        terms = [_nothing(param, id(param) in sparse) for param in self.module.parameters() if param.requires_grad]
        return torch.stack(terms).sum()


def _nothing(param: torch.Tensor, sparse: bool) -> torch.Tensor:
    """A zero whose gradient with respect to `param` is all zero, in the layout that DDP expects."""
    if sparse:
        empty = torch.empty(0, dtype=torch.int64, device=param.device)
        return F.embedding(empty, param, sparse=True).sum().float()
    return param.reshape(-1)[:0].sum().float()


def _exchange_bucket(replica: Replica, bucket: Any) -> torch.futures.Future[torch.Tensor]:
    """DDP communication hook: the plain sum. The window divides by its own weight, so nothing is averaged here."""
    replica.fired = True
    if replica.exact is not None:
        return replica.exact.send(bucket)
    work = dist.all_reduce(bucket.buffer(), group=replica._group, async_op=True)
    future: torch.futures.Future[torch.Tensor] = work.get_future().then(lambda done: done.value()[0])
    return future


_exchange_bucket.__annotations__.clear()  # DDP compares them with types, and ours are strings


def _no_buffers() -> dict[str, bool]:
    """Keep DDP's hands off the buffers: torch 2.13 renamed `broadcast_buffers` and warns about the old name."""
    names = inspect.signature(DistributedDataParallel.__init__).parameters
    if "forward_sync_buffers" in names:
        return {"forward_sync_buffers": False}
    return {"broadcast_buffers": False}


_NO_BUFFERS = _no_buffers()


def _check_same_structure(world: World, module: nn.Module) -> None:
    mine = [
        [name, list(tensor.shape), str(tensor.dtype), bool(tensor.requires_grad)]
        for name, tensor in [*module.named_parameters(), *module.named_buffers()]
    ]
    everyone = gather_json(world, "prepare: model structure", mine)
    for rank, theirs in enumerate(everyone):
        if theirs == everyone[0]:
            continue
        difference = next(
            (pair for pair in zip(everyone[0], theirs, strict=False) if pair[0] != pair[1]),
            (f"{len(everyone[0])} tensors", f"{len(theirs)} tensors"),
        )
        raise RankError(
            f"the model differs: rank 0 has {difference[0]}, rank {rank} has {difference[1]}",
            "all ranks prepare the same model (names, shapes, dtypes, requires_grad)",
            "build it from the same arguments on each rank",
        )
