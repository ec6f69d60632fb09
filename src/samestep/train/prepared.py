"""The model that `run.prepare` returns: the user's model, with precision and exchange around its forward."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, cast

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from samestep.distributed.exchange import Replica
from samestep.errors import ModelError
from samestep.precision.policy import Policy, to_fp32

__all__ = ["Prepared", "check_model", "unwrap"]

_OWN = frozenset({"module", "replica", "_policy", "_dtypes", "training"})


class Prepared(nn.Module):
    """Behaves as the module it holds: the same names in state_dict, parameters and attributes.

    A forward inside an open window runs under autocast and takes part in the exchange; outputs come back in fp32.
    Outside a window, or without gradients, nothing is communicated: evaluating on one rank alone is safe.

    Args:
        module: the user's model, on the run's device.
        replica: its exchange.
        policy: the run's precision.
    """

    def __init__(self, module: nn.Module, replica: Replica, policy: Policy) -> None:
        super().__init__()
        self.module = module
        self.replica = replica
        self._policy = policy
        self._dtypes = [param.dtype for param in replica.params]
        self.training = module.training

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's forward under the run's precision; 16-bit outputs are returned as fp32."""
        replica = self.replica
        call: Any = replica if replica.live and torch.is_grad_enabled() else self.module
        if self._policy.dtype is None:
            return call(*args, **kwargs)
        with torch.autocast(self._policy.device_type, dtype=self._policy.dtype):
            output = call(*args, **kwargs)
        return to_fp32(output)

    def check_unmoved(self) -> None:
        """Raise ModelError when a parameter was cast since `prepare`, e.g. by `net.half()` on the inner module."""
        if [param.dtype for param in self.replica.params] != self._dtypes:
            changed = [
                f"{name} is {param.dtype}, was {dtype}"
                for (name, param), dtype in zip(self.module.named_parameters(), self._dtypes, strict=False)
                if param.dtype != dtype
            ]
            raise ModelError(
                "the model was cast after prepare: " + "; ".join(changed[:3] or ["parameters were added or removed"]),
                "precision is the run's to choose and parameters stay as they were prepared",
                "cast before prepare, or use Run(precision=...)",
            )

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        raise ModelError(
            "the prepared model was moved or cast (.to, .cuda, .half, ...)",
            "the optimizer and the exchange hold its parameters where prepare put them",
            "move or cast the module before prepare, and choose Run(device=..., precision=...)",
        )

    def train(self, mode: bool = True) -> Prepared:
        """As nn.Module.train, for the module inside."""
        self.training = mode
        self.module.train(mode)
        return self

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The inner module's, without any wrapper's prefix."""
        return unwrap(self.module).state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """The inner module's. `assign` would break the optimizer's hold on the parameters and is refused."""
        if assign:
            raise ModelError("got assign=True", "the optimizer holds the parameters", "load with assign=False")
        return unwrap(self.module).load_state_dict(state_dict, strict=strict)

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """The inner module's, so that parameter names are the user's."""
        yield from unwrap(self.module).named_modules(memo, prefix, remove_duplicate)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _OWN or "module" not in self.__dict__.get("_modules", {}):
            super().__setattr__(name, value)
        else:
            setattr(self.module, name, value)  # the model reads its own attributes from the inner module


def unwrap(module: nn.Module) -> nn.Module:
    """The user's own module under Prepared, DistributedDataParallel and torch.compile's wrappers."""
    while True:
        if isinstance(module, Prepared | DistributedDataParallel):
            module = cast(nn.Module, module.module)
        elif isinstance(inner := getattr(module, "_orig_mod", None), nn.Module):
            module = inner
        else:
            return module


def check_model(module: nn.Module, policy: Policy) -> None:
    """Refuse models that cannot be prepared.

    Raises:
        ModelError: already wrapped, uninitialised, or with 16-bit parameters where the loss is scaled.
    """
    inner = getattr(module, "_orig_mod", module)
    if isinstance(module, Prepared) or isinstance(inner, DistributedDataParallel):
        raise ModelError(
            f"got a model that is already wrapped in {type(inner).__name__}",
            "prepare wraps it, once",
            "pass the plain module (torch.compile around it is fine)",
        )
    for name, param in unwrap(module).named_parameters():
        if isinstance(param, nn.parameter.UninitializedParameter):
            raise ModelError(f"parameter {name} is not initialised", "prepare needs every shape", "run a forward first")
        if policy.scales_loss and param.requires_grad and param.dtype in (torch.float16, torch.bfloat16):
            raise ModelError(
                f"parameter {name} is {param.dtype}",
                "parameters are fp32 under precision='fp16': the loss scale cannot be undone on 16-bit gradients",
                f"remove .half() or .to({param.dtype}); autocast chooses the compute dtype",
            )
