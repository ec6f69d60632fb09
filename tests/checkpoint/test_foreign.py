import errno
import os
import resource
import stat
import zipfile
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import nn

from samestep.checkpoint.foreign import read_safetensors, read_torch_file, write_safetensors, write_torch_file
from samestep.errors import CheckpointError

WEIGHTS = {"weight": torch.full((2,), 7.0), "bias": torch.zeros(1)}


def saved(path: Path, content: object, **options: object) -> Path:
    torch.save(content, path / "w.pt", **options)
    return path / "w.pt"


def weights_only(content: object) -> bool:
    return list(content) == ["weight", "bias"] and all(torch.equal(content[name], WEIGHTS[name]) for name in WEIGHTS)


@pytest.mark.parametrize(
    "content",
    [{"model_state_dict": WEIGHTS, "epoch": 3}, {"state_dict": WEIGHTS}, {"model": WEIGHTS, "args": "x"}, WEIGHTS],
)
@pytest.mark.parametrize("zipped", [True, False])
def test_the_usual_layouts_are_understood_in_both_formats(tmp_path, content, zipped):
    got = read_torch_file(saved(tmp_path, content, _use_new_zipfile_serialization=zipped))
    assert weights_only(got["model"])
    assert got["optimizer"] is None
    assert got["epoch"] == (3 if "epoch" in content else None)


def test_what_is_written_is_read_by_torch_and_by_us(tmp_path):
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    write_torch_file(tmp_path / "w.pt", model.state_dict(), optimizer.state_dict(), 4)
    plain = torch.load(tmp_path / "w.pt")
    assert sorted(plain) == ["epoch", "model_state_dict", "optimizer_state_dict"]
    got = read_torch_file(str(tmp_path / "w.pt"))
    assert got["epoch"] == 4
    model.load_state_dict(got["model"])
    optimizer.load_state_dict(got["optimizer"])
    assert [path.name for path in tmp_path.iterdir()] == ["w.pt"]


def test_c28_storages_tagged_with_a_gpu_load_on_a_machine_without_one(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.serialization, "location_tag", lambda storage: "cuda:0")
    path = saved(tmp_path, {"model_state_dict": {"w": torch.full((3,), 7.0)}})
    legacy = tmp_path / "legacy.pt"
    torch.save({"w": torch.full((3,), 7.0)}, legacy, _use_new_zipfile_serialization=False)
    monkeypatch.undo()
    assert b"cuda:0" in zipfile.ZipFile(path).read("w/data.pkl")
    for file in (path, legacy):
        got = read_torch_file(file)["model"]["w"]
        assert got.device.type == "cpu"
        assert got.tolist() == [7.0, 7.0, 7.0]


def test_loaded_weights_can_change_without_changing_the_file(tmp_path):
    path = saved(tmp_path, WEIGHTS)
    before = path.read_bytes()
    read_torch_file(path)["model"]["weight"].add_(1)
    assert path.read_bytes() == before


class Code:
    ran = False

    def __reduce__(self):
        return (exec, ("raise SystemExit('the file ran code')",))


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("content", [{"model": nn.Linear(1, 1)}, {"epoch": np.float64(1), **WEIGHTS}, {"x": Code()}])
def test_a_file_that_needs_code_is_refused_with_what_to_do(tmp_path, content, zipped):
    path = saved(tmp_path, content, _use_new_zipfile_serialization=zipped)
    with pytest.raises(CheckpointError, match=r"w\.pt needs .* to be read; loading runs no code .* save it again"):
        read_torch_file(path)


def test_the_classes_that_a_file_needs_are_named(tmp_path):
    path = saved(tmp_path, {"model": nn.Linear(1, 1)})
    with pytest.raises(CheckpointError, match=r"needs torch\.nn\.modules\.linear\.Linear to be read"):
        read_torch_file(path)


@pytest.mark.parametrize("content", [b"", b"hello world", b"PK\x03\x04abc", b"\x80\x02}q\x00.", b"\x00" * 500, b"{}"])
def test_a_file_of_something_else_is_refused(tmp_path, content):
    (tmp_path / "w.pt").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"w\.pt.* (not a file of torch\.save|holds no weights|needs )"):
        read_torch_file(tmp_path / "w.pt")


@pytest.mark.parametrize("zipped", [True, False])
def test_a_truncated_file_is_refused_at_every_length(tmp_path, zipped):
    path = saved(tmp_path, WEIGHTS, _use_new_zipfile_serialization=zipped)
    whole = path.read_bytes()
    for size in range(0, len(whole), max(1, len(whole) // 40)):
        path.write_bytes(whole[:size])
        with pytest.raises(CheckpointError, match=r"w\.pt"):
            read_torch_file(path)


def test_a_zip_of_something_else_is_refused(tmp_path):
    with zipfile.ZipFile(tmp_path / "w.pt", "w") as archive:
        archive.writestr("a.txt", "hello")
    with pytest.raises(CheckpointError, match=r"not a file of torch\.save"):
        read_torch_file(tmp_path / "w.pt")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ([1, 2], "holds a list"), ({}, "holds no weights; it has nothing"), ({"model": {}}, "holds no weights"),
        ({"state_dict": {"a": 1}, "lr": 2}, "holds no weights; it has state_dict, lr"), ({**WEIGHTS, "lr": 2}, "has lr"),
    ],
)  # fmt: skip
def test_a_file_without_weights_is_refused_by_what_it_has(tmp_path, content, words):
    with pytest.raises(CheckpointError, match=words):
        read_torch_file(saved(tmp_path, content))


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(CheckpointError, match=r"none\.pt: No such file"):
        read_torch_file(tmp_path / "none.pt")
    with pytest.raises(CheckpointError, match="Is a directory"):
        read_torch_file(tmp_path)


def test_a_failed_write_leaves_the_file_that_was_there(tmp_path):
    write_torch_file(tmp_path / "w.pt", WEIGHTS, epoch=1)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))
    try:
        with pytest.raises(CheckpointError, match=rf"w\.pt could not be written: {os.strerror(errno.EFBIG)}"):
            write_torch_file(tmp_path / "w.pt", {"big": torch.zeros(50_000)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert weights_only(read_torch_file(tmp_path / "w.pt")["model"])
    assert [path.name for path in tmp_path.iterdir()] == ["w.pt"]


def test_a_folder_that_does_not_exist_is_a_checkpoint_error(tmp_path):
    with pytest.raises(CheckpointError, match="No such file or directory"):
        write_torch_file(tmp_path / "none" / "w.pt", WEIGHTS)


def test_permissions_follow_the_umask(tmp_path):
    before = os.umask(0o027)
    try:
        write_torch_file(tmp_path / "w.pt", WEIGHTS)
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "w.pt").stat().st_mode) == 0o640


def test_a_zip_bomb_is_refused_by_what_it_would_unpack_to(tmp_path):
    path = saved(tmp_path, WEIGHTS)
    with zipfile.ZipFile(path) as old:
        entries = {name: old.read(name) for name in old.namelist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as bomb:
        for name, content in entries.items():
            bomb.writestr(name, content + (b"\0" * 30_000_000 if name.endswith("data/0") else b""))
    assert path.stat().st_size < 100_000
    with pytest.raises(CheckpointError, match=r"w\.pt is a zip archive that unpacks to 300\d+ bytes"):
        read_torch_file(path)


def test_a_tensor_that_is_larger_than_its_file_is_refused(tmp_path):
    path = saved(tmp_path, {"model": {"w": torch.zeros(1).expand(1 << 40)}})
    with pytest.raises(CheckpointError, match=rf"has a tensor w of {1 << 42} bytes"):
        read_torch_file(path)


@pytest.mark.parametrize("zipped", [True, False])
def test_a_pickle_with_code_is_not_executed(tmp_path, zipped):
    class Touch:
        def __reduce__(self):
            return (exec, (f"open({str(tmp_path / 'ran')!r}, 'w').close()",))

    path = saved(tmp_path, {"model": WEIGHTS, "x": Touch()}, _use_new_zipfile_serialization=zipped)
    with pytest.raises(CheckpointError, match="loading runs no code"):
        read_torch_file(path)
    assert not (tmp_path / "ran").exists()
    with pytest.raises(Exception, match=r".*"):  # the file is a true attack: torch alone, told to trust it, runs it
        torch.load(path, weights_only=False)["y"]
    assert (tmp_path / "ran").exists()


def test_a_pipe_is_refused_and_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "w.pt")
    for read in (read_torch_file, read_safetensors):
        with pytest.raises(CheckpointError, match="pipe, socket or device"):
            read(tmp_path / "w.pt")


def test_safetensors_files_are_written_whole_with_their_dtypes(tmp_path):
    tensors = {
        "bf16": torch.ones(3, dtype=torch.bfloat16), "turned": torch.arange(6.0).reshape(2, 3).t(),
        "none": torch.empty(0, 4), "scalar": torch.tensor(7), "bool": torch.tensor([True, False]),
        "fp8": torch.ones(5).to(torch.float8_e4m3fn),
    }  # fmt: skip
    write_safetensors(tmp_path / "w.safetensors", tensors, {"step": "3"})
    theirs = safetensors.torch.load_file(tmp_path / "w.safetensors")
    ours = read_safetensors(tmp_path / "w.safetensors")
    for name, tensor in tensors.items():
        for got in (theirs[name], ours[name]):
            assert (got.dtype, got.shape) == (tensor.dtype, tensor.shape)
            assert got.flatten().tolist() == tensor.flatten().tolist()
    with safetensors.safe_open(tmp_path / "w.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt", "step": "3"}
    with pytest.raises(CheckpointError, match="c is of torch.complex64"):
        write_safetensors(tmp_path / "c.safetensors", {"c": torch.zeros(1, dtype=torch.complex64)}, {})
    assert [path.name for path in tmp_path.iterdir()] == ["w.safetensors"]
