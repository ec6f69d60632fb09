"""Cases C25-C29: what a checkpoint holds and how it comes back."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import samestep
from samestep.checkpoint.names import match
from samestep.testing import RanksFailed, run_ranks
from tests.cases.helpers import Weight, quiet_run


class Generators:
    """The states of Python's, numpy's and torch's generators, as something to register."""

    def state_dict(self) -> dict[str, Any]:
        return {"python": random.getstate(), "numpy": np.random.get_state(), "torch": torch.get_rng_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        random.setstate(state["python"])
        np.random.set_state(state["numpy"])
        torch.set_rng_state(state["torch"])


def test_c25_generator_states_are_restored_without_unpickling(tmp_path: Path) -> None:
    def draw() -> tuple[float, float, float]:
        return np.random.rand(), random.random(), torch.rand(()).item()

    with quiet_run(tmp_path) as run:
        run.register("generators", Generators())
        np.random.seed(0)
        assert draw()[0] == pytest.approx(0.548814, abs=1e-6)
        run.save()
        expected = draw()
        assert expected[0] == pytest.approx(0.715189, abs=1e-6)
    with quiet_run(tmp_path) as run:
        run.register("generators", Generators())
        assert draw() == expected


def wrapped(kind: str, net: nn.Module) -> nn.Module:
    """`net` as torch's wrappers name it: DDP says "module", torch.compile "_orig_mod"."""
    for attribute in {"plain": [], "ddp": ["module"], "compiled": ["_orig_mod"]}.get(kind, kind.split("+")):
        outer = nn.Module()
        outer.add_module(attribute, net)
        net = outer
    return net


KINDS = ["plain", "ddp", "compiled", "module+_orig_mod", "_orig_mod+module"]


@pytest.mark.parametrize("saved", KINDS)
@pytest.mark.parametrize("loaded", KINDS)
def test_c26_names_match_across_wrappers(saved: str, loaded: str) -> None:
    source, target = nn.Linear(1, 1), nn.Linear(1, 1)
    nn.init.constant_(source.weight, 5.0)
    outer = wrapped(loaded, target)
    outer.load_state_dict(match(wrapped(saved, source).state_dict(), outer.state_dict()))
    assert target.weight.item() == 5.0


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, when it imports its compiler
def test_c26_a_compiled_model_is_saved_under_its_own_names(tmp_path: Path) -> None:
    with quiet_run(tmp_path) as run:
        net = nn.Linear(1, 1)
        nn.init.constant_(net.weight, 5.0)
        model = run.prepare(torch.compile(net))
        assert list(model.state_dict()) == ["weight", "bias"]
        run.save()
    with quiet_run(tmp_path) as run:
        net = nn.Linear(1, 1)
        run.prepare(net)
        assert net.weight.item() == 5.0


def test_c26_a_file_of_another_model_is_refused_with_the_count() -> None:
    net = nn.Linear(1, 1)
    with pytest.raises(samestep.CheckpointError, match=r"0 of 2 matched.*missing: weight, bias.*unexpected: x\.y"):
        match({"x.y": torch.ones(3)}, net.state_dict())


def test_c27_a_kill_in_mid_write_leaves_the_checkpoint_before_it(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent(
            """
            import os, signal, sys
            import torch
            import samestep.checkpoint.storage as storage
            store = storage.Store(__import__("pathlib").Path(sys.argv[1]), keep_last=None)
            for step in (9, 10):
                store.save(step, {"x": torch.full((1000,), float(step))}, {})
            def killed(descriptor):
                os.ftruncate(descriptor, 100)
                os.kill(os.getpid(), signal.SIGKILL)
            os.fsync = killed
            store.save(11, {"x": torch.zeros(1000)}, {})
            """
        )
    )
    done = subprocess.run([sys.executable, script, tmp_path / "store"], check=False, timeout=60)
    assert done.returncode == -signal.SIGKILL
    from samestep.checkpoint.storage import Store

    said: list[str] = []
    newest = Store(tmp_path / "store").newest(said.append)
    assert newest is not None
    assert newest.manifest.step == 10
    assert newest.load()["x"].tolist() == [10.0] * 1000
    assert any("step-00000011" in line and "not finished" in line for line in said)


def test_c28_a_file_saved_on_a_gpu_loads_on_a_machine_without_one(tmp_path: Path, monkeypatch) -> None:
    from samestep.checkpoint.foreign import read_torch_file

    monkeypatch.setattr(torch.serialization, "location_tag", lambda storage: "cuda:0")
    torch.save({"model_state_dict": {"module.weight": torch.full((1, 1), 7.0)}, "epoch": 3}, tmp_path / "old.pt")
    monkeypatch.undo()
    state = read_torch_file(tmp_path / "old.pt")
    assert state["epoch"] == 3
    assert state["model"]["module.weight"].item() == 7.0
    assert state["model"]["module.weight"].device.type == "cpu"


def c29(directory: str, on_all: bool) -> list[str]:
    with quiet_run(directory, timeout_s=20) as run:
        net = Weight()
        run.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
        if on_all or run.is_main:
            run.save()
        found = sorted(str(path.relative_to(directory)) for path in Path(directory).rglob("*.json"))
        run.mean(0.0)
        return found


@pytest.mark.parametrize("on_all", [True, False])
def test_c29_save_works_on_all_ranks_and_on_main_alone(tmp_path: Path, on_all: bool) -> None:
    main, other = run_ranks(c29, 2, str(tmp_path), on_all)
    assert main == ["checkpoints/step-00000000/manifest.json"]
    if on_all:
        assert other == main, "it exists when the other rank's call returns"


def c29_other_only(directory: str) -> None:
    with quiet_run(directory, timeout_s=3) as run:
        if not run.is_main:
            run.save()
        run.mean(0.0)


def test_c29_save_on_another_rank_alone_is_named_within_the_time_limit(tmp_path: Path) -> None:
    with pytest.raises(RanksFailed, match="rank 1 waited 3 s for main to save"):
        run_ranks(c29_other_only, 2, str(tmp_path), timeout_s=30)


def test_the_files_of_a_checkpoint_follow_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        with quiet_run(tmp_path) as run:
            run.save()
    finally:
        os.umask(before)
    modes = {path.stat().st_mode & 0o777 for path in (tmp_path / "checkpoints").rglob("*") if path.is_file()}
    assert modes == {0o640}
