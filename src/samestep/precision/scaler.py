"""The loss scale of fp16 as a state machine: the same scale, growth and skips as torch.amp.GradScaler."""

from __future__ import annotations

import torch

from samestep.errors import ConfigError

__all__ = ["LossScaler"]


class LossScaler:
    """A dynamic loss scale that lives on the device, so that neither reading nor updating it waits for the GPU.

    Source: Micikevicius et al., "Mixed precision training", ICLR 2018; the update is torch's own kernel, the one
    that `torch.amp.GradScaler.update` runs.

    Args:
        device: where gradients are.
        init_scale: the first scale.
        growth_factor: what the scale is multiplied by after `growth_interval` windows without overflow.
        backoff_factor: what it is multiplied by after a window with overflow.
        growth_interval: in windows.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
    ) -> None:
        if not (init_scale > 0 and growth_factor > 1 and 0 < backoff_factor < 1 and growth_interval >= 1):
            raise ConfigError(
                f"got init_scale={init_scale}, growth_factor={growth_factor}, backoff_factor={backoff_factor}, "
                f"growth_interval={growth_interval}",
                "a scale is positive, grows by more than 1, backs off by less than 1, after 1 or more windows",
                "leave them out to get torch's defaults",
            )
        self.growth_factor, self.backoff_factor, self.growth_interval = growth_factor, backoff_factor, growth_interval
        self.scale = torch.full((), init_scale, dtype=torch.float32, device=device)
        self.growth_tracker = torch.zeros((), dtype=torch.int32, device=device)

    def update(self, found_inf: float | torch.Tensor) -> None:
        """Grow or back off. `found_inf` (0-d fp32 on a GPU) is 0, or 1 when the window's gradients overflowed."""
        found_inf = torch.as_tensor(found_inf, dtype=torch.float32)
        torch._amp_update_scale_(
            self.scale,
            self.growth_tracker,
            found_inf,
            self.growth_factor,
            self.backoff_factor,
            self.growth_interval,
        )

    def state_dict(self) -> dict[str, float | int]:
        """Plain numbers, with the names of `torch.amp.GradScaler.state_dict`. Reads the device."""
        return {
            "scale": float(self.scale),
            "growth_factor": self.growth_factor,
            "backoff_factor": self.backoff_factor,
            "growth_interval": self.growth_interval,
            "_growth_tracker": int(self.growth_tracker),
        }

    def load_state_dict(self, state: dict[str, float | int]) -> None:
        """Continue from `state_dict`, or from a `torch.amp.GradScaler`'s."""
        self.scale.fill_(state["scale"])
        self.growth_tracker.fill_(state["_growth_tracker"])
        self.growth_factor = float(state["growth_factor"])
        self.backoff_factor = float(state["backoff_factor"])
        self.growth_interval = int(state["growth_interval"])
