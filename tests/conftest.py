"""What holds for every test: fixed seeds, an environment of its own, nothing left behind."""

from __future__ import annotations

import os
import random
import sys
import threading
import time
from collections.abc import Iterator

import pytest

# A test that leaves one of these would make the next one take itself for a rank.
PLACE = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs a GPU where there is none; torch is imported only if a test asks."""
    wanting = [item for item in items if item.get_closest_marker("gpu")]
    if not wanting:
        return
    import torch

    if not torch.cuda.is_available():
        for item in wanting:
            item.add_marker(pytest.mark.skip(reason=f"needs a CUDA device; torch {torch.__version__} sees none here"))


@pytest.fixture(autouse=True)
def fixed_seeds() -> None:
    random.seed(0)
    if "numpy" in sys.modules:
        import numpy as np

        np.random.seed(0)
    if "torch" in sys.modules:
        import torch

        torch.manual_seed(0)


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    variables, threads = dict(os.environ), set(threading.enumerate())
    shared_group = _group_is_initialised()  # by a fixture of the whole module, which ends it itself
    yield
    changed = [name for name in PLACE if os.environ.get(name) != variables.get(name)]
    os.environ.clear()
    os.environ.update(variables)
    left = [f"environment variable {name}" for name in changed]
    left += [f"thread {name}" for name in _threads_that_stay(threads)]
    if _group_is_initialised() and not shared_group:
        sys.modules["torch.distributed"].destroy_process_group()
        left.append("an initialised process group of torch.distributed")
    if left:
        pytest.fail(f"the test left behind: {', '.join(left)}", pytrace=False)


def _threads_that_stay(before: set[threading.Thread]) -> list[str]:
    end = time.monotonic() + 1.0
    while True:
        names = [t.name for t in threading.enumerate() if t not in before and not t.daemon and t.is_alive()]
        if not names or time.monotonic() > end:
            return names
        time.sleep(0.01)


def _group_is_initialised() -> bool:
    dist = sys.modules.get("torch.distributed")
    return dist is not None and bool(dist.is_available() and dist.is_initialized())
