"""Accelerate's directories, Lightning's files and shards with an index: read into models, files and runs."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn

import samestep
from samestep.checkpoint.adopt import adopt
from samestep.checkpoint.foreign import read_safetensors
from samestep.checkpoint.peers import read_foreign
from samestep.errors import CheckpointError
from tests.checkpoint import make_peers


def trained() -> tuple[nn.Module, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    """As the peers train in make_peers.py: two steps of one epoch."""
    model = make_peers.net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    for x, y in make_peers.data():
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return model, optimizer, schedule


def lay_out(directory: Path, kind: str) -> Path:
    """A directory like Accelerate's, or a file like Lightning's, written by hand."""
    model, optimizer, schedule = trained()
    if kind == "lightning":
        content = {
            "epoch": 0, "global_step": 2, "pytorch-lightning_version": "2.6.0", "callbacks": {"x": {"best": 1.0}},
            "state_dict": {f"model.{name}": value for name, value in model.state_dict().items()},
            "loops": {"fit_loop": {"epoch_progress": {"current": {"processed": 1}}}},
            "optimizer_states": [optimizer.state_dict()], "lr_schedulers": [schedule.state_dict()],
        }  # fmt: skip
        torch.save(content, directory / "last.ckpt")
        return directory / "last.ckpt"
    if kind == "accelerate":
        safetensors.torch.save_file(model.state_dict(), directory / "model.safetensors")
    else:
        torch.save(model.state_dict(), directory / "pytorch_model.bin")
    torch.save(optimizer.state_dict(), directory / "optimizer.bin")
    torch.save(schedule.state_dict(), directory / "scheduler.bin")
    (directory / "random_states_0.pkl").write_bytes(b"not read")
    return directory


def make(tmp_path: Path, kind: str, real: bool) -> Path:
    if not real:
        return lay_out(tmp_path, kind)
    package = kind.partition("-")[0]
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed; its layout by hand is tested")
    out = tmp_path / "real"
    script = Path(make_peers.__file__)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", script, kind, out], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return out


@pytest.mark.parametrize("real", [False, True], ids=["by-hand", "real"])
@pytest.mark.parametrize("kind", ["accelerate", "accelerate-bin", "lightning"])
def test_weights_optimizer_and_schedule_of_a_peer_go_on_in_a_run(tmp_path: Path, kind: str, real: bool) -> None:
    source = make(tmp_path, kind, real)
    foreign = read_foreign(source)
    right, optimizer, schedule = trained()
    if kind == "lightning":
        foreign.models[0] = {name.removeprefix("model."): value for name, value in foreign.models[0].items()}
        assert (foreign.epoch, foreign.step) == ((2, 4) if real else (1, 2))
    adopt(foreign, tmp_path / "run", epoch=1)
    net = make_peers.net()
    live = torch.optim.AdamW(net.parameters(), lr=0.5)
    lr = torch.optim.lr_scheduler.StepLR(live, 1)
    with samestep.Run(tmp_path / "run", precision="fp32", progress=False) as run:
        run.prepare(net, live, lr)
        assert run.epoch == 1
    if kind != "lightning" or not real:  # Lightning's has two epochs behind it
        for name, value in right.state_dict().items():
            assert torch.equal(net.state_dict()[name], value), name
        for own, theirs in zip(net.parameters(), right.parameters(), strict=True):
            assert torch.equal(live.state[own]["exp_avg"], optimizer.state[theirs]["exp_avg"])
        assert lr.get_last_lr() == schedule.get_last_lr()
    assert live.param_groups[0]["lr"] < 0.01
    assert all(
        float(live.state[param]["step"]) == (4 if kind == "lightning" and real else 2) for param in net.parameters()
    )


@pytest.mark.parametrize("kind", ["accelerate", "accelerate-bin", "lightning"])
def test_load_weights_takes_a_peers_checkpoint(tmp_path: Path, kind: str) -> None:
    source, net = lay_out(tmp_path, kind), make_peers.net()
    before = net[0].weight.detach().clone()
    rename = {"model.": ""} if kind == "lightning" else None
    assert len(samestep.load_weights(net, source, rename=rename).loaded) == 9
    assert not torch.equal(net[0].weight, before)


def test_several_models_of_accelerate_have_numbers(tmp_path: Path) -> None:
    for number, name in enumerate(["model.safetensors", "model_1.safetensors"]):
        safetensors.torch.save_file({"w": torch.full((2,), float(number))}, tmp_path / name)
    assert [float(model["w"][0]) for model in read_foreign(tmp_path).models] == [0.0, 1.0]


def shards(directory: Path, **weight_map: Any) -> Path:
    safetensors.torch.save_file({"a": torch.zeros(2)}, directory / "model-1.safetensors")
    safetensors.torch.save_file({"b": torch.ones(2)}, directory / "model-2.safetensors")
    text = json.dumps({"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors", **weight_map}})
    (directory / "model.safetensors.index.json").write_text(text)
    return directory


def test_shards_are_put_together_by_their_index(tmp_path: Path) -> None:
    assert sorted(read_foreign(shards(tmp_path)).models[0]) == ["a", "b"]


@pytest.mark.parametrize("name", ["../secret.safetensors", "/etc/passwd", "sub/x", "..", "", 3, None, ["x"]])
def test_an_index_that_points_out_of_its_directory_is_refused(tmp_path: Path, name: Any) -> None:
    (tmp_path / "inner").mkdir()
    safetensors.torch.save_file({"a": torch.zeros(2)}, tmp_path / "secret.safetensors")
    with pytest.raises(CheckpointError, match=r"names the file|no index of shards"):
        read_foreign(shards(tmp_path / "inner", a=name))


def test_a_link_out_of_a_peers_directory_is_refused_and_a_cache_of_blobs_is_not(tmp_path: Path) -> None:
    outside = tmp_path / "w.safetensors"
    safetensors.torch.save_file({"a": torch.zeros(2)}, outside)
    (tmp_path / "dir").mkdir()
    (tmp_path / "dir" / "model.safetensors").symlink_to(outside)
    with pytest.raises(CheckpointError, match="is a link to"):
        read_foreign(tmp_path / "dir")
    cache = tmp_path / "models--x"
    (cache / "blobs").mkdir(parents=True)
    (cache / "snapshots" / "rev").mkdir(parents=True)
    outside.rename(cache / "blobs" / "123")
    (cache / "snapshots" / "rev" / "model.safetensors").symlink_to("../../blobs/123")
    assert [*read_foreign(cache / "snapshots" / "rev").models[0]] == ["a"]


@pytest.mark.parametrize("name", ["pytorch_model_fsdp_0", ".metadata", "zero_pp_rank_0_mp_rank_00_model_states.pt"])
def test_sharded_peers_are_refused_with_what_to_do(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"")
    with pytest.raises(CheckpointError, match="merge it where it was made"):
        read_foreign(tmp_path)


def test_a_directory_of_something_else_is_refused_by_what_it_holds(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(CheckpointError, match=r"holds notes\.txt"):
        read_foreign(tmp_path)


class Code:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (exec, (f"open({str(self.path)!r}, 'w').close()",))


@pytest.mark.parametrize("name", ["pytorch_model.bin", "optimizer.bin", "scheduler.bin", "scaler.pt", "last.ckpt"])
def test_a_pickle_with_code_in_any_part_does_not_run(tmp_path: Path, name: str) -> None:
    source = lay_out(tmp_path, "lightning" if name == "last.ckpt" else "accelerate-bin")
    file = source if source.is_file() else source / name
    content: Any = torch.load(file, weights_only=True) if file.exists() else {"scale": 1.0}
    torch.save({**content, "callbacks": Code(tmp_path / "ran")}, file)
    with pytest.raises(CheckpointError, match="loading runs no code"):
        read_foreign(source)
    assert not (tmp_path / "ran").exists()


def test_pickles_beside_the_weights_are_not_opened(tmp_path: Path) -> None:
    source = lay_out(tmp_path, "accelerate")
    (source / "random_states_0.pkl").chmod(0)
    assert read_foreign(source).unread == ["random_states_0.pkl: is a pickle of other things than tensors"]


def test_an_imported_optimizer_of_other_parameters_is_refused(tmp_path: Path) -> None:
    adopt(read_foreign(lay_out(tmp_path, "accelerate")), tmp_path / "run")
    net = make_peers.net()
    with samestep.Run(tmp_path / "run", precision="fp32", progress=False) as run:
        with pytest.raises(CheckpointError, match=r"groups of \[6\] parameters, this one of \[2\]"):
            run.prepare(net, torch.optim.AdamW(net[0].parameters()))
    net = make_peers.net()
    with samestep.Run(tmp_path / "run", precision="fp32", progress=False) as run:
        with pytest.raises(CheckpointError, match=r"exp_avg of parameter 0 is \(3, 4\), the parameter \(2,\)"):
            run.prepare(net, torch.optim.AdamW(reversed([*net.parameters()])))


def test_a_fp16_scale_is_imported(tmp_path: Path) -> None:
    source = lay_out(tmp_path, "accelerate")
    scaler = torch.amp.GradScaler("cpu", init_scale=128.0)
    scaler.scale(torch.ones(1))
    torch.save(scaler.state_dict(), source / "scaler.pt")
    adopt(read_foreign(source), tmp_path / "run")
    with samestep.Run(tmp_path / "run", precision="fp16", progress=False) as run:
        net = make_peers.net()
        optimizer = torch.optim.AdamW(net.parameters())
        run.prepare(net, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1))
        assert float(run._engine.scaler.scale) == 128.0


def test_a_truncated_safetensors_file_and_a_huge_header_are_refused(tmp_path: Path) -> None:
    safetensors.torch.save_file({"w": torch.zeros(100)}, tmp_path / "w.safetensors")
    whole = (tmp_path / "w.safetensors").read_bytes()
    for size in range(0, len(whole), 23):
        (tmp_path / "w.safetensors").write_bytes(whole[:size])
        with pytest.raises(CheckpointError, match=r"w\.safetensors"):
            read_foreign(tmp_path / "w.safetensors")
    for length in (2**63, 2**40, 200_000_000):
        with (tmp_path / "w.safetensors").open("wb") as file:
            file.write(length.to_bytes(8, "little") + b"{")
            file.truncate(250_000_000)  # sparse
        with pytest.raises(CheckpointError, match=r"w\.safetensors"):
            read_foreign(tmp_path / "w.safetensors")
        with pytest.raises(CheckpointError, match="no safetensors file"):
            read_safetensors(tmp_path / "w.safetensors")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({"model": {"w": torch.zeros(1)}, "optimizer": [1]}, "optimizer that is no state_dict"),
        (
            {"pytorch-lightning_version": "2", "state_dict": {"w": torch.zeros(1)}, "optimizer_states": 3},
            "no state_dict",
        ),
        ({"pytorch-lightning_version": "2", "state_dict": {"w": torch.zeros(1)}, "lr_schedulers": ["x"]}, "schedule"),
        ({"pytorch-lightning_version": "2", "state_dict": 5}, "holds no weights"),
        ({"pytorch-lightning_version": "2"}, "holds no weights"),
    ],
)
def test_parts_of_the_wrong_type_are_refused(tmp_path: Path, content: Any, words: str) -> None:
    torch.save(content, tmp_path / "w.pt")
    with pytest.raises(CheckpointError, match=words):
        read_foreign(tmp_path / "w.pt")


def test_a_scale_that_is_none_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    source = lay_out(tmp_path, "accelerate")
    torch.save({"scale": 1.0}, source / "scaler.pt")
    with pytest.raises(CheckpointError, match="loss scale has no _growth_tracker, backoff_factor"):
        adopt(read_foreign(source), tmp_path / "run")
    assert not (tmp_path / "run").exists()
