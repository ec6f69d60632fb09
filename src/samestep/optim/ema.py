"""An exponential moving average of the weights that advances with applied updates only."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from samestep.errors import ConfigError

__all__ = ["Ema"]


class Ema:
    """Averages `ema = decay * ema + (1 - decay) * weight`, once for each applied update.

    Whether an update was applied is decided on the device, so a skipped window costs no host read.

    Args:
        model: the prepared model; its parameters that train are averaged, buffers are taken as they are.
        decay: in [0, 1).
    """

    def __init__(self, model: torch.nn.Module, decay: float) -> None:
        if not 0 <= decay < 1:
            raise ConfigError(f"got decay={decay!r}", "a decay is in [0, 1)", "pass a number such as 0.999")
        self.decay = decay
        self._named = [(name, param) for name, param in model.named_parameters() if param.is_floating_point()]
        self._params = [param for _, param in self._named]
        self.averages = [param.detach().clone() for param in self._params]

    @torch.no_grad()
    def update(self, skipped: float | torch.Tensor) -> None:
        """Advance by one window; `skipped` (0-d on a GPU) is 1 where the weights were left as they were."""
        weight = (1.0 - self.decay) * (1.0 - skipped)
        step = torch._foreach_sub([param.detach() for param in self._params], self.averages)
        torch._foreach_mul_(step, weight)
        torch._foreach_add_(self.averages, step)

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """Inside, the model holds the averages (to evaluate or export them); afterwards its own weights again."""
        own = [param.detach().clone() for param in self._params]
        self._copy(self.averages)
        try:
            yield
        finally:
            self._copy(own)

    @torch.no_grad()
    def _copy(self, values: list[torch.Tensor]) -> None:
        for param, value in zip(self._params, values, strict=True):
            param.copy_(value)

    def state_dict(self) -> dict[str, object]:
        """The averages by parameter name, and the decay."""
        named = zip(self._named, self.averages, strict=True)
        return {"decay": self.decay, "averages": {name: average for (name, _), average in named}}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, object]) -> None:
        """Continue from `state_dict`.

        Raises:
            ConfigError: when the parameters are not the same.
        """
        saved = state["averages"]
        names = [name for name, _ in self._named]
        if not isinstance(saved, dict) or list(saved) != names:
            raise ConfigError("got an EMA of other parameters", f"this model has {len(names)}", "use the same model")
        for average, name in zip(self.averages, names, strict=True):
            average.copy_(saved[name])
