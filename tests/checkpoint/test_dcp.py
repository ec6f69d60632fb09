"""Sharded models (FSDP2): saved on some ranks, loaded on others, whole or not at all, without a pickle."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import samestep
from samestep.checkpoint import dcp
from samestep.checkpoint.dcp import assemble, is_sharded, load_sharded, save_sharded
from samestep.checkpoint.manifest import Manifest
from samestep.checkpoint.storage import Checkpoint, Store, verify
from samestep.cli.main import main
from samestep.distributed.process_group import World
from samestep.errors import CheckpointError
from samestep.testing import RanksFailed, run_ranks


class Net(nn.Sequential):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self[2](self[1](self[0](x)).bfloat16()).float()


def build(sharded: bool, width: int = 5) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Sizes that divide by neither 2 nor 3; one dimension of 1, so that a rank has an empty shard; buffers; bf16."""
    torch.manual_seed(0)
    net = Net(nn.Linear(4, width), nn.BatchNorm1d(width), nn.Linear(width, 1).bfloat16())
    if sharded:
        fully_shard(net[2])
        fully_shard(net)
    groups = [{"params": [*net[0].parameters()], "lr": 0.1}, {"params": [*net[1].parameters(), *net[2].parameters()]}]
    return net, torch.optim.AdamW(groups, lr=0.01, betas=(0.8, 0.9))


def step(net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for _ in range(2):
        net(torch.arange(12.0).reshape(3, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def full(value: Any) -> Any:
    value = value.full_tensor() if hasattr(value, "full_tensor") else value
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def contents(net: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    names = {param: name for name, param in net.named_parameters()}
    found = {name: full(value) for name, value in net.state_dict().items()}
    for param, values in optimizer.state.items():
        found |= {f"{names[param]}.{key}": full(value) for key, value in values.items()}
    return found | {f"lr{n}": (group["lr"], group["betas"]) for n, group in enumerate(optimizer.param_groups)}


def save(directory: str) -> dict[str, Any]:
    world = World("cpu", 60)
    net, optimizer = build(sharded=world.size > 1)
    step(net, optimizer)
    path = save_sharded(directory, 7, net, optimizer, meta={"precision": "fp32"})
    assert verify(path) == []
    result = contents(net, optimizer)
    world.close()
    return result


def load(directory: str, width: int = 5) -> dict[str, Any]:
    world = World("cpu", 60)
    try:
        net, optimizer = build(sharded=world.size > 1, width=width)
        with torch.no_grad():
            for tensor in [*net.parameters(), *net.buffers()]:
                tensor.zero_()
        for group in optimizer.param_groups:
            group["lr"], group["betas"] = 0.5, (0.1, 0.1)
        checkpoint = load_sharded(directory, net, optimizer)
        assert checkpoint.manifest.step == 7
        return contents(net, optimizer)
    finally:
        world.close()


def equal(a: dict[str, Any], b: dict[str, Any]) -> None:
    assert a.keys() == b.keys()
    for name, value in a.items():
        same = torch.equal(value, b[name]) if isinstance(value, torch.Tensor) else value == b[name]
        assert same, name
        assert not isinstance(value, torch.Tensor) or value.dtype == b[name].dtype


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[int, tuple[Path, dict[str, Any]]]:
    """{ranks that saved: (checkpoints directory, what was saved)}."""
    found = {}
    for ranks in (1, 2, 3):
        directory = tmp_path_factory.mktemp(f"from{ranks}") / "checkpoints"
        results = run_ranks(save, ranks, str(directory))
        for result in results[1:]:
            equal(result, results[0])
        found[ranks] = directory, results[0]
    return found


@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 3), (3, 2), (2, 2)])
def test_a_model_comes_back_to_the_bit_on_another_number_of_ranks(
    saved: dict[int, tuple[Path, dict[str, Any]]], before: int, after: int
) -> None:
    directory, right = saved[before]
    for result in run_ranks(load, after, str(directory)):
        equal(result, right)


def test_each_rank_wrote_its_own_file_and_there_is_no_pickle(saved: dict[int, tuple[Path, dict[str, Any]]]) -> None:
    directory, _ = saved[3]
    (path,) = directory.iterdir()
    assert sorted(file.name for file in path.iterdir()) == [
        "manifest.json",
        *(f"shard-0000{rank}-model-00001-of-00001.safetensors" for rank in (1, 2, 3)),
    ]
    total = sum(file.stat().st_size for file in path.glob("*.safetensors"))
    headers = 3 * 8192
    assert total < sum(v.nbytes for v in saved[3][1].values() if isinstance(v, torch.Tensor)) + headers


def test_it_is_assembled_exported_and_loaded_into_a_plain_model(
    saved: dict[int, tuple[Path, dict[str, Any]]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory, right = saved[3]
    net, _ = build(sharded=False)
    samestep.load_weights(net, directory)
    for name, value in net.state_dict().items():
        assert torch.equal(value, right[name])
    assert main(["ckpt", "export", str(directory), str(tmp_path / "w.safetensors")]) == 0
    assert torch.equal(safetensors.torch.load_file(tmp_path / "w.safetensors")["0.weight"], right["0.weight"])
    assert main(["ckpt", "ls", str(directory)]) == 0
    assert main(["ckpt", "verify", str(directory)]) == 0
    assert main(["ckpt", "show", str(directory)]) == 0
    out = capsys.readouterr().out
    row = next(line for line in out.splitlines() if line.startswith("model0.0.weight"))
    assert row.split()[1:] == ["F32", "5", "x", "4", "80", "B"]


def test_readers_of_whole_tensors_refuse_it_and_it_refuses_whole_tensors(
    saved: dict[int, tuple[Path, dict[str, Any]]], tmp_path: Path
) -> None:
    checkpoint = Checkpoint.open(Store(saved[2][0]).path(7))
    assert is_sharded(checkpoint)
    with pytest.raises(CheckpointError, match="cannot be read"):
        checkpoint.load()
    net, optimizer = build(sharded=False)
    path = Store(tmp_path).save(1, {"model0": net.state_dict()}, {})
    with pytest.raises(CheckpointError, match="holds whole tensors"):
        load_sharded(path, net, optimizer)


@pytest.fixture
def copied(saved: dict[int, tuple[Path, dict[str, Any]]], tmp_path: Path) -> Path:
    shutil.copytree(saved[2][0], tmp_path / "copy")
    return Store(tmp_path / "copy").path(7)


@pytest.mark.parametrize("damage", ["missing", "bit", "extra"])
def test_damage_is_named_on_all_ranks(copied: Path, damage: str) -> None:
    file = sorted(copied.glob("*.safetensors"))[1]
    if damage == "missing":
        file.unlink()
    elif damage == "bit":
        content = bytearray(file.read_bytes())
        content[-1] ^= 1
        file.write_bytes(content)
    else:
        shutil.copy(file, copied / "shard-00009-model-00001-of-00001.safetensors")
    with pytest.raises(RanksFailed) as caught:
        run_ranks(load, 2, str(copied))
    assert {rank: type(e) for rank, e in caught.value.errors.items()} == {0: CheckpointError, 1: CheckpointError}
    assert "shard-0000" in str(caught.value)


def test_a_shard_that_the_manifest_does_not_know_of_missing_is_found_by_its_elements(copied: Path) -> None:
    fields = json.loads((copied / "manifest.json").read_text())
    del fields["manifest_sha256"]
    del fields["files"]["shard-00002-model-00001-of-00001.safetensors"]
    (copied / "shard-00002-model-00001-of-00001.safetensors").unlink()
    (copied / "manifest.json").write_text(Manifest(**fields).to_text())
    with pytest.raises(CheckpointError, match=r"0\.weight has 12 of 20 elements"):
        assemble(Checkpoint.open(copied))


def test_another_shape_is_refused_by_name_and_loads_nothing(saved: dict[int, tuple[Path, dict[str, Any]]]) -> None:
    with pytest.raises(CheckpointError, match=r"of another shape: model0\.0\.weight \(\(5, 4\) in the file, \(6, 4\)"):
        load(str(saved[1][0]), width=6)


class Code:
    def __reduce__(self) -> Any:
        return (exec, ("raise SystemExit('ran')",))


def test_a_pickled_index_beside_the_shards_is_not_read(copied: Path, saved: dict[int, Any]) -> None:
    (copied / ".metadata").write_bytes(pickle.dumps(Code()))
    equal(load(str(copied)), saved[2][1])


def fail_on_one(directory: str) -> str:
    world = World("cpu", 60)
    try:
        net, optimizer = build(sharded=True)
        step(net, optimizer)
        if world.rank == 1:
            dcp._described = lambda *_: {"": "disk: No space left on device"}
        with pytest.raises(CheckpointError, match="No space left on device"):
            save_sharded(directory, 8, net, optimizer)
        dist.barrier()
    finally:
        world.close()
    return "refused"


def test_a_rank_that_cannot_write_fails_all_and_leaves_nothing(tmp_path: Path) -> None:
    assert run_ranks(fail_on_one, 2, str(tmp_path)) == ["refused"] * 2
    assert [*tmp_path.iterdir()] == []


def save_twice(directory: str) -> list[str]:
    world = World("cpu", 60)
    net, optimizer = build(sharded=True)
    step(net, optimizer)
    for _ in range(2):
        save_sharded(directory, 7, net, optimizer)
    world.close()
    return sorted(path.name for path in Path(directory).iterdir())


def test_the_same_step_is_replaced(tmp_path: Path) -> None:
    assert run_ranks(save_twice, 2, str(tmp_path))[0] == ["step-00000007"]
    assert verify(Store(tmp_path).path(7)) == []


def test_weights_alone_are_saved_and_loaded(tmp_path: Path) -> None:
    net, optimizer = build(sharded=False)
    step(net, optimizer)
    save_sharded(tmp_path, 1, net)
    other, _ = build(sharded=False)
    load_sharded(tmp_path, other)
    assert all(torch.equal(value, other.state_dict()[name]) for name, value in net.state_dict().items())


def die_while_saving(directory: str) -> None:
    world = World("cpu", 60)
    net, optimizer = build(sharded=True)
    step(net, optimizer)
    save_sharded(directory, 7, net, optimizer)
    if world.rank == 1:
        dcp._described = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    save_sharded(directory, 8, net, optimizer)


def test_a_rank_that_is_killed_leaves_the_checkpoint_before_it(tmp_path: Path) -> None:
    with pytest.raises(RanksFailed) as caught:
        run_ranks(die_while_saving, 2, str(tmp_path))
    assert isinstance(caught.value.errors[0], CheckpointError), "the rank that lives says what failed"
    assert verify(Store(tmp_path).path(7)) == []
    assert Store(tmp_path).steps() == [7]
