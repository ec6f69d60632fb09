"""`samestep ckpt`: what it prints and its exit codes, on a real run's checkpoints, whole, damaged and hostile."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

import samestep
from samestep.checkpoint.storage import Checkpoint, Store
from samestep.cli import ckpt as cli
from samestep.cli.main import Parser, main


class Net(nn.Module):
    """A tied weight, and buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(4, 4, bias=False)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 4)
        self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.embed(x)))


def train(directory: Path, epochs: int = 3, seed: int = 0, net: nn.Module | None = None) -> dict[str, torch.Tensor]:
    """The final weights, and the averages under "ema"."""
    torch.manual_seed(seed)
    net = net or Net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    with samestep.Run(directory, precision="fp32", seed=seed, progress=False) as run:
        model, optimizer, schedule = run.prepare(net, optimizer, schedule)
        ema = run.ema(model, 0.5)
        loader = run.loader((torch.arange(40.0).reshape(10, 4), torch.arange(10) % 4), batch_size=5, shuffle=True)
        for _ in run.epochs(epochs):
            for window in loader:
                for x, y in window:
                    window.backward(nn.functional.cross_entropy(model(x), y))
                window.step()
        averages = dict(zip([name for name, _ in net.named_parameters()], ema.averages, strict=True))
        return {name: value.clone() for name, value in net.state_dict().items()} | {"ema": averages}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    directory = tmp_path_factory.mktemp("made") / "run"
    return directory, train(directory)


@pytest.fixture
def run_dir(made: tuple[Path, dict[str, Any]], tmp_path: Path) -> Path:
    """A copy to damage."""
    shutil.copytree(made[0], tmp_path / "run")
    return tmp_path / "run"


def checkpoint(run_dir: Path, number: int = -1) -> Path:
    return sorted((run_dir / "checkpoints").iterdir())[number]


def ckpt(*words: object) -> int:
    return main(["ckpt", *map(str, words)])


def test_ls_has_a_row_for_each_checkpoint_and_marks_the_last(
    made: tuple[Path, dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert ckpt("ls", made[0]) == 0
    out = capsys.readouterr().out
    assert "3 checkpoints" in out
    rows = [line.split() for line in out.splitlines()[2:5]]
    assert [(row[0], *row[4:]) for row in rows] == [
        ("2", "yes", "fp32", "1"),
        ("4", "yes", "fp32", "1"),
        ("6", "yes", "fp32", "1", "last"),
    ]
    assert ckpt("ls", made[0] / "checkpoints", "--json") == 0
    assert [row["step"] for row in json.loads(capsys.readouterr().out)] == [2, 4, 6]


def test_ls_names_the_fault_of_a_damaged_one_and_marks_the_one_before(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (checkpoint(run_dir) / "manifest.json").unlink()
    (run_dir / "checkpoints" / ".tmp-step-00000008-1").mkdir()
    assert ckpt("ls", run_dir) == 0
    out = capsys.readouterr().out
    assert "NO: manifest.json: No such file or directory" in out
    assert next(line for line in out.splitlines() if "last" in line).split()[0] == "4"
    assert "not finished, not used: .tmp-step-00000008-1" in out


def test_show_names_parts_tensors_position_and_tied_weights(
    made: tuple[Path, dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert ckpt("show", made[0], "--step", 4) == 0
    out = capsys.readouterr().out
    for words in ("step        4", "epoch 2", "lr 0.0", "schedule0", "ema0", "model0.embed.weight"):
        assert words in out
    row = next(line for line in out.splitlines() if line.startswith("model0.head.weight"))
    assert row.split()[1:5] == ["F32", "4", "x", "4"]
    assert "= model0.embed.weight" in row
    assert ckpt("show", checkpoint(made[0]), "--json", "--tensors", "all") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["step"] == 6
    assert found["total"]["tensors"] == len(found["tensors"])
    assert {"config", "files", "loaders", "position", "values"} <= found.keys()


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


def test_verify_exits_with_1_and_names_file_and_cause(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert ckpt("verify", run_dir) == 0
    assert capsys.readouterr().out.count(": whole") == 3
    files = [file for file in checkpoint(run_dir, 1).iterdir() if file.suffix == ".safetensors"]
    flip(files[0])
    assert ckpt("verify", run_dir) == 1
    out = capsys.readouterr().out
    assert f"step-00000004: DAMAGED: {files[0].name} has other bytes than were written (sha256 differs)" in out
    assert out.count(": whole") == 2
    assert ckpt("verify", run_dir, "--step", 6) == 0
    assert ckpt("verify", checkpoint(run_dir, 1)) == 1
    assert ckpt("ls", run_dir, "--digests") == 0
    assert "sha256 differs" in capsys.readouterr().out


def test_diff_says_which_tensors_how_far_and_which_settings(
    made: tuple[Path, dict[str, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ckpt("diff", made[0], made[0]) == 0
    train(tmp_path / "other", seed=1)
    capsys.readouterr()
    assert ckpt("diff", made[0], tmp_path / "other") == 1
    out = capsys.readouterr().out
    for words in (
        "5 of 24 tensors are the same",
        "model0.embed.weight",
        "16 of 16 values",
        "settings: config.seed: 0 / 1",
    ):
        assert words in out, out
    assert "config.directory" not in out
    assert ckpt("diff", made[0], tmp_path / "other", "--json") == 1
    assert json.loads(capsys.readouterr().out)["same"] is False
    assert ckpt("diff", made[0], tmp_path / "none") == 2


def test_prune_deletes_what_it_said_and_never_the_newest_whole_one(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for file in checkpoint(run_dir).glob("*.safetensors"):
        flip(file)  # of the right size: only its digest tells
    assert ckpt("prune", run_dir, "--keep-last", 1, "--dry-run") == 0
    assert "would delete step-00000002" in capsys.readouterr().out
    assert len(list((run_dir / "checkpoints").iterdir())) == 3
    assert ckpt("prune", run_dir, "--keep-last", 1) == 0
    assert [path.name for path in sorted((run_dir / "checkpoints").iterdir())] == ["step-00000004", "step-00000006"]
    assert ckpt("prune", run_dir, "--keep-last", 1, "--damaged") == 0
    assert [path.name for path in (run_dir / "checkpoints").iterdir()] == ["step-00000004"]
    flip(next(checkpoint(run_dir).glob("*.safetensors")))
    capsys.readouterr()
    assert ckpt("prune", run_dir, "--damaged") == 1
    assert "is whole" in capsys.readouterr().err
    assert checkpoint(run_dir).exists()


def test_prune_keeps_what_the_run_kept_unless_told(made: tuple[Path, dict[str, Any]], run_dir: Path) -> None:
    assert ckpt("prune", run_dir) == 0
    assert len(list((run_dir / "checkpoints").iterdir())) == 3
    assert ckpt("prune", run_dir, "--keep-last", 0) == 1


def test_exports_load_in_torch_and_safetensors(made: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    run_dir, final = made
    assert ckpt("export", run_dir, tmp_path / "w.safetensors") == 0
    plain = safetensors.torch.load_file(tmp_path / "w.safetensors")
    Net().load_state_dict(plain, strict=True)
    assert all(torch.equal(plain[name], final[name]) for name in plain)
    assert ckpt("export", run_dir, tmp_path / "w.pt", "--prefix", "model.") == 0
    content = torch.load(tmp_path / "w.pt", weights_only=True)
    assert sorted(content) == ["epoch", "model", "optimizer"]
    assert content["epoch"] == 3
    assert all(name.startswith("model.") for name in content["model"])
    optimizer = torch.optim.AdamW(Net().parameters())
    optimizer.load_state_dict(content["optimizer"])
    assert len(optimizer.state) == 4
    assert ckpt("export", run_dir, tmp_path / "e.safetensors", "--ema", "--step", 6) == 0
    averages = safetensors.torch.load_file(tmp_path / "e.safetensors")
    assert torch.equal(averages["embed.weight"], final["ema"]["embed.weight"])
    assert torch.equal(averages["head.weight"], averages["embed.weight"])
    assert torch.equal(averages["norm.running_mean"], final["norm.running_mean"])


def test_an_export_replaces_nothing_unasked_and_knows_its_endings(
    made: tuple[Path, dict[str, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "w.pt").write_text("mine")
    assert ckpt("export", made[0], tmp_path / "w.pt") == 1
    assert (tmp_path / "w.pt").read_text() == "mine"
    assert ckpt("export", made[0], tmp_path / "w.pt", "--force", "--long-keys") == 0
    assert "model_state_dict" in torch.load(tmp_path / "w.pt", weights_only=True)
    assert ckpt("export", made[0], tmp_path / "w.onnx") == 1
    assert "ends in one of .safetensors" in capsys.readouterr().err
    assert ckpt("export", made[0], tmp_path / "x.pt", "--model", 3) == 1


def test_an_export_is_imported_again_and_the_run_goes_on_as_the_first(
    made: tuple[Path, dict[str, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Plain(nn.Linear):
        pass

    def go(directory: Path, epochs: int) -> torch.Tensor:
        torch.manual_seed(0)
        net = Plain(4, 4)
        with samestep.Run(directory, precision="fp32", progress=False) as run:
            model, _ = run.prepare(net, torch.optim.AdamW(net.parameters(), lr=0.01))
            loader = run.loader((torch.arange(40.0).reshape(10, 4), torch.arange(10) % 4), batch_size=5, shuffle=True)
            for _ in run.epochs(epochs):
                for window in loader:
                    for x, y in window:
                        window.backward(nn.functional.cross_entropy(model(x), y))
                    window.step()
            return net.weight.detach().clone()

    whole = go(tmp_path / "whole", 4)
    go(tmp_path / "half", 2)
    assert ckpt("export", tmp_path / "half", tmp_path / "half.pt") == 0
    assert ckpt("import", tmp_path / "half.pt", tmp_path / "again") == 0
    assert "continues at the start of epoch 2" in capsys.readouterr().out
    assert torch.equal(go(tmp_path / "again", 4), whole)
    assert ckpt("import", tmp_path / "half.pt", tmp_path / "again") == 1
    assert "first checkpoint of a run" in capsys.readouterr().err


def test_an_import_into_a_file_takes_a_prefix_away_and_says_what_it_left(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.save({"state_dict": {"model.w": torch.ones(2), "loss.w": torch.ones(1)}}, tmp_path / "x.ckpt")
    assert ckpt("import", tmp_path / "x.ckpt", tmp_path / "w.safetensors", "--strip-prefix", "model.") == 0
    assert [*safetensors.torch.load_file(tmp_path / "w.safetensors")] == ["w"]
    assert "left out: loss.w" in capsys.readouterr().out
    assert ckpt("import", tmp_path / "x.ckpt", tmp_path / "v.safetensors", "--strip-prefix", "net.") == 1


COMMANDS = ["ls", "show", "verify", "prune", "export", "diff"]


def words_for(command: str, target: Path, tmp_path: Path) -> list[object]:
    return [command, target, *{"export": [tmp_path / "out.pt"], "diff": [target]}.get(command, [])]


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("kind", ["missing", "file", "empty", "other"])
def test_what_is_no_run_is_refused_in_one_line(
    command: str, kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "target"
    if kind == "file":
        target.write_text("hello")
    elif kind != "missing":
        target.mkdir()
        if kind == "other":
            (target / "checkpoints").write_text("a file")
    assert ckpt(*words_for(command, target, tmp_path)) == (2 if command == "diff" else 1)
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert str(target) in error


def hostile_link(path: Path) -> None:
    secret = path.parent.parent / "secret"
    file = next(path.glob("*.safetensors"))
    file.rename(secret)
    file.symlink_to(secret)


def hostile_manifest_link(path: Path) -> None:
    (path / "manifest.json").rename(path.parent.parent / "m")
    (path / "manifest.json").symlink_to(path.parent.parent / "m")


def hostile_pipe(path: Path) -> None:
    file = next(path.glob("*.safetensors"))
    file.unlink()
    os.mkfifo(file)


def hostile_pipe_manifest(path: Path) -> None:
    (path / "manifest.json").unlink()
    os.mkfifo(path / "manifest.json")


def hostile_directory(path: Path) -> None:
    (path / "manifest.json").unlink()
    (path / "manifest.json").mkdir()


def hostile_huge_manifest(path: Path) -> None:
    with (path / "manifest.json").open("ab") as file:
        file.truncate(1 << 40)  # sparse


def hostile_nesting(path: Path) -> None:
    (path / "manifest.json").write_text("[" * 1_000_000)


def hostile_types(path: Path) -> None:
    (path / "manifest.json").write_text('{"schema": 1, "files": [], "step": "x"}')


HOSTILE = [function for name, function in sorted(globals().items()) if name.startswith("hostile_")]


@pytest.mark.parametrize("hostile", HOSTILE, ids=lambda function: function.__name__)
def test_links_pipes_and_monsters_are_refused_in_one_line_and_wait_for_nothing(
    hostile: Any, run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = checkpoint(run_dir)
    hostile(path)
    assert ckpt("verify", run_dir) == 1
    out = capsys.readouterr().out
    assert out.count("DAMAGED") == 1
    assert len(out) < 2000
    assert ckpt("ls", run_dir) == 0
    for command in ("show", "export", "diff"):
        assert ckpt(*words_for(command, path, tmp_path)) == (2 if command == "diff" else 1)
        assert capsys.readouterr().err.count("\n") == 1
    assert ckpt("show", run_dir) == 0  # the one before it
    assert "step        4" in capsys.readouterr().out


def forge(path: Path, **fields: Any) -> None:
    """Other fields of a manifest, with a right digest: what an attacker, or a bug, would write."""
    old = Checkpoint.open(path).manifest
    (path / "manifest.json").write_text(dataclasses.replace(old, **fields).to_text())


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5)
    | st.sampled_from(["model0", "tensor", "model0.w", "F32", "sharded"]),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(st.sampled_from(["model0", "ema0", "averages", "config", "x"]), inner, max_size=3)
    | st.fixed_dictionaries(
        {"$": st.sampled_from(["tensor", "sharded", "dict", "tuple", "float", "scalar", "bytes", "no"]), "is": inner},
        optional={"dtype": inner, "shape": inner},
    ),
    max_leaves=8,
)  # fmt: skip
META = st.dictionaries(st.sampled_from(["config", "position", "loaders", "precision", "world_size", "layout"]), JSON)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(state=JSON, meta=META, aliases=st.dictionaries(st.text(max_size=3), st.just("model0.w"), max_size=2))
def test_whatever_a_manifest_says_each_command_ends_with_a_line(
    tmp_path: Path, state: Any, meta: Any, aliases: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.rmtree(tmp_path, ignore_errors=True)
    path = Store(tmp_path / "checkpoints").save(1, {"model0": {"w": torch.zeros(2)}}, {})
    forge(path, state=state, meta=meta, aliases=aliases)
    for command in COMMANDS:
        assert ckpt(*words_for(command, tmp_path, tmp_path)) in (0, 1, 2)
        captured = capsys.readouterr()
        assert captured.err.count("\n") <= 1
        assert "\x1b" not in captured.out


@pytest.mark.parametrize("name", ["../secret", "/etc/passwd", "a/b", "..", ".hidden", ""])
def test_a_manifest_that_names_a_file_elsewhere_is_refused(
    run_dir: Path, tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = checkpoint(run_dir)
    forge(path, files={name: {"bytes": 1, "sha256": "0" * 64}})
    assert ckpt("verify", path) == 1
    assert "is not a plain file name" in capsys.readouterr().out
    assert ckpt("push", path, tmp_path / "remote") == 1
    assert not (tmp_path / "remote").exists()


def test_an_import_of_a_file_with_code_runs_nothing_and_is_refused_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Code:
        def __reduce__(self) -> Any:
            return (exec, (f"open({str(tmp_path / 'ran')!r}, 'w').close()",))

    torch.save({"model": {"w": torch.zeros(1)}, "x": Code()}, tmp_path / "w.pt")
    for out in ("out.safetensors", "run"):
        assert ckpt("import", tmp_path / "w.pt", tmp_path / out) == 1
        assert "loading runs no code" in capsys.readouterr().err
        assert not (tmp_path / out).exists()
    assert not (tmp_path / "ran").exists()


def test_a_checkpoint_that_is_a_link_is_not_followed_nor_its_target_deleted(run_dir: Path) -> None:
    outside = run_dir / "outside"
    checkpoint(run_dir, 0).rename(outside)
    (run_dir / "checkpoints" / "step-00000002").symlink_to(outside)
    assert ckpt("verify", run_dir) == 1
    assert ckpt("prune", run_dir, "--keep-last", 1) == 0
    assert sorted(file.suffix for file in outside.iterdir()) == [".json", ".safetensors"]


def test_a_name_cannot_write_to_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Store(tmp_path / "checkpoints").save(
        1, {"model0": {"\x1b[2Jw": torch.zeros(1)}, "\x1b]0;x": 1}, {"precision": "\x1b[31m"}
    )
    for command in ("ls", "show"):
        assert ckpt(command, tmp_path) == 0
        assert "\x1b" not in capsys.readouterr().out
    torch.save({"\x1b[2Jw": torch.zeros(1), "\x1b]0;y": 1}, tmp_path / "w.pt")
    assert ckpt("import", tmp_path / "w.pt", tmp_path / "out") == 1
    assert "\x1b" not in capsys.readouterr().err


def test_the_pages_commands_are_commands() -> None:
    page = (Path(__file__).parents[2] / "docs/ckpt.md").read_text()
    lines = re.findall(r"^(?:    |\$ )samestep (ckpt .*)$", page, re.MULTILINE)
    assert len(lines) >= 8
    parser = Parser("samestep ckpt", None, "")
    cli.add_arguments(parser)
    for line in lines:
        assert callable(parser.parse(shlex.split(line)[1:]).do)
    assert {*re.findall(r"^\| `samestep ckpt (\w+)", page, re.MULTILINE)} == {*COMMANDS, "import", "push", "pull"}


@pytest.mark.parametrize("words", [[], ["nosuch"], ["ls"], ["prune", "x", "--keep-last", "many"]])
def test_wrong_usage_exits_with_2(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        ckpt(*words)
    assert caught.value.code == 2


@pytest.mark.parametrize("command", [*COMMANDS, "import", "push", "pull"])
def test_each_command_has_help_with_an_example(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        ckpt(command, "--help")
    assert caught.value.code == 0
    assert f"samestep ckpt {command} " in capsys.readouterr().out.partition("examples:")[2]
