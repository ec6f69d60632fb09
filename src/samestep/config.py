"""The settings of a run as one frozen dataclass: each is obeyed or refused, never changed. Imports no torch."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from samestep.errors import ConfigError
from samestep.rng import check_seed

__all__ = ["RunConfig", "refuse_unknown"]

_CHOICES = {
    "precision": ("auto", "fp32", "tf32", "bf16", "fp16"),
    "exchange": ("fast", "exact"),
    "resume": ("auto", "must", "never"),
    "nonfinite": ("auto", "raise", "skip"),
}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RunConfig:
    """How a run goes. `samestep.Run(directory, **settings)` takes these as keywords."""

    directory: Path | None = None
    """Where checkpoints and the ledger go. None: nothing is written and nothing can be resumed."""
    precision: str = "auto"
    """fp32, tf32, bf16 or fp16; "auto": bf16 on a GPU that has it, fp16 on one that has only that, fp32 on a CPU."""
    seed: int = 0
    """0 <= seed < 2**63. Order, dropout and augmentation are functions of it."""
    exchange: str = "fast"
    """How gradients meet: "fast" is DDP's all-reduce, equal to rounding on any number of ranks; "exact" adds them in one
    fixed order, bitwise equal on any number of ranks (same torch build, kind of device, and threads a rank)."""
    num_threads: int | None = None
    """CPU threads a rank computes with; None: torch's own choice, and 1 with exchange="exact", whose bits depend on it."""
    device: str | None = None
    """"cpu", "cuda" or "cuda:<index>"; None: this rank's GPU if there is CUDA, else the CPU."""
    resume: str = "auto"
    """"auto": continue if the directory has a checkpoint; "must": refuse to start without one; "never": start anew."""
    nonfinite: str = "auto"
    """What a window whose loss or gradient is not finite does besides not updating: "raise" or "skip"; "auto": skip
    under fp16, whose scale is found by overflowing, raise otherwise."""
    max_skips: int = 25
    """Consecutive skipped windows after which the run gives up."""
    find_nonfinite: bool = False
    """Before ending for a non-finite window, repeat it with the same weights and seeds while watching each module, and
    name the first whose output or gradient is not finite. Keeps each window's batches and waits for the device."""
    save_every: int | None = None
    """Checkpoint after this many windows; None: at the end of each epoch only."""
    digest_every: int | None = 100
    """Write digests of the weights into the ledger after this many windows, for `samestep diff`; None: none."""
    keep_last: int | None = 3
    """Checkpoints that are kept; None keeps all."""
    timeout_s: float = 600.0
    """Seconds after which a collective that a rank did not join fails."""
    init_scale: float = 2.0**16
    """fp16's first loss scale."""
    growth_interval: int = 2000
    """Windows without overflow after which fp16's loss scale doubles."""
    log_every: int = 100
    """Windows between two lines of progress where there is no terminal; 0: none."""
    progress: bool = True
    """Show progress on main: a live bar in a terminal, lines elsewhere."""
    sinks: Sequence[Any] = ()
    """Where a window's numbers go besides the ledger: "csv", "tensorboard", "wandb", "mlflow", "trackio", or objects
    with a sink's four methods (samestep.monitor.sinks.Sink). They need a directory."""
    count_flops: bool = False
    """Count the FLOPs of the first window, so that the model FLOPs utilisation (MFU) is known. That window is slower."""
    micro_batches: int | None = None
    """Micro-batches a window for loaders that do not say; None: one a rank, recorded at the first start."""

    def __post_init__(self) -> None:
        for name, allowed in _CHOICES.items():
            if getattr(self, name) not in allowed:
                raise ConfigError(
                    f"got {name}={getattr(self, name)!r}",
                    f"{name} is one of {', '.join(allowed)}",
                    _did_you_mean(str(getattr(self, name)), allowed) or "pass one of them",
                )
        check_seed(self.seed)
        for name in (
            "max_skips",
            "save_every",
            "keep_last",
            "growth_interval",
            "micro_batches",
            "num_threads",
            "digest_every",
        ):
            _check_count(name, getattr(self, name), optional=name not in ("max_skips", "growth_interval"))
        if isinstance(self.log_every, bool) or not isinstance(self.log_every, int) or self.log_every < 0:
            raise ConfigError(f"got log_every={self.log_every!r}", "it is 0 or more windows", "pass 100")
        if not self.timeout_s > 0:
            raise ConfigError(f"got timeout_s={self.timeout_s!r}", "a time-out is a positive number", "pass 600")
        if isinstance(self.sinks, str) or not isinstance(self.sinks, Sequence):
            raise ConfigError(f"got sinks={self.sinks!r}", "it is a list of names and objects", "pass ['tensorboard']")
        if self.sinks and self.directory is None:
            raise ConfigError("got sinks without a directory", "sinks write into the run's directory", "pass one")
        if self.resume == "must" and self.directory is None:
            raise ConfigError("got resume='must' without a directory", "a run resumes from its directory", "pass one")

    def to_json(self) -> dict[str, Any]:
        """The settings as JSON values, for manifests and reports."""
        return {
            field.name: str(value) if isinstance(value := getattr(self, field.name), Path) else value
            for field in dataclasses.fields(self)
        } | {"sinks": [sink if isinstance(sink, str) else type(sink).__name__ for sink in self.sinks]}


def refuse_unknown(given: dict[str, Any]) -> None:
    """Refuse settings that do not exist, suggesting the nearest that does.

    Raises:
        ConfigError: naming the first unknown one.
    """
    known = [field.name for field in dataclasses.fields(RunConfig)]
    for name in given:
        if name not in known:
            raise ConfigError(
                f"got an unknown setting {name!r}",
                f"the settings of a run are {', '.join(known)}",
                _did_you_mean(name, known) or "see help(samestep.RunConfig)",
            )


def _did_you_mean(given: str, known: Any) -> str:
    near = difflib.get_close_matches(given, list(known), n=1)
    return f"did you mean {near[0]!r}?" if near else ""


def _check_count(name: str, value: Any, optional: bool) -> None:
    if value is None and optional:
        return
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"got {name}={value!r}", f"{name} is a whole number, 1 or more", "pass one")
