import contextlib
import errno
import os
import resource
import shutil
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from samestep.checkpoint.storage import Checkpoint, Store, verify
from samestep.errors import CheckpointError


def state_of(value: float) -> dict:
    return {"model": {"weight": torch.full((300,), value)}, "engine": {"step": int(value), "scale": float("inf")}}


def store_with(directory: Path, *steps: int, keep_last: int | None = 3) -> Store:
    store = Store(directory / "checkpoints", keep_last)
    for step in steps:
        store.save(step, state_of(step), {"position": {"epoch": step}})
    return store


def silent(message: str) -> None:
    raise AssertionError(f"unexpected report: {message}")


def bytes_of(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in path.iterdir()}


values = st.integers() | st.floats(allow_nan=False) | st.text(max_size=4) | st.none()
tensors = st.builds(
    lambda shape, dtype, seed: (torch.arange(torch.Size(shape).numel()) + seed).reshape(shape).to(dtype),
    st.lists(st.integers(0, 4), max_size=3),
    st.sampled_from([torch.float32, torch.bfloat16, torch.bool, torch.int64, torch.complex128, torch.uint16]),
    st.integers(0, 9),
)
states = st.dictionaries(
    st.text(max_size=4) | st.just("__metadata__"),
    values | tensors | st.dictionaries(st.integers() | st.text(max_size=3), values | tensors, max_size=4),
    max_size=4,
)


@settings(deadline=None, max_examples=50)
@given(states)
def test_every_state_comes_back_from_the_disk(same, state):
    with tempfile.TemporaryDirectory() as directory:
        Store(Path(directory)).save(7, state, {"position": 1})
        checkpoint = Store(Path(directory)).newest(silent)
        assert same(checkpoint.load(), state)
        assert checkpoint.manifest.step == 7
        assert checkpoint.manifest.meta == {"position": 1}


def test_a_directory_without_checkpoints_has_no_newest(tmp_path):
    assert Store(tmp_path / "none").newest(silent) is None
    assert Store(tmp_path / "none").steps() == []


def test_names_sort_as_numbers_and_any_program_can_read_the_tensors(tmp_path):
    store = store_with(tmp_path, 9, 10, 123_456_789, keep_last=None)
    assert store.steps() == [9, 10, 123_456_789]
    assert store.path(12).name == "step-00000012"
    tensors = safetensors.torch.load_file(store.path(10) / "tensors.safetensors")
    assert tensors["model.weight"].tolist() == [10.0] * 300


def test_a_loaded_state_outlives_its_files_and_does_not_change_them(tmp_path):
    store = store_with(tmp_path, 1)
    before = bytes_of(store.path(1))
    state = Checkpoint.open(store.path(1)).load("cpu")
    state["model"]["weight"].add_(5)
    assert bytes_of(store.path(1)) == before
    shutil.rmtree(store.path(1))
    assert state["model"]["weight"].sum() == 1800


def test_retention_keeps_the_last_in_numeric_order(tmp_path):
    store = store_with(tmp_path, 8, 9, 10, 11, keep_last=2)
    assert store.steps() == [10, 11]
    assert sorted(path.name for path in store.directory.iterdir()) == ["step-00000010", "step-00000011"]


def test_retention_never_deletes_the_checkpoint_just_written_for_later_ones(tmp_path):
    store_with(tmp_path, 10, 20, keep_last=None)
    (tmp_path / "checkpoints/step-00000020/tensors.safetensors").write_bytes(b"rot")
    store = store_with(tmp_path, 12, keep_last=1)  # resumed from 10
    assert store.steps() == [12, 20]
    assert store.newest(lambda message: None).manifest.step == 12


@pytest.mark.parametrize("keep_last", [0, -1, True, 2.0])
def test_keep_last_is_a_positive_number_or_none(tmp_path, keep_last):
    with pytest.raises(CheckpointError, match="keep_last"):
        Store(tmp_path, keep_last)


def test_the_same_step_again_replaces_the_checkpoint(tmp_path):
    store = store_with(tmp_path, 4, 5)
    store.save(5, state_of(6), {})
    assert store.newest(silent).load()["engine"]["step"] == 6
    assert sorted(path.name for path in store.directory.iterdir()) == ["step-00000004", "step-00000005"]


@pytest.mark.parametrize("step", [-1, 1.0, True])
def test_a_step_is_a_whole_number(tmp_path, step):
    with pytest.raises(CheckpointError, match="step="):
        Store(tmp_path).save(step, {}, {})


def test_tied_weights_are_written_once_and_come_back_tied(tmp_path):
    embed = torch.nn.Embedding(500, 64)
    head = torch.nn.Linear(64, 500, bias=False)
    head.weight = embed.weight
    model = torch.nn.ModuleDict({"embed": embed, "head": head})
    path = Store(tmp_path).save(1, {"model": model.state_dict()}, {})
    distinct = embed.weight.nbytes
    assert (path / "tensors.safetensors").stat().st_size <= 1.01 * distinct
    loaded = Checkpoint.open(path).load()["model"]
    assert list(loaded) == ["embed.weight", "head.weight"]
    assert loaded["embed.weight"] is loaded["head.weight"]
    assert torch.equal(loaded["head.weight"], head.weight)


def test_views_are_written_without_the_rest_of_their_storage(tmp_path):
    whole = torch.arange(100_000.0)
    state = {"a": whole[:10], "b": whole[5:15], "c": whole[::10_000], "t": whole[:6].reshape(2, 3).T}
    path = Store(tmp_path).save(1, state, {})
    assert (path / "tensors.safetensors").stat().st_size < 1000
    loaded = Checkpoint.open(path).load()
    assert all(torch.equal(loaded[name], state[name]) for name in state)
    assert loaded["a"].untyped_storage().nbytes() == 40


def test_a_conjugate_is_not_taken_for_its_tensor(tmp_path):
    z = torch.tensor([1 + 2j])
    path = Store(tmp_path).save(1, {"z": z, "conj": z.conj()}, {})
    assert Checkpoint.open(path).load()["conj"].item() == 1 - 2j


@pytest.mark.parametrize("mask", [0o022, 0o077, 0o002])
def test_permissions_follow_the_umask(tmp_path, mask):
    before = os.umask(mask)
    try:
        path = Store(tmp_path).save(1, state_of(1), {})
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o777 & ~mask
    assert {stat.S_IMODE(file.stat().st_mode) for file in path.iterdir()} == {0o666 & ~mask}


def damage_truncated(path: Path) -> None:
    os.truncate(path / "tensors.safetensors", 100)


def damage_longer(path: Path) -> None:
    with (path / "tensors.safetensors").open("ab") as file:
        file.write(b"\0")


def damage_flipped(path: Path) -> None:
    content = bytearray((path / "tensors.safetensors").read_bytes())
    content[-7] ^= 4
    (path / "tensors.safetensors").write_bytes(content)


def damage_missing(path: Path) -> None:
    (path / "tensors.safetensors").unlink()


def damage_folder(path: Path) -> None:
    damage_missing(path)
    (path / "tensors.safetensors").mkdir()


def damage_no_manifest(path: Path) -> None:
    (path / "manifest.json").unlink()


def damage_half_manifest(path: Path) -> None:
    os.truncate(path / "manifest.json", 60)


def damage_manifest_value(path: Path) -> None:
    text = (path / "manifest.json").read_text()
    (path / "manifest.json").write_text(text.replace('"epoch": 11', '"epoch": 17'))


def damage_manifest_bytes(path: Path) -> None:
    content = (path / "manifest.json").read_bytes()
    (path / "manifest.json").write_bytes(content.replace(b"model", b"mod\xe9l"))


def damage_all(path: Path) -> None:
    for file in path.iterdir():
        file.unlink()


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (damage_truncated, "tensors.safetensors has 100 bytes"),
        (damage_longer, "bytes, 2480 were written"),
        (damage_flipped, "tensors.safetensors has other bytes than were written"),
        (damage_missing, "tensors.safetensors is missing"),
        (damage_folder, "tensors.safetensors cannot be read: Is a directory"),
        (damage_no_manifest, "manifest.json: No such file"),
        (damage_half_manifest, "manifest.json is not JSON"),
        (damage_manifest_value, "manifest.json has other content than was written"),
        (damage_manifest_bytes, "manifest.json has other content than was written"),
        (damage_all, "manifest.json: No such file"),
    ],
)
def test_a_damaged_checkpoint_is_reported_by_file_and_the_one_before_it_is_used(tmp_path, damage, words):
    store = store_with(tmp_path, 9, 10, 11)
    damage(store.path(11))
    reports: list[str] = []
    checkpoint = store.newest(reports.append)
    assert checkpoint.manifest.step == 10
    assert checkpoint.load()["engine"]["step"] == 10
    assert len(reports) == 1
    assert "DAMAGED" in reports[0]
    assert words in reports[0]
    assert verify(store.path(11))
    assert verify(store.path(10)) == []
    with pytest.raises(CheckpointError):
        Checkpoint.open(store.path(11)).load()


def test_a_stray_file_under_a_checkpoints_name_is_reported_and_passed_over(tmp_path):
    store = store_with(tmp_path, 9)
    store.path(10).write_text("not a directory")
    reports: list[str] = []
    assert store.newest(reports.append).manifest.step == 9
    assert "step-00000010" in reports[0]


@contextlib.contextmanager
def file_size_limit(directory: Path):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))
    try:
        yield directory
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@contextlib.contextmanager
def small_disk(directory: Path):
    command = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(directory)]
    if os.getuid() or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("cannot mount a small tmpfs: needs root and the mount capability")
    try:
        yield directory
    finally:
        subprocess.run(["umount", str(directory)], check=True)


@pytest.mark.parametrize(("limit", "cause"), [(file_size_limit, errno.EFBIG), (small_disk, errno.ENOSPC)])
def test_a_disk_too_small_leaves_the_earlier_checkpoint_and_no_temporary(tmp_path, limit, cause):
    with limit(tmp_path) as directory:
        store = store_with(directory, 9)
        before = bytes_of(store.path(9))
        with pytest.raises(CheckpointError, match=rf"step 10 .*tensors\.safetensors: {os.strerror(cause)}"):
            store.save(10, {"big": torch.zeros(50_000)}, {})
        assert [path.name for path in store.directory.iterdir()] == ["step-00000009"]
        assert bytes_of(store.path(9)) == before
        store.save(10, state_of(10), {})
        assert store.newest(silent).manifest.step == 10


def test_a_directory_that_cannot_be_written_is_named_with_the_cause(tmp_path, monkeypatch):
    store = store_with(tmp_path, 9)

    def read_only(self, *args, **kwargs):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(self))

    monkeypatch.setattr(Path, "mkdir", read_only)  # root ignores modes
    with pytest.raises(CheckpointError, match=r"\.tmp-step-00000010.*Read-only file system; .*untouched"):
        store.save(10, state_of(10), {})
    assert store.newest(silent).manifest.step == 9


def test_a_run_directory_that_is_a_file_is_a_checkpoint_error(tmp_path):
    (tmp_path / "checkpoints").write_text("")
    with pytest.raises(CheckpointError, match="checkpoints"):
        store_with(tmp_path, 1)


def test_a_disk_that_gives_back_other_bytes_is_noticed_before_anything_is_deleted(tmp_path, monkeypatch):
    store = store_with(tmp_path, 9, keep_last=1)
    real = os.fsync

    def rot(descriptor):
        real(descriptor)
        path = Path(f"/proc/self/fd/{descriptor}").readlink()
        if path.name == "tensors.safetensors":
            damage_flipped(path.parent)

    monkeypatch.setattr(os, "fsync", rot)
    with pytest.raises(CheckpointError, match=r"does not read back as written: tensors\.safetensors has other bytes"):
        store.save(10, state_of(10), {})
    assert store.steps() == [9]
    assert store.newest(silent).manifest.step == 9


@pytest.mark.parametrize(("state", "meta"), [({"f": print}, {}), ({}, {"f": print})])
def test_what_cannot_be_saved_leaves_nothing_behind(tmp_path, state, meta):
    store = store_with(tmp_path, 9)
    with pytest.raises(CheckpointError):
        store.save(10, state, meta)
    assert [path.name for path in store.directory.iterdir()] == ["step-00000009"]


def test_left_overs_of_the_dead_go_at_the_next_save_and_those_of_the_living_stay(tmp_path):
    store = store_with(tmp_path, 9)
    with subprocess.Popen([sys.executable, "-c", ""]) as dead:
        dead.wait()
    names = [
        f".tmp-step-00000010-{dead.pid}",
        f".tmp-delete-step-00000003-{dead.pid}",
        f".tmp-step-00000010-{os.getpid()}",
    ]
    alive = f".tmp-step-00000010-{os.getppid()}"
    for name in (*names, alive):
        (store.directory / name).mkdir()
    store.save(10, state_of(10), {})
    assert {path.name for path in store.directory.iterdir()} == {"step-00000009", "step-00000010", alive}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_state_saved_from_the_gpu_loads_where_it_is_asked_to(tmp_path):
    path = Store(tmp_path).save(1, {"x": torch.full((3,), 7.0, device="cuda")}, {})
    assert Checkpoint.open(path).load()["x"].device.type == "cpu"
    assert Checkpoint.open(path).load("cuda")["x"].tolist() == [7.0] * 3
