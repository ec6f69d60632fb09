"""What the ranks must agree on, and what they say to each other when one fails."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from samestep.config import RunConfig
from samestep.distributed.collectives import gather_json
from samestep.distributed.process_group import World
from samestep.errors import RankError, SamestepError
from samestep.monitor.meters import Mean
from samestep.monitor.torchmetrics import compute, is_metric

__all__ = ["check_same_settings", "first_failure", "reduce_over_ranks"]

_FAILED = "samestep/failed"


def check_same_settings(world: World, config: RunConfig) -> None:
    """Refuse to start with different settings on different ranks.

    Raises:
        RankError: naming the setting and the ranks.
    """
    mine = {name: value for name, value in config.to_json().items() if name != "device"}
    for rank, theirs in enumerate(gather_json(world, "settings", mine)):
        if theirs != mine:
            name = next(name for name in mine if theirs[name] != mine[name])
            raise RankError(
                f"{name} is {mine[name]!r} on rank {world.rank} and {theirs[name]!r} on rank {rank}",
                "all ranks have the same settings",
                "start every rank with the same arguments",
            )


def first_failure(world: World, error: BaseException) -> str | None:
    """Tell the other ranks why this one ends.

    Returns:
        What another rank said before, when this rank's error is the same or only follows from it (a broken connection);
        else None.
    """
    mine = f"rank {world.rank} failed first: {type(error).__name__}: {error}"
    said = world.announce_first(_FAILED, mine)
    if said == mine:
        return None
    same = said.partition(": ")[2] == mine.partition(": ")[2]
    follows = isinstance(error, RuntimeError) and not isinstance(error, SamestepError)
    return said if same or follows else None


def reduce_over_ranks(world: World, values: Mapping[str, float | torch.Tensor | Mean]) -> dict[str, float]:
    """Means over all ranks' terms, and plain numbers as they are. A collective.

    Raises:
        RankError: for a plain number that differs between ranks.
    """
    values = {name: compute(world, value) if is_metric(value) else value for name, value in values.items()}
    plain = {name: float(value) for name, value in values.items() if not isinstance(value, Mean)}
    sums = {name: list(value.sums()) for name, value in values.items() if isinstance(value, Mean)}
    everyone = gather_json(world, "log", [{name: repr(value) for name, value in plain.items()}, sums])
    for rank, (theirs, _) in enumerate(everyone):
        for name, value in plain.items():
            if theirs.get(name) != repr(value):
                raise RankError(
                    f"{name} is {value} on rank {world.rank} and {theirs.get(name)} on rank {rank}",
                    "a plain number is recorded once, so it is the same on all ranks",
                    "pass a samestep.Mean, which is reduced over the ranks",
                )
    return {**_means([sums for _, sums in everyone]), **plain}


def _means(everyone: list[dict[str, Any]]) -> dict[str, float]:
    """The weighted means by name; a rank that had no batch of a metric does not know its name."""
    names = {name: None for sums in everyone for name in sums}
    totals = {name: [sum(sums.get(name, (0.0, 0.0))[i] for sums in everyone) for i in (0, 1)] for name in names}
    return {name: total / weight if weight else float("nan") for name, (total, weight) in totals.items()}
