"""The precision of a run as one argument: which autocast, which matmul mode, whether the loss is scaled."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch

from samestep.errors import ConfigError

__all__ = ["PRECISIONS", "Policy", "choose_policy", "to_fp32"]

PRECISIONS = ("auto", "fp32", "tf32", "bf16", "fp16")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Policy:
    """What a precision means on one device. Parameters stay in fp32 in all of them."""

    name: str
    """One of fp32, tf32, bf16, fp16."""
    device_type: str
    """"cpu" or "cuda"."""
    dtype: torch.dtype | None
    """What autocast computes matrix products and convolutions in; None means no autocast."""
    reason: str
    """Why this one: what the user asked for, or what `auto` found."""

    @property
    def scales_loss(self) -> bool:
        """fp16 has 5 exponent bits, so small gradients need a loss scale; bf16 has fp32's 8."""
        return self.name == "fp16"

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """A new context in which torch chooses dtypes by this policy."""
        if self.dtype is None:
            return contextlib.nullcontext()
        return torch.autocast(self.device_type, dtype=self.dtype)

    def fp32(self) -> contextlib.AbstractContextManager[Any]:
        """A new context without autocast; the caller casts the inputs (`x.float()`)."""
        return torch.autocast(self.device_type, enabled=False)

    @contextlib.contextmanager
    def matmul_mode(self) -> Iterator[None]:
        """Set what fp32 products on CUDA may use while the run lasts: "fp32" means IEEE fp32, cuDNN included.

        Source: "Numerical accuracy" and "CUDA semantics" notes of the PyTorch documentation.
        """
        if self.device_type != "cuda":
            yield
            return
        mode = "ieee" if self.name == "fp32" else "tf32"
        cudnn: Any = torch.backends.cudnn
        knobs: list[Any] = [torch.backends.cuda.matmul, cudnn.conv, cudnn.rnn]
        before = [knob.fp32_precision for knob in knobs]
        for knob in knobs:
            knob.fp32_precision = mode
        try:
            yield
        finally:
            for knob, old in zip(knobs, before, strict=True):
                knob.fp32_precision = old


def choose_policy(name: str, device: torch.device) -> Policy:
    """The policy called `name` on `device`.

    Raises:
        ConfigError: for an unknown name, or one that the device cannot do. It is never replaced by another.
    """
    if name not in PRECISIONS:
        raise ConfigError(f"got precision={name!r}", f"a precision is one of {', '.join(PRECISIONS)}", "pass one")
    reason = "asked for"
    cuda = device.type == "cuda"
    if name == "auto":
        name, reason = _auto(device)
    if name == "tf32" and not (cuda and torch.cuda.get_device_capability(device) >= (8, 0)):
        raise ConfigError(
            f"got precision='tf32' on {device}",
            "tf32 is a mode of NVIDIA GPUs of compute capability 8.0 and newer",
            "use precision='fp32' here",
        )
    if name == "bf16" and cuda and not torch.cuda.is_bf16_supported(including_emulation=False):
        raise ConfigError(
            f"got precision='bf16' on {torch.cuda.get_device_name(device)}", "this GPU has no bf16", "use 'fp16'"
        )
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(name)
    if dtype is not None and not torch.amp.is_autocast_available(device.type):
        raise ConfigError(f"got precision={name!r} on {device}", "torch has no autocast there", "use 'fp32'")
    return Policy(name=name, device_type=device.type, dtype=dtype, reason=reason)


def _auto(device: torch.device) -> tuple[str, str]:
    if device.type != "cuda":
        return "fp32", "auto: on this CPU fp32 is the exact choice and usually the fastest"
    if torch.cuda.is_bf16_supported(including_emulation=False):
        return "bf16", "auto: the GPU has bf16, which needs no loss scale"
    return "fp16", "auto: the GPU has fp16 and no bf16"


def to_fp32(value: Any) -> Any:
    """`value` with each 16-bit floating tensor in it cast to fp32; dicts, lists, tuples and namedtuples are entered."""
    if isinstance(value, torch.Tensor):
        return value.float() if value.dtype in (torch.float16, torch.bfloat16) else value
    return _map_containers(value, to_fp32)


def _map_containers(value: Any, function: Callable[[Any], Any]) -> Any:
    if isinstance(value, tuple):
        items = [function(item) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, list):
        return [function(item) for item in value]
    if isinstance(value, dict):
        # type(value)(...) keeps OrderedDict and the dict-like outputs of model libraries
        return type(value)({name: function(item) for name, item in value.items()})
    return value
