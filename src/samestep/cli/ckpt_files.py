"""The parts of `samestep ckpt` that bring files in and out: export, import, push, pull."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from samestep.cli.main import one_line
from samestep.errors import CheckpointError, ConfigError

_SUFFIXES = {".safetensors": "safetensors", ".pt": "torch", ".pth": "torch", ".bin": "torch", ".ckpt": "torch"}

Add = Callable[[str, Callable[[argparse.Namespace], int], str, str], Any]


def add_arguments(add: Add) -> None:
    """Declare the commands; `add` makes a parser of a name, a function, a help text and an example."""
    _add_files(add)
    _add_remote(add)


def _add_files(add: Add) -> None:
    out = add(
        "export",
        _export,
        "write a model's weights as one file for other programs",
        "  samestep ckpt export runs/digits weights.safetensors --ema\n"
        "  samestep ckpt export runs/digits last.pt        # {'model', 'optimizer', 'epoch'}, loads with weights_only\n",
    )
    out.add_argument("run", type=Path, metavar="RUN", help="a run's directory, or one checkpoint's")
    out.add_argument("out", type=Path, metavar="FILE", help="ends in .safetensors, or in .pt for a file of torch.save")
    out.add_argument("--step", type=int, metavar="N", help="which of the run's (default: the newest whole one)")
    out.add_argument("--ema", action="store_true", help="the moving averages instead of the weights")
    out.add_argument("--model", type=int, default=0, metavar="N", help="which prepared model (default: 0)")
    out.add_argument("--prefix", default="", metavar="TEXT", help="put this before each name, such as model.")
    out.add_argument(
        "--long-keys", action="store_true", help="a .pt file's keys are model_state_dict and optimizer_state_dict"
    )
    out.add_argument("--force", action="store_true", help="replace FILE if it is there")

    into = add(
        "import",
        _import,
        "read another program's checkpoint: torch, safetensors, Accelerate, Lightning",
        "  samestep ckpt import last.ckpt weights.safetensors --strip-prefix model.\n"
        "  samestep ckpt import accelerate_dir runs/continued --epoch 3\n",
    )
    into.add_argument("source", type=Path, metavar="SOURCE", help="a file, or a directory of Accelerator.save_state")
    into.add_argument(
        "out", type=Path, metavar="OUT", help="FILE.safetensors: weights alone; a directory: a run to continue"
    )
    into.add_argument("--model", type=int, default=0, metavar="N", help="for a file: which model (default: 0)")
    into.add_argument(
        "--strip-prefix", default="", metavar="TEXT", help="take tensors whose names begin so, without it"
    )
    into.add_argument("--without-optimizer", action="store_true", help="for a run: weights, epoch and step alone")
    into.add_argument("--seed", type=int, default=0, help="for a run: the seed its script passes (default: 0)")
    into.add_argument(
        "--epoch", type=int, metavar="N", help="for a run: epochs finished (default: as SOURCE says, or 0)"
    )
    into.add_argument("--force", action="store_true", help="replace FILE if it is there")


def _add_remote(add: Add) -> None:
    up = add(
        "push",
        _push,
        "copy checkpoints to remote storage (S3 and others, through fsspec)",
        "  samestep ckpt push runs/digits s3://bucket/digits --all --keep-last 3\n",
    )
    up.add_argument("run", type=Path, metavar="RUN", help="a run's directory, or one checkpoint's")
    up.add_argument("url", metavar="URL", help="such as s3://bucket/folder; needs pip install 'samestep[remote]'")
    up.add_argument("--step", type=int, metavar="N", help="which of the run's (default: the newest whole one)")
    up.add_argument("--replace", action="store_true", help="replace another checkpoint of the same step")
    up.add_argument("--all", action="store_true", help="push every whole one that URL lacks")
    up.add_argument(
        "--keep-last", type=int, metavar="N", help="with --all: delete URL's oldest beyond N (default: none)"
    )

    down = add(
        "pull",
        _pull,
        "copy a checkpoint from remote storage into a run's directory",
        "  samestep ckpt pull s3://bucket/digits --list\n  samestep ckpt pull s3://bucket/digits runs/digits\n",
    )
    down.add_argument("url", metavar="URL", help="where it was pushed to")
    down.add_argument("run", type=Path, nargs="?", metavar="RUN", help="a run's directory, new or not")
    down.add_argument("--step", type=int, metavar="N", help="which (default: the newest that arrives whole)")
    down.add_argument("--list", action="store_true", help="say what URL holds, copy nothing")


def _push(arguments: argparse.Namespace) -> int:
    from samestep.checkpoint.remote import Remote, mirror
    from samestep.checkpoint.survey import checkpoint_directory, find

    if arguments.all:
        if arguments.step is not None or arguments.replace:
            raise ConfigError("got --all with --step or --replace", "--all pushes what URL lacks", "drop one of them")
        steps = mirror(checkpoint_directory(arguments.run), arguments.url, arguments.keep_last)
        print(f"pushed {len(steps)}: {', '.join(map(str, steps)) or 'all were there'}")
        return 0
    if arguments.keep_last is not None:
        raise ConfigError("got --keep-last without --all", "it is for copies of a whole run", "add --all")
    checkpoint = find(arguments.run, arguments.step)
    new = Remote(arguments.url).push(checkpoint.path, replace=arguments.replace)
    print(f"step {checkpoint.manifest.step} {'pushed' if new else 'was there already'}")
    return 0


def _pull(arguments: argparse.Namespace) -> int:
    from samestep.checkpoint.remote import Remote

    remote = Remote(arguments.url)
    if arguments.list:
        for step in remote.steps():
            manifest = remote.manifest(step)
            print(f"{step}  {manifest.created}  {sum(entry['bytes'] for entry in manifest.files.values())} bytes")
        return 0
    if arguments.run is None:
        raise ConfigError("got no RUN", "a checkpoint is copied into a run's directory", "pass one, or --list")
    path = remote.pull(
        arguments.run / "checkpoints", arguments.step, lambda text: print(one_line(text), file=sys.stderr)
    )
    print(f"{path}: whole")
    return 0


def _refuse_existing(out: Path, force: bool) -> None:
    if out.exists() and not force:
        raise CheckpointError(f"{out} is there", "a file is replaced only when asked", "pass --force or another name")


def _export(arguments: argparse.Namespace) -> int:
    from samestep.checkpoint.foreign import write_safetensors, write_torch_file
    from samestep.checkpoint.optimizer import number_optimizer
    from samestep.checkpoint.survey import find, meta_part
    from samestep.checkpoint.weights import load_whole, model_of

    out: Path = arguments.out
    kind = _SUFFIXES.get(out.suffix)
    if kind is None:
        raise ConfigError(f"got {out.name}", f"the file ends in one of {', '.join(_SUFFIXES)}", "rename it")
    _refuse_existing(out, arguments.force)
    checkpoint = find(arguments.run, arguments.step)
    state = load_whole(checkpoint)
    model = model_of(checkpoint, ema=arguments.ema, number=arguments.model, state=state)
    model = {f"{arguments.prefix}{name}": value for name, value in model.items()}
    manifest = checkpoint.manifest
    if kind == "safetensors":
        import torch

        odd = [name for name, value in model.items() if not isinstance(value, torch.Tensor)]
        if odd:
            raise CheckpointError(f"{odd[0]} is no tensor", "a safetensors file holds tensors only", "export to .pt")
        write_safetensors(out, model, {"samestep_step": str(manifest.step)})
    else:
        saved = state.get(f"optimizer{arguments.model}")
        epoch = meta_part(checkpoint, "position").get("epoch")
        optimizer = number_optimizer(saved) if saved is not None else None
        write_torch_file(out, model, optimizer, epoch, short_keys=not arguments.long_keys)
    what = "averages" if arguments.ema else "weights"
    print(f"{out}: {len(model)} tensors, the {what} of step {manifest.step}")
    return 0


def _import(arguments: argparse.Namespace) -> int:
    from samestep.checkpoint.adopt import adopt, strip_prefix
    from samestep.checkpoint.foreign import write_safetensors
    from samestep.checkpoint.peers import read_foreign

    out: Path = arguments.out
    if not arguments.source.exists():
        raise CheckpointError(f"{arguments.source} does not exist", "", "check the path")
    foreign = read_foreign(arguments.source)
    left: list[str] = []
    if out.suffix == ".safetensors":
        _refuse_existing(out, arguments.force)
        if not 0 <= arguments.model < len(foreign.models):
            raise ConfigError(f"got --model {arguments.model}", f"SOURCE has {len(foreign.models)}", "pass --model 0")
        model, left = strip_prefix(foreign.models[arguments.model], arguments.strip_prefix)
        write_safetensors(out, model, {"imported": foreign.kind})
        print(f"{out}: {len(model)} tensors from {foreign.kind}")
        print(f'load them with samestep.load_weights(model, "{out}") before run.prepare')
    else:
        if arguments.without_optimizer:
            foreign = dataclasses.replace(foreign, optimizers=[], schedules=[])
        if arguments.strip_prefix:
            foreign, left = _stripped(foreign, arguments.strip_prefix)
        path = adopt(foreign, out, seed=arguments.seed, epoch=arguments.epoch)
        epoch = arguments.epoch if arguments.epoch is not None else foreign.epoch
        parts = {"models": foreign.models, "optimizers": foreign.optimizers, "schedules": foreign.schedules}
        print(f"{path}: from {foreign.kind}: {', '.join(f'{len(part)} {name}' for name, part in parts.items())}")
        print(f"a run in {out} with seed={arguments.seed} continues at the start of epoch {epoch or 0}")
    for name in [f"{name}: does not begin with {arguments.strip_prefix!r}" for name in left] + foreign.unread:
        print(f"left out: {one_line(name)}")
    return 0


def _stripped(foreign: Any, prefix: str) -> tuple[Any, list[str]]:
    """Names without the prefix; the optimizers' parameters have numbers only, and those stay."""
    from samestep.checkpoint.adopt import strip_prefix

    models, left = [], []
    for model in foreign.models:
        kept, others = strip_prefix(model, prefix)
        models.append(kept)
        left += others
    return dataclasses.replace(foreign, models=models), left
