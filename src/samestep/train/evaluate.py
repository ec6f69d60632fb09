"""Evaluation: each sample on exactly one rank, results in the dataset's order, the training state untouched."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from samestep.data.order import Sequential
from samestep.data.source import GridCut, MapSource
from samestep.distributed.collectives import gather_json, gather_tensors
from samestep.errors import DataError, WindowError
from samestep.train.engine import Engine
from samestep.train.loader import Loader

__all__ = ["evaluate", "gather_results"]


def evaluate(engine: Engine, loader: Loader) -> Iterator[Any]:
    """This rank's batches of one pass; models in eval mode, gradients off, no collectives.

    Modes, gradients and random states are put back when the pass ends, also when the loop is left early.
    """
    models = [model.module for model in engine.models]
    modes = [[module.training for module in model.modules()] for model in models]
    before, grad = torch.default_generator.get_state(), torch.is_grad_enabled()
    others = random.getstate(), np.random.get_state()
    cuda = torch.cuda.get_rng_state(engine.device) if engine.device.type == "cuda" else None
    for prepared in engine.models:
        prepared.eval()
    torch.set_grad_enabled(False)
    try:
        yield from loader.evaluate()
    finally:
        torch.set_grad_enabled(grad)
        torch.default_generator.set_state(before)
        random.setstate(others[0])
        np.random.set_state(others[1])
        if cuda is not None:
            torch.cuda.set_rng_state(cuda, engine.device)
        for prepared, model, flags in zip(engine.models, models, modes, strict=True):
            for module, flag in zip(model.modules(), flags, strict=True):
                module.training = flag
            prepared.training = flags[0]


def gather_results(engine: Engine, loader: Loader, results: Sequence[Any]) -> Any:
    """What each rank made of its batches, as one result over the whole dataset, in its order, on all ranks.

    Args:
        engine: of the run.
        loader: whose last evaluation the results are of.
        results: one entry for each batch of this rank, in order: a tensor with the batch's samples first, or a list.

    Returns:
        A tensor on the CPU with one row a sample, or a list with one entry a sample.

    Raises:
        DataError: for a loader whose order is not the dataset's, or entries that are not one a sample.
        WindowError: when the number of entries is not the number of batches.
    """
    source = loader.source
    if not (isinstance(source, MapSource) and isinstance(source.cut, GridCut) and type(source.cut.order) is Sequential):
        raise DataError(
            f"{loader.name} does not read in the dataset's order",
            "results are put in that order by their positions",
            "make the loader with shuffle=False and without weights or a sampler",
        )
    keys = loader.evaluated
    if len(keys) != len(results):
        raise WindowError(
            f"got {len(results)} results for {len(keys)} batches on rank {engine.world.rank}",
            "each batch that run.evaluate gave has one",
            "append one in each pass of the loop, and do not leave it early",
        )
    for (_, _, size), result in zip(keys, results, strict=True):
        if len(result) != size:
            raise DataError(f"got a result of length {len(result)} for a batch of {size}", "each sample has one entry")
    tensors = all(isinstance(result, torch.Tensor) for result in results)
    headers = gather_json(engine.world, "gather results", [[list(key) for key in keys], tensors])
    is_tensor = all(flag for places, flag in headers if places) and any(places for places, _ in headers)
    places = [tuple(key) for keys, _ in headers for key in keys]
    order = sorted(range(len(places)), key=lambda number: places[number])
    pieces: list[Any]
    if is_tensor:
        mine = torch.cat([result.cpu() for result in results]) if results else torch.empty(0)
        parts = gather_tensors(engine.world, mine)
        sizes = [[key[2] for key in keys] for keys, _ in headers]
        pieces = [
            piece for part, counts in zip(parts, sizes, strict=True) if counts for piece in torch.split(part, counts)
        ]
        return torch.cat([pieces[number] for number in order])
    rows = gather_json(engine.world, "gather lists", [list(result) for result in results])
    pieces = [piece for part in rows for piece in part]
    return [item for number in order for item in pieces[number]]
