"""Look at a run's checkpoints, verify and compare them, bring weights in and out, delete old ones.

RUN is a run's directory, or one checkpoint's. Nothing runs code from a file. Exit codes: 0 done (diff: the same), 1 an
error or a damaged checkpoint (diff: different), 2 wrong usage (diff: also an error)."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from samestep.cli import ckpt_files
from samestep.cli.main import one_line
from samestep.errors import SamestepError

if TYPE_CHECKING:
    from samestep.checkpoint.compare import CheckpointDifference
    from samestep.checkpoint.storage import Checkpoint
    from samestep.checkpoint.survey import Entry

EXAMPLES = """\
examples:
  samestep ckpt ls runs/digits
  samestep ckpt show runs/digits --step 230
  samestep ckpt verify runs/digits
  samestep ckpt diff runs/digits runs/other
  samestep ckpt export runs/digits weights.safetensors --ema
  samestep ckpt import lightning.ckpt weights.safetensors --strip-prefix model.
  samestep ckpt prune runs/digits --keep-last 1 --dry-run
  samestep ckpt push runs/digits s3://bucket/digits

`samestep ckpt ls --help` and so on have each one's flags.
"""

_RUN = "a run's directory, or one checkpoint's"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's flags."""
    subs = parser.add_subparsers(dest="sub", required=True, metavar="COMMAND", title="commands")

    def add(name: str, run: Callable[[argparse.Namespace], int], help_text: str, example: str) -> Any:
        text = f"{help_text[0].upper()}{help_text[1:]}."
        sub = subs.add_parser(name, help=help_text, description=text, epilog=f"examples:\n{example}")
        sub.set_defaults(do=run)
        return sub

    ls = add("ls", _ls, "list the checkpoints, whole or not", "  samestep ckpt ls runs/digits --json\n")
    ls.add_argument("run", type=Path, metavar="RUN", help="a run's directory")
    ls.add_argument("--digests", action="store_true", help="read the files and compare digests, not sizes alone")
    _json_flag(ls)

    show = add(
        "show", _show, "say what a checkpoint holds", "  samestep ckpt show runs/digits --step 230 --tensors all\n"
    )
    show.add_argument("run", type=Path, metavar="RUN", help=_RUN)
    _step_flag(show)
    show.add_argument("--tensors", choices=("models", "all", "none"), default="models", help="(default: models)")
    _json_flag(show)

    check = add("verify", _verify, "read every file and compare digests", "  samestep ckpt verify runs/digits\n")
    check.add_argument("run", type=Path, metavar="RUN", help=_RUN)
    _step_flag(check, "(default: all)")
    _json_flag(check)

    differ = add(
        "diff",
        _diff,
        "compare two checkpoints, tensor by tensor",
        "  samestep ckpt diff runs/a runs/b\n"
        "  samestep ckpt diff runs/a/checkpoints/step-00000100 runs/a/checkpoints/step-00000200\n",
    )
    for name in ("a", "b"):
        differ.add_argument(name, type=Path, metavar=name.upper(), help=_RUN)
    _step_flag(differ)
    differ.add_argument("--top", type=int, default=20, metavar="N", help="tensors to show (default: 20)")
    _json_flag(differ)

    delete = add(
        "prune",
        _prune,
        "delete old checkpoints, never the newest whole one",
        "  samestep ckpt prune runs/digits --keep-last 1 --dry-run\n",
    )
    delete.add_argument("run", type=Path, metavar="RUN", help="a run's directory")
    delete.add_argument("--keep-last", type=int, metavar="N", help="whole ones to keep (default: as the run kept)")
    delete.add_argument("--damaged", action="store_true", help="delete those that are not whole too")
    delete.add_argument("--dry-run", action="store_true", help="say what would go, delete nothing")

    ckpt_files.add_arguments(add)


def _step_flag(parser: argparse.ArgumentParser, default: str = "(default: the newest whole one)") -> None:
    parser.add_argument("--step", type=int, metavar="N", help=f"which of the run's {default}")


def _json_flag(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON instead")


def run(arguments: argparse.Namespace) -> int:
    """Run the command; its exit code."""
    return int(arguments.do(arguments))


def _print_json(value: Any) -> None:
    print(json.dumps(value, indent=2, default=str))


def _table(*headings: str) -> Any:
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for heading in headings:
        table.add_column(heading, overflow="fold", justify="right" if heading in ("step", "size") else "left")
    return table


def _console() -> Any:
    from rich.console import Console

    console = Console(highlight=False, soft_wrap=True)
    if not console.is_terminal:
        console.width = 240  # for a pipe, a row is a line
    return console


def _escape(value: Any) -> str:
    from rich.markup import escape

    return escape(one_line(value))


def size_text(num_bytes: int) -> str:
    """Such as 1.5 MB."""
    size = float(num_bytes)
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"


# ls -------------------------------------------------------------------------------------------------------------------


def _ls(arguments: argparse.Namespace) -> int:
    from samestep.checkpoint.survey import checkpoint_directory, entries

    directory = checkpoint_directory(arguments.run)
    found = entries(directory, digests=arguments.digests)
    newest = next((entry for entry in reversed(found) if entry.checkpoint is not None), None)
    rows = [_row(entry, entry is newest) for entry in found]
    if arguments.json:
        _print_json(rows)
        return 0
    table = _table("step", "time (UTC)", "size", "whole", "precision", "ranks", "")
    for row in rows:
        whole = "yes" if row["fault"] is None else f"NO: {row['fault']}"
        values = (row["step"], row["created"], size_text(row["bytes"]), whole, row["precision"], row["world_size"])
        marks = ", ".join(row["marks"])
        table.add_row(*(_escape("?" if value is None else value) for value in values), _escape(marks))
    console = _console()
    console.print(f"{directory}: {len(rows)} checkpoint{'s' * (len(rows) != 1)}", markup=False)
    if rows:
        console.print(table)
    if rows and not arguments.digests:
        console.print("(by manifest and sizes; `samestep ckpt verify` compares digests)", markup=False)
    for left in sorted(directory.glob(".tmp-step-*")):
        console.print(f"not finished, not used: {left.name}", markup=False)
    return 0


def _row(entry: Entry, newest: bool) -> dict[str, Any]:
    manifest = entry.checkpoint.manifest if entry.checkpoint is not None else None
    meta = manifest.meta if manifest is not None else {}
    marks = ["last"] if newest else []
    return {
        "step": entry.step,
        "path": str(entry.path),
        "created": manifest.created if manifest is not None else None,
        "bytes": entry.num_bytes,
        "fault": entry.fault,
        "precision": meta.get("precision"),
        "world_size": meta.get("world_size"),
        "marks": marks,
    }


# show -----------------------------------------------------------------------------------------------------------------


def _show(arguments: argparse.Namespace) -> int:
    from samestep.checkpoint.survey import find

    checkpoint = find(arguments.run, arguments.step)
    found = _contents(checkpoint, arguments.tensors)
    if arguments.json:
        _print_json(found)
        return 0
    console = _console()
    for name in ("path", "step", "created", "versions", "precision", "world_size", "position", "config", "files"):
        console.print(f"{name:<12}{_plain(found[name])}", markup=False)
    for name, values in [*found["loaders"].items(), *found["values"].items()]:
        console.print(f"{_plain(name):<12}{_plain(values)}", markup=False)
    if found["tensors"]:
        table = _table("tensor", "dtype", "shape", "size", "")
        for info in found["tensors"]:
            same = f"= {info['same_as']}" if info["same_as"] else ""
            shape = " x ".join(map(str, info["shape"])) or "scalar"
            table.add_row(*map(_escape, (info["name"], info["dtype"], shape, size_text(info["num_bytes"]), same)))
        console.print(table)
    total = found["total"]
    console.print(f"{total['tensors']} tensors, {size_text(total['bytes'])}", markup=False)
    return 0


def _contents(checkpoint: Checkpoint, which: str) -> dict[str, Any]:
    from samestep.checkpoint.survey import meta_part, outline, tensor_infos

    manifest, infos = checkpoint.manifest, tensor_infos(checkpoint)
    shown = [info for info in infos if which == "all" or (which == "models" and info.name.startswith("model"))]
    meta = manifest.meta
    return {
        "path": str(checkpoint.path),
        "step": manifest.step,
        "created": manifest.created,
        "versions": manifest.versions,
        "precision": meta.get("precision"),
        "world_size": meta.get("world_size"),
        "position": meta.get("position"),
        "loaders": meta_part(checkpoint, "loaders"),
        "config": meta_part(checkpoint, "config"),
        "files": {name: entry["bytes"] for name, entry in manifest.files.items()},
        "values": {name: _without_tensors(part) for name, part in outline(checkpoint).items()},
        "tensors": [dataclasses.asdict(info) for info in shown],
        "total": {"tensors": len(infos), "bytes": sum(info.num_bytes for info in infos if info.same_as is None)},
    }


def _without_tensors(value: Any) -> Any:
    """The state's numbers and text; of tensors, how many and how large."""
    from samestep.checkpoint.survey import TensorInfo

    if isinstance(value, list):
        return [_without_tensors(item) for item in value]
    if not isinstance(value, dict):
        return value
    infos = list(_tensors_of(value))
    plain = {
        name: _without_tensors(item)
        for name, item in value.items()
        if not isinstance(item, TensorInfo) and not (isinstance(item, dict) and item and all(_tensor_only(item)))
    }
    size = size_text(sum(info.num_bytes for info in infos if info.same_as is None))
    return {**plain, "tensors": f"{len(infos)}, {size}"} if infos else plain


def _tensors_of(value: Any) -> Any:
    from samestep.checkpoint.survey import TensorInfo

    if isinstance(value, TensorInfo):
        yield value
    elif isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _tensors_of(item)


def _tensor_only(value: dict[str, Any]) -> Any:
    from samestep.checkpoint.survey import TensorInfo

    for item in value.values():
        yield isinstance(item, TensorInfo) or (isinstance(item, dict) and bool(item) and all(_tensor_only(item)))


def _plain(value: Any) -> str:
    if isinstance(value, dict):
        text = ", ".join(
            f"{_plain(name)} {_plain(item) if item is not None else 'none'}" for name, item in value.items()
        )
        return text[:400] + ("..." if len(text) > 400 else "")
    if isinstance(value, list):
        text = ", ".join(_plain(item) if not isinstance(item, dict) else f"({_plain(item)})" for item in value[:8])
        return f"[{text}{', ...' if len(value) > 8 else ''}]"
    return "?" if value is None else one_line(value)


# verify ---------------------------------------------------------------------------------------------------------------


def _verify(arguments: argparse.Namespace) -> int:
    from samestep.checkpoint.survey import checkpoint_directory, entries, fault
    from samestep.errors import CheckpointError

    target: Path = arguments.run
    if (target / "manifest.json").exists():
        results = {str(target): "; ".join(fault(target)) or None}
    else:
        directory = checkpoint_directory(target)
        results = {str(entry.path): entry.fault for entry in entries(directory, digests=True, only=arguments.step)}
        if not results:
            raise CheckpointError(f"{directory} holds no such checkpoint", "", "see samestep ckpt ls")
    if arguments.json:
        _print_json(results)
    else:
        for path, wrong in results.items():
            print(f"{_plain(path)}: {'whole' if wrong is None else f'DAMAGED: {_plain(wrong)}'}")
    return int(any(wrong is not None for wrong in results.values()))


# diff -----------------------------------------------------------------------------------------------------------------


def _diff(arguments: argparse.Namespace) -> int:
    from samestep.checkpoint.compare import compare
    from samestep.checkpoint.survey import find

    try:
        found = compare(find(arguments.a, arguments.step), find(arguments.b, arguments.step))
    except SamestepError as e:
        if os.environ.get("SAMESTEP_TRACEBACK") == "1":
            raise
        print("samestep ckpt diff: error:", one_line(e), file=sys.stderr)  # 1 would say "different"
        return 2
    if arguments.json:
        _print_json({"same": found.same, **dataclasses.asdict(found)})
    else:
        _show_difference(found, arguments.top)
    return 0 if found.same else 1


def _show_difference(found: CheckpointDifference, top: int) -> None:
    console = _console()
    total = found.num_same + len(found.tensors)
    console.print(f"{found.num_same} of {total} tensors are the same to the bit", markup=False)
    if found.tensors:
        table = _table("tensor", "A", "B", "differs in", "largest", "relative")
        worst = sorted(found.tensors, key=lambda t: (t.what == "values", -(t.relative or 0.0)))
        for t in worst[:top]:
            what = f"{t.num_different} of {t.num_elements} values" if t.what == "values" else t.what
            numbers = ["" if value is None else f"{value:.1e}" for value in (t.absolute, t.relative)]
            table.add_row(*map(_escape, (t.name, t.a, "=" if t.a == t.b else t.b, what, *numbers)))
        console.print(table)
        if len(worst) > top:
            console.print(f"and {len(worst) - top} more; --top {len(worst)} shows all", markup=False)
    for title, pairs in (("state", found.values), ("settings", found.settings)):
        for name, (a, b) in list(pairs.items())[:top]:
            console.print(f"{title}: {_plain(name)}: {_plain(a)} / {_plain(b)}", markup=False)
        if len(pairs) > top:
            console.print(f"{title}: and {len(pairs) - top} more", markup=False)


# prune ----------------------------------------------------------------------------------------------------------------


def _prune(arguments: argparse.Namespace) -> int:
    from samestep.checkpoint.prune import plan_pruning, prune
    from samestep.checkpoint.survey import checkpoint_directory

    directory = checkpoint_directory(arguments.run)
    doomed, num_kept = plan_pruning(directory, arguments.keep_last, damaged=arguments.damaged)
    if not arguments.dry_run:
        prune(doomed)
    verb = "would delete" if arguments.dry_run else "deleted"
    for entry in doomed:
        print(f"{verb} {entry.path.name} ({size_text(entry.num_bytes)}){' DAMAGED' if entry.fault else ''}")
    total = size_text(sum(entry.num_bytes for entry in doomed))
    print(f"{verb} {len(doomed)} ({total}), {'keeps' if arguments.dry_run else 'kept'} {num_kept} whole")
    return 0
