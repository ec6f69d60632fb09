"""Remote checkpoints, on fsspec's memory and local file systems: whole or not there, whatever stops the copy."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch

from samestep.checkpoint.remote import Remote, mirror
from samestep.checkpoint.storage import Checkpoint, Store, verify
from samestep.cli.main import main
from samestep.errors import CheckpointError


@pytest.fixture
def store(tmp_path: Path) -> Store:
    store = Store(tmp_path / "run" / "checkpoints", keep_last=None)
    for step in (1, 2, 3):
        store.save(step, {"model0": {"w": torch.full((50,), float(step))}}, {"precision": "fp32"})
    return store


@pytest.fixture(params=["memory", "local", "file"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    if request.param != "memory":
        yield {"local": "", "file": "file://"}[request.param] + str(tmp_path / "remote")
        return
    yield "memory://bucket/run"
    fsspec.filesystem("memory").store.clear()
    fsspec.filesystem("memory").pseudo_dirs[:] = [""]


def value(path: Path) -> float:
    return float(Checkpoint.open(path).load()["model0"]["w"][0])


def test_what_is_pushed_is_pulled_to_the_bit(store: Store, url: str, tmp_path: Path) -> None:
    assert Remote(url).push(store.path(2))
    assert not Remote(url).push(store.path(2)), "it was there already"
    assert Remote(url).push(store.path(1))
    assert Remote(url).steps() == [1, 2]
    path = Remote(url).pull(tmp_path / "new" / "checkpoints", None, pytest.fail)
    assert value(path) == 2.0
    assert {file.name: file.read_bytes() for file in path.iterdir()} == {
        file.name: file.read_bytes() for file in store.path(2).iterdir()
    }
    assert [entry.name for entry in path.parent.iterdir()] == ["step-00000002"]
    assert Remote(url).pull(path.parent, 2, pytest.fail) == path, "again: nothing to do"


def test_another_checkpoint_of_a_step_is_replaced_only_when_asked(store: Store, url: str, tmp_path: Path) -> None:
    Remote(url).push(store.path(2))
    other = Store(tmp_path / "other").save(2, {"model0": {"w": torch.full((50,), 9.0)}}, {})
    with pytest.raises(CheckpointError, match="has another checkpoint of step 2"):
        Remote(url).push(other)
    Remote(url).push(other, replace=True)
    assert value(Remote(url).pull(tmp_path / "new", None, pytest.fail)) == 9.0
    with pytest.raises(CheckpointError, match="nothing local is replaced"):
        Remote(url).pull(store.directory, 2, pytest.fail)
    assert value(store.path(2)) == 2.0


class StoppedError(Exception):
    pass


@pytest.mark.parametrize("number", range(28))
def test_a_push_that_stops_anywhere_leaves_the_one_before_and_is_done_again(
    store: Store, tmp_path: Path, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    fs = fsspec.filesystem("memory")
    Remote("memory://stop").push(store.path(1))
    other = Store(tmp_path / "other").save(1, {"model0": {"w": torch.full((50,), 9.0)}}, {})
    calls = 0

    def counted(name: str) -> None:
        original = getattr(type(fs), name)

        def call(self: Any, *args: Any, **options: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == number + 1:
                raise StoppedError
            return original(self, *args, **options)

        monkeypatch.setattr(type(fs), name, call)

    try:
        for name in ("exists", "rm_file", "open", "info", "pipe_file", "makedirs"):
            counted(name)
        for path, replace in ((store.path(2), False), (other, True)):
            try:
                Remote("memory://stop").push(path, replace=replace)
            except CheckpointError as e:
                assert "StoppedError" in str(e)
        monkeypatch.undo()
        for step in Remote("memory://stop").steps():
            found = Remote("memory://stop").pull(tmp_path / f"seen{step}", step, pytest.fail)
            assert verify(found) == []
        Remote("memory://stop").push(store.path(2))
        Remote("memory://stop").push(other, replace=True)
        assert value(Remote("memory://stop").pull(tmp_path / "end", 1, pytest.fail)) == 9.0
    finally:
        fs.store.clear()


@pytest.mark.parametrize("damage", ["missing", "short", "long", "bit", "manifest", "empty"])
def test_a_damaged_newest_is_told_and_the_one_before_is_pulled(store: Store, tmp_path: Path, damage: str) -> None:
    remote = tmp_path / "remote"
    for step in (1, 2):
        Remote(str(remote)).push(store.path(step))
    file = next((remote / "step-00000002").glob("*.safetensors"))
    content = file.read_bytes()
    if damage == "missing":
        file.unlink()
    elif damage in ("manifest", "empty"):
        (remote / "step-00000002" / "manifest.json").write_text("" if damage == "empty" else "{}")
    else:
        flipped = content[:-1] + bytes([content[-1] ^ 1])
        file.write_bytes({"short": content[:-1], "long": content + b"x", "bit": flipped}[damage])
    told: list[str] = []
    path = Remote(str(remote)).pull(tmp_path / "new", None, told.append)
    assert value(path) == 1.0
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["step-00000001"]
    assert len(told) == 1
    assert ("manifest.json" if damage in ("manifest", "empty") else file.name) in told[0]
    with pytest.raises(CheckpointError):
        Remote(str(remote)).pull(tmp_path / "other", 2, told.append)


def test_a_manifest_under_another_steps_name_is_refused(store: Store, tmp_path: Path) -> None:
    Remote(str(tmp_path / "remote")).push(store.path(1))
    (tmp_path / "remote" / "step-00000001").rename(tmp_path / "remote" / "step-00000009")
    with pytest.raises(CheckpointError, match="is of step 1"):
        Remote(str(tmp_path / "remote")).pull(tmp_path / "new", 9, pytest.fail)


def test_a_damaged_local_checkpoint_is_not_pushed(store: Store, url: str) -> None:
    next(store.path(2).glob("*.safetensors")).write_bytes(b"x")
    with pytest.raises(CheckpointError, match="is damaged"):
        Remote(url).push(store.path(2))
    assert Remote(url).steps() == []


def test_a_full_local_disk_is_named_and_leaves_nothing(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import samestep.checkpoint.remote as module

    Remote(str(tmp_path / "remote")).push(store.path(1))

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module, "_write", full)
    with pytest.raises(CheckpointError, match=r"step-00000001 could not be written: No space left on device"):
        Remote(str(tmp_path / "remote")).pull(tmp_path / "new", None, pytest.fail)
    assert [*(tmp_path / "new").iterdir()] == []


def test_a_mirror_pushes_what_is_lacking_and_keeps_the_last(store: Store, url: str) -> None:
    assert mirror(store.directory, url) == [1, 2, 3]
    assert mirror(store.directory, url, keep_last=2) == []
    assert Remote(url).steps() == [2, 3]
    assert mirror(store.directory, url, keep_last=1) == []
    assert Remote(url).steps() == [3]
    with pytest.raises(CheckpointError, match="is the only one"):
        Remote(url).delete(3)
    with pytest.raises(CheckpointError, match="pass 1 or more"):
        mirror(store.directory, url, keep_last=0)


def test_protocols_without_a_driver_or_a_name_are_refused_and_passwords_not_shown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(CheckpointError, match=r"cannot reach nosuch://host/x: Protocol not known"):
        Remote("nosuch://me:secret@host/x")
    monkeypatch.setitem(sys.modules, "fsspec", None)
    with pytest.raises(CheckpointError, match=r"pip install 'samestep\[remote\]'"):
        Remote("memory://x")


def test_the_command_line_pushes_lists_and_pulls(
    store: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, remote = str(store.directory.parent), str(tmp_path / "remote")
    assert main(["ckpt", "push", run, remote]) == 0
    assert main(["ckpt", "push", run, remote]) == 0
    assert capsys.readouterr().out == "step 3 pushed\nstep 3 was there already\n"
    assert main(["ckpt", "push", run, remote, "--all", "--keep-last", "2"]) == 0
    assert main(["ckpt", "pull", remote, "--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "pushed 1: 2"
    assert [line.split()[0] for line in lines[1:]] == ["2", "3"]
    assert main(["ckpt", "pull", remote, str(tmp_path / "again"), "--step", "2"]) == 0
    assert value(tmp_path / "again" / "checkpoints" / "step-00000002") == 2.0
    assert main(["ckpt", "pull", remote]) == 1
    assert main(["ckpt", "push", run, remote, "--keep-last", "2"]) == 1
    assert main(["ckpt", "pull", str(tmp_path / "nothing"), str(tmp_path / "again")]) == 1
    assert "holds no whole checkpoint" in capsys.readouterr().err
