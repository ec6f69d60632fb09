"""`samestep.load_weights`: strict unless told, from every kind of file, and honest about what it did."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import nn

import samestep
from samestep.checkpoint.storage import Store
from samestep.checkpoint.weights import read_weights
from samestep.errors import CheckpointError


class Net(nn.Module):
    def __init__(self, classes: int = 2, fill: float = 0.0) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
        self.head = nn.Linear(3, classes)
        with torch.no_grad():
            for param in self.parameters():
                param.fill_(fill)


def written(directory: Path, kind: str, net: nn.Module) -> Path:
    state = net.state_dict()
    if kind == "run":
        averages = {name: torch.full_like(param, 9.0) for name, param in net.named_parameters()}
        state_of_run = {"model0": state, "ema0": {"decay": 0.5, "averages": averages}}
        Store(directory / "checkpoints").save(3, state_of_run, {})
        return directory
    path = directory / f"w.{kind}"
    if kind == "safetensors":
        safetensors.torch.save_file(state, path)
    else:
        torch.save({"model": state} if kind == "pt" else state, path)
    return path


KINDS = ["run", "safetensors", "pt", "bin"]


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_file_fills_the_model(tmp_path: Path, kind: str) -> None:
    net = Net()
    done = samestep.load_weights(net, written(tmp_path, kind, Net(fill=5.0)))
    assert all((param == 5).all() for param in net.parameters())
    assert (len(done.loaded), done.left, done.unused) == (9, [], [])


@pytest.mark.parametrize("kind", KINDS)
def test_a_new_head_keeps_its_values_and_is_named(tmp_path: Path, kind: str) -> None:
    path, net = written(tmp_path, kind, Net(fill=5.0)), Net(classes=7, fill=1.0)
    with pytest.raises(CheckpointError, match=r"2 of another shape: head\.weight"):
        samestep.load_weights(net, path)
    assert all((param == 1).all() for param in net.parameters()), "a refusal changes nothing"
    done = samestep.load_weights(net, path, partial="head.*")
    assert (net.head.weight == 1).all()
    assert (net.body[0].weight == 5).all()
    assert (done.left, done.unused) == (["head.weight", "head.bias"], ["head.bias", "head.weight"])
    assert str(done) == (
        f"7 of 9 tensors loaded from {path}; left as they were: head.weight, head.bias; "
        "in the file and not used: head.bias, head.weight"
    )


def test_one_missing_or_unexpected_name_is_an_error_and_not_a_warning(tmp_path: Path) -> None:
    state = Net(fill=5.0).state_dict()
    for change in ({"extra": torch.zeros(1)}, {"head.bias": None}):
        changed = {name: value for name, value in {**state, **change}.items() if value is not None}
        torch.save(changed, tmp_path / "w.pt")
        net = Net()
        with pytest.raises(CheckpointError, match="1 missing|1 unexpected"):
            samestep.load_weights(net, tmp_path / "w.pt")
        assert all((param == 0).all() for param in net.parameters())


def test_the_averages_of_a_run_are_loaded_when_asked(tmp_path: Path) -> None:
    path, net = written(tmp_path, "run", Net(fill=5.0)), Net()
    samestep.load_weights(net, path, ema=True)
    assert all((param == 9).all() for param in net.parameters())
    with pytest.raises(CheckpointError, match="holds no ema1"):
        samestep.load_weights(net, path, ema=True, number=1)
    with pytest.raises(CheckpointError, match="only a run's checkpoints have it"):
        samestep.load_weights(net, written(tmp_path, "pt", Net()), ema=True)


def test_a_run_that_was_prepared_loads_into_a_bare_model_and_goes_on(tmp_path: Path) -> None:
    with samestep.Run(tmp_path / "run", progress=False) as run:
        model = run.prepare(Net(fill=3.0))
        run.ema(model, 0.5)
        run.save()
    net = Net()
    samestep.load_weights(net, tmp_path / "run")
    assert (net.head.weight == 3).all()
    samestep.load_weights(net, tmp_path / "run", ema=True)
    with samestep.Run(tmp_path / "tuned", progress=False) as run:
        assert (run.prepare(net).module.head.weight == 3).all()


def test_a_damaged_newest_checkpoint_gives_way_only_when_its_manifest_tells(tmp_path: Path) -> None:
    store = Store(tmp_path / "checkpoints")
    for step, fill in ((1, 1.0), (2, 2.0)):
        store.save(step, {"model0": Net(fill=fill).state_dict()}, {})
    file = next(store.path(2).glob("*.safetensors"))
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match="is damaged.*sha256 differs"):
        samestep.load_weights(Net(), tmp_path)  # other weights than the newest are not loaded silently
    net = Net()
    samestep.load_weights(net, tmp_path, step=1)
    assert (net.head.weight == 1).all()


def test_values_are_cast_between_floats_and_never_between_kinds(tmp_path: Path) -> None:
    torch.save(Net(fill=5.0).bfloat16().state_dict(), tmp_path / "w.pt")
    net = Net()
    samestep.load_weights(net, tmp_path / "w.pt")
    assert net.head.weight.dtype == torch.float32
    state = Net().state_dict()
    torch.save({**state, "head.bias": torch.zeros(2, dtype=torch.int64)}, tmp_path / "w.pt")
    with pytest.raises(CheckpointError, match=r"head\.bias is torch\.int64 in the file and torch\.float32"):
        samestep.load_weights(net, tmp_path / "w.pt")


def test_a_model_on_the_meta_device_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path, "pt", Net())
    with torch.device("meta"):
        net = nn.Linear(1, 1)
    with pytest.raises(CheckpointError, match="weight is on the meta device"):
        samestep.load_weights(net, path)


def test_tied_weights_stored_once_are_loaded_and_stay_tied(tmp_path: Path) -> None:
    net = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    net[1].weight = net[0].weight
    other = copy.deepcopy(net)
    safetensors.torch.save_model(other, str(tmp_path / "w.safetensors"))
    assert len(read_weights(tmp_path / "w.safetensors")) == 1
    samestep.load_weights(net, tmp_path / "w.safetensors")
    assert net[1].weight is net[0].weight
    assert torch.equal(net[0].weight, other[0].weight)


def test_what_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="none does not exist"):
        samestep.load_weights(Net(), tmp_path / "none")
    with pytest.raises(CheckpointError, match="has no model 1"):
        samestep.load_weights(Net(), written(tmp_path, "pt", Net()), number=1)
